"""How a model is to be quantized, and what came of it: `Recipe` in, `Report` out of `fulgurite.quantize`.

A report prints as a table: bytes before and after and the weight's signal to noise for each layer,
then what stayed as it was, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """How to quantize: the format of weights, what becomes of activations.

    `activations`: None is what the device does best, "none" leaves them as they are, a format is
    applied to them on the fly. With `static` their scale is measured on the batches of `calibrate`.
    """

    weights: str
    activations: str | None = None
    static: bool = False


RECIPES: dict[str, Recipe] = {
    "fp8": Recipe("fp8_e4m3_row"),
    "fp8_static": Recipe("fp8_e4m3_row", "fp8_e4m3_tensor", static=True),
    "nvfp4": Recipe("nvfp4"),
    "mxfp4": Recipe("mxfp4"),
    "mxfp8": Recipe("mxfp8_e4m3"),
    "int8": Recipe("int8"),
    "int4": Recipe("int4_g128"),
}


@dataclass(frozen=True)
class LayerReport:
    """One linear: its bytes before and after, and the weight's signal to noise in dB."""

    name: str
    shape: tuple[int, ...]
    format: str
    activations: str
    before: int
    after: int
    decibels: float


@dataclass(frozen=True)
class Skipped:
    """A parameter that stayed as it was."""

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Report:
    """What `quantize` did. `print(report)` is a table."""

    recipe: Recipe
    layers: tuple[LayerReport, ...]
    skipped: tuple[Skipped, ...]
    before: int
    after: int

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "shape", "format", "activations", "before", "after", "dB")
        ]
        for layer in self.layers:
            shape = "x".join(map(str, layer.shape))
            sizes = (_size(layer.before), _size(layer.after))
            rows.append(
                (
                    layer.name,
                    shape,
                    layer.format,
                    layer.activations,
                    *sizes,
                    f"{layer.decibels:.1f}",
                )
            )
        lines = _aligned(rows) if self.layers else []
        if self.skipped:
            rows = [("kept as it is", "bytes", "why")]
            rows += [(one.name, _size(one.bytes), one.why) for one in self.skipped]
            lines += ["", *_aligned(rows)] if lines else _aligned(rows)
        count = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        ratio = self.before / max(1, self.after)
        total = f"{_size(self.before)} -> {_size(self.after)}, {ratio:.2f}x smaller"
        return "\n".join([*lines, "", f"{count} quantized: {total}"])


def _size(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
