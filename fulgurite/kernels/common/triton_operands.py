# mypy: allow-untyped-defs, allow-incomplete-defs
"""Packed weights as the kernels see them.

In: a format, packed data and scales. Out: how the weight is decoded and where its scales come in
(`Weight`, the one place that maps formats to kernels), and its parts as Triton takes them (`Packed`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.quant import Format
from fulgurite.quant.format import WHOLE

SHORTEST_STEP = 64  # columns: four tiles of nibbles, each 16 wide, the least a tensor core takes


@dataclass(frozen=True)
class Weight:
    """A format as the kernel sees it; `group` is the K of one scale, `rows` its rows."""

    decode: str
    scaling: str
    group: int = 128
    rows: int = 1

    integers: bool = False  # of 8 bits

    @property
    def nibbles(self) -> bool:
        return self.decode in ("e2m1", "int4", "uint4")

    @property
    def few_scaling(self) -> str:
        """The same with few rows of x: sums of all 4-bit integers are scaled by groups."""
        return "groups" if self.decode == "int4" else self.scaling

    @property
    def beside(self) -> int:
        """Groups that lie beside each other in a matmul of the tensor cores, which is 16 words wide."""
        grouped = self.nibbles and self.few_scaling == "groups"
        return max(1, SHORTEST_STEP // self.group) if grouped else 1

    @property
    def depth(self) -> int:
        """The K of a step: a group where each step has a scale, and else what was found fast."""
        return self.group if self.scaling == "step" else 256 if self.decode == "e2m1" else 128


def takes(x: Tensor, weight: Weight) -> bool:
    """Whether the kernel multiplies activations of this dtype by such weights."""
    if weight.scaling == "groups" or (weight.decode == "cast" and weight.scaling != "inside"):
        return x.dtype in (torch.bfloat16, torch.float16)
    return x.dtype == torch.bfloat16


def weight_of(format: Format) -> Weight | None:
    """How the kernel takes weights of a format, None where it doesn't."""
    rows, columns = format.block
    if format.name == "int8":
        return Weight("cast", "end", integers=True)
    if format.family == "fp8":
        return Weight("cast", "end") if columns == WHOLE else Weight("cast", "step", columns, rows)
    if format.family in ("mx", "nvfp4"):
        return Weight("e2m1" if format.element.bits == 4 else "cast", "inside", columns)
    if format.family == "int" and format.element.bits == 8:
        return Weight("cast", "groups", columns, integers=True)
    if format.family == "int":
        lowest = any(scale.name == "minimum" for scale in format.scales)
        scaling = "step" if columns >= SHORTEST_STEP and not lowest else "groups"
        return Weight("uint4" if lowest else "int4", scaling, columns)
    return None  # GGUF blocks and plain casts


def strides_of(scale: Tensor, format: Format) -> tuple[int, int]:
    """How far apart the scales of neighbouring rows and blocks of K are, 0 where one serves all."""
    rows, columns = format.scales[0].block
    down = 0 if rows == WHOLE else scale.stride(-2) if scale.dim() > 1 else 0
    return down, 0 if columns == WHOLE else scale.stride(-1)


@dataclass(frozen=True)
class Packed:
    """A packed weight as the kernels take it: views Triton knows the types of, and strides."""

    data: Tensor
    scale: Tensor
    second: Tensor  # the tensor scale of NVFP4, zero points or minima of asymmetric integers
    strides: tuple[int, int]
    zero: bool  # whether `second` holds zero points or minima


def packed(data: Tensor, scales: list[Tensor], format: Format, weight: Weight) -> Packed:
    """Nibbles as words of four, e8m0 as bytes."""
    data = data.view(torch.int16) if weight.nibbles else data
    if format.family == "mx":
        scales = [scales[0].view(torch.uint8)]
    zero = len(scales) == 2 and format.family == "int"
    return Packed(data, scales[0], scales[-1], strides_of(scales[0], format), zero)
