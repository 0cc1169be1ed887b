"""`quantize` on the CPU against a copy of the same bytes, into preallocated memory.

In: nothing. Out, for each format and dtype of x: the time of a cast, and of a copy that moves as many bytes, measured
in turns. x exceeds all caches.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fulgurite import timing
from fulgurite.bench import results
from fulgurite.kernels.quantize.cpu import quantize_into
from fulgurite.quant import resolve_format
from fulgurite.quant.shapes import data_shape, scale_shape

FORMATS = (
    "fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "fp8_e5m2_row",
    "mxfp8_e4m3", "mxfp4", "nvfp4", "int8", "int4_g128", "int4_g32_asym", "q4_0", "q4_1", "q8_0",
)  # fmt: skip
SHAPE = (16384, 4096)


def measure_casts(quick: bool) -> list[dict[str, Any]]:
    """One row per format and dtype."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(SHAPE[0] // 4, SHAPE[1]).to(dtype).repeat(4, 1)
        for name in FORMATS[:2] if quick else FORMATS:
            found.append(measure_cast(x, name))
    return found


def measure_cast(x: torch.Tensor, name: str) -> dict[str, Any]:
    format = resolve_format(name)
    data = torch.zeros(data_shape(format, x.shape), dtype=torch.uint8).view(format.data_dtype)
    scales = [
        torch.zeros(scale_shape(scale, x.shape)).to(scale.dtype) for scale in format.separate_scales
    ]
    written = sum(part.numel() * part.element_size() for part in (data, *scales))
    moved = x.numel() * x.element_size() + written
    source = x.view(torch.uint8).flatten()[: moved // 2]
    target = torch.zeros_like(source)
    cast = partial(quantize_into, x, format, data, scales)
    copy = partial(target.copy_, source)
    seconds = timing.median_times({"cast": cast, "copy": copy}, repeats=7, budget=0.4)
    return {
        "cast": name,
        "dtype": str(x.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "ms": 1e3 * seconds["cast"],
        "copy_ms": 1e3 * seconds["copy"],
        "bytes": moved,
        "of_copy": seconds["copy"] / seconds["cast"],
    }


def format_cast_table(rows: list[dict[str, Any]]) -> str:
    """The rows as a text table."""
    head = ["cast to", "from", "cast", "copy", "of copy"]
    body = [
        [row["cast"], row["dtype"], f"{row['ms']:.1f} ms", f"{row['copy_ms']:.1f} ms",
         f"{100 * row['of_copy']:.0f}%"]
        for row in rows
    ]  # fmt: skip
    return results.format_table([head, *body])
