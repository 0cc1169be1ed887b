# mypy: allow-untyped-defs, allow-incomplete-defs
"""Packed weights as the kernels see them.

In: a format, packed data and scales. Out: how the weight is decoded and where its scales come in
(`DequantScheme`, the one place that maps formats to kernels), and its parts as Triton takes them
(`QuantizedOperand`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.quant import Format
from fulgurite.quant.format import WHOLE_DIM

MIN_BLOCK_K = 64  # columns: four tiles of nibbles, each 16 wide, the least a tensor core takes


@dataclass(frozen=True)
class DequantScheme:
    """A format as the kernel sees it; `group` is the K of one scale, `rows` its rows."""

    dequant: str
    scaling: str
    group_size: int = 128
    scale_rows: int = 1

    is_int8: bool = False  # of 8 bits

    @property
    def is_4bit(self) -> bool:
        return self.dequant in ("e2m1", "int4", "uint4")

    @property
    def small_m_scaling(self) -> str:
        """The same with few rows of x: sums of all 4-bit integers are scaled by groups."""
        return "group" if self.dequant == "int4" else self.scaling

    @property
    def groups_per_dot(self) -> int:
        """Groups that lie beside each other in a matmul of the tensor cores, which is 16 words wide."""
        grouped = self.is_4bit and self.small_m_scaling == "group"
        return max(1, MIN_BLOCK_K // self.group_size) if grouped else 1

    @property
    def block_k(self) -> int:
        """The K of a step: a group where each step has a scale, and else what was found fast."""
        return self.group_size if self.scaling == "mainloop" else 256 if self.dequant == "e2m1" else 128


def supports_dtype(x: Tensor, weight: DequantScheme) -> bool:
    """Whether the kernel multiplies activations of this dtype by such weights."""
    if weight.scaling == "group" or (weight.dequant == "cast" and weight.scaling != "operand"):
        return x.dtype in (torch.bfloat16, torch.float16)
    return x.dtype == torch.bfloat16


def dequant_scheme(format: Format) -> DequantScheme | None:
    """How the kernel takes weights of a format, None where it doesn't."""
    rows, columns = format.block
    if format.name == "int8":
        return DequantScheme("cast", "epilogue", is_int8=True)
    if format.family == "fp8":
        return DequantScheme("cast", "epilogue") if columns == WHOLE_DIM else DequantScheme("cast", "mainloop", columns, rows)
    if format.family in ("mx", "nvfp4"):
        return DequantScheme("e2m1" if format.element.bits == 4 else "cast", "operand", columns)
    if format.family == "int" and format.element.bits == 8:
        return DequantScheme("cast", "group", columns, is_int8=True)
    if format.family == "int":
        lowest = any(scale.name == "minimum" for scale in format.scales)
        scaling = "mainloop" if columns >= MIN_BLOCK_K and not lowest else "group"
        return DequantScheme("uint4" if lowest else "int4", scaling, columns)
    return None  # GGUF blocks and plain casts


def scale_strides(scale: Tensor, format: Format) -> tuple[int, int]:
    """How far apart the scales of neighbouring rows and blocks of K are, 0 where one serves all."""
    rows, columns = format.scales[0].block
    down = 0 if rows == WHOLE_DIM else scale.stride(-2) if scale.dim() > 1 else 0
    return down, 0 if columns == WHOLE_DIM else scale.stride(-1)


@dataclass(frozen=True)
class QuantizedOperand:
    """A packed weight as the kernels take it: views Triton knows the types of, and strides."""

    data: Tensor
    scale: Tensor
    extra_scale: Tensor  # the tensor scale of NVFP4, zero points or minima of asymmetric integers
    strides: tuple[int, int]
    has_zero_points: bool  # whether `second` holds zero points or minima


def make_operand(data: Tensor, scales: list[Tensor], format: Format, weight: DequantScheme) -> QuantizedOperand:
    """Nibbles as words of four, e8m0 as bytes."""
    data = data.view(torch.int16) if weight.is_4bit else data
    if format.family == "mx":
        scales = [scales[0].view(torch.uint8)]
    zero = len(scales) == 2 and format.family == "int"
    return QuantizedOperand(data, scales[0], scales[-1], scale_strides(scales[0], format), zero)
