"""`QuantReport`: what `fulgurite.quantize` did.

It prints as a table: bytes before and after and the SQNR of each layer's weight, then the
parameters that were skipped, with reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fulgurite.quant.config import QuantConfig


@dataclass(frozen=True)
class LayerReport:
    """One quantized weight: bytes before and after, and its SQNR in dB."""

    name: str
    shape: tuple[int, ...]
    format: str
    activations: str
    bytes_before: int
    bytes_after: int
    sqnr_db: float


@dataclass(frozen=True)
class SkippedParameter:
    """A parameter that was not quantized."""

    name: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class QuantReport:
    """The result of `fulgurite.quantize`. `print(report)` shows a table."""

    config: QuantConfig
    layers: tuple[LayerReport, ...]
    skipped: tuple[SkippedParameter, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("layer", "shape", "format", "activations", "before", "after", "SQNR dB")
        ]
        for layer in self.layers:
            shape = "x".join(map(str, layer.shape))
            sizes = (_format_bytes(layer.bytes_before), _format_bytes(layer.bytes_after))
            rows.append(
                (
                    layer.name,
                    shape,
                    layer.format,
                    layer.activations,
                    *sizes,
                    f"{layer.sqnr_db:.1f}",
                )
            )
        lines = _align_columns(rows) if self.layers else []
        if self.skipped:
            rows = [("not quantized", "bytes", "reason")]
            rows += [(item.name, _format_bytes(item.nbytes), item.reason) for item in self.skipped]
            lines += ["", *_align_columns(rows)] if lines else _align_columns(rows)
        count = "1 layer" if len(self.layers) == 1 else f"{len(self.layers)} layers"
        ratio = self.bytes_before / max(1, self.bytes_after)
        before, after = _format_bytes(self.bytes_before), _format_bytes(self.bytes_after)
        total = f"{before} -> {after}, {ratio:.2f}x smaller"
        return "\n".join([*lines, "", f"{count} quantized: {total}"])


def _format_bytes(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
