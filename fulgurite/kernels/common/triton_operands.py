"""Quantized weights as the Triton kernels take them.

In: a format, packed data and scales. Out: `DequantScheme`, the one place that maps formats to
kernels, and `QuantizedOperand`, the tensors and strides that are passed to a kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.quant import Format
from fulgurite.quant.codecs.codebook import codebook_of
from fulgurite.quant.format import WHOLE_DIM

ALL_COLUMNS = 2**30  # more than any K: one scale a row
MIN_BLOCK_K = (
    64  # columns of K: four tiles of nibbles, each 16 wide, the fewest a tensor core takes
)


@dataclass(frozen=True)
class DequantScheme:
    """How a kernel dequantizes a weight (`dequant`) and where it applies the scales (`scaling`).

    dequant  "cast"      8 bits to 16                  scaling  "epilogue"  per row or tensor
             "e2m1"      nibbles to bfloat16                    "mainloop"  one scale a step of K
             "int4"      nibbles to bfloat16                    "operand"   16 or 32 columns, exact
             "uint4"     the same, with minima                  "group"     several groups of integers
             "dense"     16 or 32 bits, as they are             "none"      in a step of K
             "codebook"  nibbles by a table, dequantized first
    """

    dequant: str
    scaling: str
    group_size: int = 128  # columns of K that share a scale
    scale_rows: int = 1  # rows of the weight that share a scale

    @property
    def is_4bit(self) -> bool:
        return self.dequant in ("e2m1", "int4", "uint4", "codebook")

    @property
    def small_m_scaling(self) -> str:
        """`scaling` in the small-M kernel, which scales the sums of all 4-bit integers by
        groups."""
        return "group" if self.dequant == "int4" else self.scaling

    @property
    def groups_per_mma(self) -> int:
        """Groups that share one tensor-core instruction, which is 16 words of four nibbles wide."""
        is_grouped = self.is_4bit and self.small_m_scaling == "group"
        return max(1, MIN_BLOCK_K // self.group_size) if is_grouped else 1


def supports_dtype(x: Tensor, scheme: DequantScheme) -> bool:
    """Whether the kernels multiply activations of this dtype by such weights."""
    is_cast = scheme.dequant == "cast" and scheme.scaling != "operand"
    if scheme.scaling == "group" or is_cast:
        return x.dtype in (torch.bfloat16, torch.float16)
    return x.dtype == torch.bfloat16


def dequant_scheme(format: Format) -> DequantScheme | None:
    """How the kernels take weights of a format, or None if they don't."""
    rows, columns = format.block
    if format.name == "int8":
        return DequantScheme("cast", "epilogue")
    if format.family == "fp8":
        if columns == WHOLE_DIM:
            return DequantScheme("cast", "epilogue")
        return DequantScheme("cast", "mainloop", columns, rows)
    if format.family in ("mx", "nvfp4"):
        return DequantScheme("e2m1" if format.element.bits == 4 else "cast", "operand", columns)
    if format.family == "int" and format.element.bits == 8:
        return DequantScheme("cast", "group", columns) if len(format.scales) == 1 else None
    if format.family == "int":
        has_minima = any(scale.name == "minimum" for scale in format.scales)
        scaling = "mainloop" if columns >= MIN_BLOCK_K and not has_minima else "group"
        return DequantScheme("uint4" if has_minima else "int4", scaling, columns)
    return None  # GGUF blocks, plain casts, and what `dequantize_first_scheme` lists


def dequantize_first_scheme(format: Format) -> DequantScheme | None:
    """Formats that are dequantized to memory before a GEMM: codebooks, int8 with zero points."""
    columns = format.block[1]
    if format.family == "codebook":
        return DequantScheme("codebook", "none", columns)
    if format.family == "int" and format.element.bits == 8 and len(format.scales) == 2:
        return DequantScheme("cast", "none", columns or ALL_COLUMNS)
    return None


def scale_strides(scale: Tensor, format: Format) -> tuple[int, int]:
    """Strides from one row's scale to the next, and from one block of K to the next; 0: shared."""
    rows, columns = format.scales[0].block
    row_stride = 0 if rows == WHOLE_DIM else scale.stride(-2) if scale.dim() > 1 else 0
    return row_stride, 0 if columns == WHOLE_DIM else scale.stride(-1)


@dataclass(frozen=True)
class QuantizedOperand:
    """A quantized weight as a kernel takes it: views of dtypes that Triton knows, and strides."""

    data: Tensor
    scale: Tensor
    aux: Tensor  # tensor scale of NVFP4, zero points or minima of asymmetric integers, a codebook
    scale_strides: tuple[int, int]
    has_zero_points: bool  # whether `aux` holds zero points or minima
    has_tensor_scale: bool = False  # whether `aux` holds the tensor scale of NVFP4

    @property
    def expert_strides(self) -> tuple[int, int, int]:
        """Strides from one expert to the next of a stack [E, N, K]: data, scale, aux."""
        if self.scale is self.data:
            return self.data.stride(0), 0, 0
        scale = self.scale.stride(0) if self.scale.dim() else 0
        return self.data.stride(0), scale, scale if self.has_zero_points else 1


def dense_operand(data: Tensor) -> QuantizedOperand:
    """A weight that is not quantized, for kernels that take either; its scales are never read."""
    return QuantizedOperand(data, data, data, (0, 0), has_zero_points=False)


@functools.cache
def _codebook(format: Format, device: torch.device) -> Tensor:
    return codebook_of(format, device)


def make_operand(
    data: Tensor, scales: list[Tensor], format: Format, scheme: DequantScheme
) -> QuantizedOperand:
    """Nibbles as 16-bit words of four, e8m0 scales as bytes."""
    data = data.view(torch.int16) if scheme.is_4bit else data
    if format.family == "mx":
        scales = [scales[0].view(torch.uint8)]
    if format.family == "codebook":
        scales = [scales[0], _codebook(format, data.device)]
    return QuantizedOperand(
        data,
        scales[0],
        scales[-1],
        scale_strides(scales[0], format),
        has_zero_points=len(scales) == 2 and format.family == "int",
        has_tensor_scale=format.family == "nvfp4",
    )
