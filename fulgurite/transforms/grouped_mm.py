"""Replacements of torch's grouped matmuls: `_grouped_mm`, `_scaled_grouped_mm` and its second form.

In: the arguments of the op. Out: the same computed by `fulgurite::grouped_gemm` or
`fulgurite::scaled_grouped_mm`, or NotImplemented if torch's kernel is kept. Used by `scaled_mm.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from fulgurite.kernels.elementwise.gated_activation import NO_GATE
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.grouped_gemm.args import DENSE
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm_op
from fulgurite.kernels.grouped_gemm.scaled import scaled_grouped_mm_op
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.kernels.tuning.cpu import CPU_TABLES
from fulgurite.quant import resolve_format
from fulgurite.quant.hardware import get_device_features, is_native
from fulgurite.quant.swizzle import unswizzle_grouped_scales, unswizzle_scales
from fulgurite.transforms.scaled_operands import (
    ELEMENTS,
    OUT_DTYPES,
    QuantizedMatrix,
    is_empty,
    read_block_scaled,
    same_sizes,
)


def replace_grouped_mm(
    self: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """`aten::_grouped_mm` of rows [S, K] and weights [E, K, N] whose K is contiguous."""
    if offs is None or bias is not None or self.dim() != 2 or mat2.dim() != 3:
        return NotImplemented
    if not all(isinstance(size, int) for size in (*self.shape, *mat2.shape)):
        return NotImplemented  # whether there are few rows is not known
    rows, experts = self.shape[0], mat2.shape[0]
    is_small = rows <= _max_grouped_rows(self.device) * experts
    is_dense = self.stride(1) == 1 and mat2.transpose(1, 2).is_contiguous()
    if not is_small or not is_dense or not _keeps_strides(self, mat2):
        return NotImplemented
    return grouped_gemm_op(
        self, None, None, None, offs, mat2.transpose(1, 2), [], DENSE, None, UNQUANTIZED, NO_GATE,
        0.0, 0.0,
    )  # fmt: skip


def _max_grouped_rows(device: torch.device) -> int:
    """Rows of an average expert up to which our kernel is faster than torch's."""
    if device.type == "cuda":
        return heuristics_for(device).grouped_mm_max_rows
    return min(table.grouped_gemm_small_m for table in CPU_TABLES.values())


def replace_scaled_grouped_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """`aten::_scaled_grouped_mm`: scales per row, or of MXFP8 if they are e8m0 numbers."""
    is_mx = scale_a.dtype == scale_b.dtype == torch.float8_e8m0fnu
    recipe = [ScalingType.BlockWise1x32 if is_mx else ScalingType.RowWise]
    swizzle = [SwizzleType.SWIZZLE_32_4_4 if is_mx else SwizzleType.NO_SWIZZLE]
    if scale_result is not None:
        return NotImplemented
    return replace_scaled_grouped_mm_v2(
        self, mat2, [scale_a], recipe, swizzle, [scale_b], recipe, swizzle, offs, bias, out_dtype
    )  # fmt: skip


def replace_scaled_grouped_mm_v2(
    self: Tensor,
    mat2: Tensor,
    scale_a: list[Tensor],
    recipe_a: Sequence[Any],
    swizzle_a: Sequence[Any],
    scale_b: list[Tensor],
    recipe_b: Sequence[Any],
    swizzle_b: Sequence[Any],
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Any:
    """`aten::_scaled_grouped_mm_v2` of rows [S, K] and weights [E, K, N] whose K is contiguous."""
    dtype = out_dtype or torch.bfloat16
    if offs is None or bias is not None or self.dim() != 2 or mat2.dim() != 3:
        return NotImplemented
    if contraction_dim or dtype not in OUT_DTYPES or is_empty(mat2):
        return NotImplemented
    weight = mat2.transpose(1, 2)
    if not (self.is_contiguous() and weight.is_contiguous()):
        return NotImplemented
    if not same_sizes((self.shape[1], *offs.shape), (weight.shape[2], weight.shape[0])):
        return NotImplemented
    left = _read_rows(self, scale_a, recipe_a, swizzle_a, offs)
    right = _read_experts(weight, scale_b, recipe_b, swizzle_b)
    if left is None or right is None or _has_library_kernel(self.device, left.format):
        return NotImplemented
    left, right = _move_group_scales(left, right)
    return scaled_grouped_mm_op(
        left.data, left.scales, left.format, offs, right.data, right.scales, right.format, dtype
    )


def _has_library_kernel(device: torch.device, format: str) -> bool:
    """Whether torch has a kernel for rows in this format; on CPUs it has none."""
    if device.type != "cuda":
        return False
    is_block_scaled = resolve_format(format).family in ("mx", "nvfp4")
    return not is_block_scaled or is_native(format, get_device_features(device))


def _read_rows(
    data: Tensor,
    scales: list[Tensor],
    recipes: Sequence[Any],
    swizzles: Sequence[Any],
    ends: Tensor,
) -> QuantizedMatrix | None:
    """Rows [S, K]; swizzled scales are those of `swizzle_grouped_scales`."""
    kinds, rows = [ScalingType(recipe) for recipe in recipes], data.shape[0]
    if kinds == [ScalingType.RowWise]:
        return _read_row_scaled(data, scales[0])
    return read_block_scaled(
        data, scales, kinds, swizzles,
        lambda swizzled, blocks: unswizzle_grouped_scales(swizzled, ends, rows, blocks),
    )  # fmt: skip


def _read_experts(
    data: Tensor, scales: list[Tensor], recipes: Sequence[Any], swizzles: Sequence[Any]
) -> QuantizedMatrix | None:
    """Weights [E, N, K]; swizzled scales are one row of bytes an expert."""
    kinds, (experts, rows, _) = [ScalingType(recipe) for recipe in recipes], data.shape
    if kinds == [ScalingType.RowWise]:
        return _read_row_scaled(data, scales[0])
    return read_block_scaled(
        data, scales, kinds, swizzles,
        lambda swizzled, blocks: unswizzle_scales(swizzled.reshape(experts, -1), rows, blocks),
    )  # fmt: skip


def _read_row_scaled(data: Tensor, scale: Tensor) -> QuantizedMatrix | None:
    element = ELEMENTS.get(data.dtype)
    is_fitting = scale.dtype == torch.float32 and same_sizes(scale.shape, data.shape[:-1])
    if element is None or not is_fitting:
        return None
    return QuantizedMatrix(data, [scale.unsqueeze(-1)], f"fp8_{element}_row")


def _move_group_scales(
    left: QuantizedMatrix, right: QuantizedMatrix
) -> tuple[QuantizedMatrix, QuantizedMatrix]:
    """NVFP4: the second scale of rows may be one a group, and becomes a factor of the expert's."""
    if left.format != "nvfp4" or right.format != "nvfp4":
        return left, right
    experts = right.data.shape[0]
    product = left.scales[1].reshape(-1, 1, 1) * right.scales[1].reshape(-1, 1, 1)
    ones = torch.ones(1, 1, device=left.data.device)
    return (
        replace(left, scales=[left.scales[0], ones]),
        replace(right, scales=[right.scales[0], product.expand(experts, 1, 1)]),
    )


def _keeps_strides(a: Tensor, b: Tensor) -> bool:
    """Whether torch's result is dense: it pads rows to 16 bytes, and a copy would be needed."""
    return b.shape[-1] * a.element_size() % 16 == 0
