"""Route torch's scaled and grouped matmuls to our kernels where those are faster or torch has none.

In: a functional graph of user code that calls `F.scaled_mm`, `F.grouped_mm`, `F.scaled_grouped_mm` or
their private forms. Out: the same, with such a call replaced by

    fulgurite::scaled_mm           FP8 per tensor, row and block, MXFP8, MXFP4, NVFP4 (scales unswizzled)
    fulgurite::scaled_grouped_mm   rows and experts: FP8 per row, MXFP8, MXFP4, NVFP4
    fulgurite::grouped_gemm        16 or 32 bits, few rows an expert

On a CPU all scaled matmuls are replaced. torch's CPU kernels take scales per tensor and row only, and
are slower: 2 to 80 times (1024 x 1024, 256 rows to 1; one core).

On a GPU these are replaced: FP8 shapes for which our kernel was measured faster, MX and NVFP4 where the
GPU has no such MMA, and grouped matmuls of few rows an expert.

Everything else stays with torch, for example a call with `scale_result`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import ScalingType, SwizzleType

from fulgurite.kernels.gemm.scaled_mm import scaled_mm_op
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import resolve_format
from fulgurite.quant.hardware import get_device_features, is_native
from fulgurite.trace import Trace
from fulgurite.trace.cost import size_hint
from fulgurite.transforms.base import transform
from fulgurite.transforms.decompose import inline_decomposition, trace_call
from fulgurite.transforms.grouped_mm import (
    replace_grouped_mm,
    replace_scaled_grouped_mm,
    replace_scaled_grouped_mm_v2,
)
from fulgurite.transforms.scaled_operands import (
    FP4,
    OUT_DTYPES,
    is_empty,
    read_matrix,
    same_sizes,
)

aten = torch.ops.aten


def has_scaled_mms(trace: Trace) -> bool:
    """Whether the step "route_scaled_mm" applies."""
    return any(node.target in REPLACEMENTS for node in trace.graph.nodes)


@transform
def route_scaled_mm(trace: Trace) -> Trace:
    """Replace scaled and grouped matmuls of torch by operators of ours."""

    def edit(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            build = REPLACEMENTS.get(node.target)
            if build is None:
                continue
            replacement = trace_call(trace.module, node, build)
            if replacement is not None:
                inline_decomposition(node, replacement)

    return trace.edit(edit)


# ---- scaled matmul -------------------------------------------------------------------------------


def replace_scaled_mm(
    self: Tensor,
    mat2: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Any:
    """`aten::_scaled_mm`, whose scaling follows from the shapes of the scales."""
    recipes = _infer_recipes(self, mat2, scale_a, scale_b)
    if recipes is None or scale_result is not None:
        return NotImplemented
    if recipes[1] == ScalingType.BlockWise1x128:
        scale_b = scale_b.t()  # [K / 128, N] in this form
    is_swizzled = recipes[0] in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32)
    swizzle = [SwizzleType.SWIZZLE_32_4_4 if is_swizzled else SwizzleType.NO_SWIZZLE]
    return replace_scaled_mm_v2(
        self, mat2, [scale_a], [recipes[0]], swizzle, [scale_b], [recipes[1]], swizzle, bias, out_dtype
    )  # fmt: skip


def replace_scaled_mm_v2(
    self: Tensor,
    mat2: Tensor,
    scale_a: list[Tensor],
    recipe_a: Sequence[Any],
    swizzle_a: Sequence[Any],
    scale_b: list[Tensor],
    recipe_b: Sequence[Any],
    swizzle_b: Sequence[Any],
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> Any:
    """`aten::_scaled_mm_v2`."""
    dtype = out_dtype or self.dtype
    if contraction_dim or dtype not in OUT_DTYPES or is_empty(self, mat2):
        return NotImplemented
    if not same_sizes(self.shape[1:], mat2.shape[:1]):
        return NotImplemented  # torch raises its error
    left = read_matrix(self, scale_a, recipe_a, swizzle_a)
    right = read_matrix(mat2.t(), scale_b, recipe_b, swizzle_b, is_right=True)
    if left is None or right is None:
        return NotImplemented
    if self.device.type == "cuda" and not _is_faster_on_gpu(self, mat2, left.format, right.format):
        return NotImplemented
    # On a CPU sums are float32; the generated kernel that reads them rounds, too.
    summed = torch.float32 if self.device.type == "cpu" else dtype
    return scaled_mm_op(
        left.data, left.scales, left.format, right.data, right.scales, right.format, bias, summed
    ).to(dtype)


def _infer_recipes(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor
) -> tuple[ScalingType, ScalingType] | None:
    """The scaling of `_scaled_mm` by dtypes and shapes, as torch infers it."""
    (m, k), n = a.shape, b.shape[1]
    if scale_a.dtype == torch.float8_e8m0fnu:
        return ScalingType.BlockWise1x32, ScalingType.BlockWise1x32
    if a.dtype == FP4:
        return ScalingType.BlockWise1x16, ScalingType.BlockWise1x16
    if same_sizes((scale_a.numel(), scale_b.numel()), (1, 1)):
        return ScalingType.TensorWise, ScalingType.TensorWise
    if same_sizes(scale_a.shape, (m, 1)) and same_sizes(scale_b.shape, (1, n)):
        return ScalingType.RowWise, ScalingType.RowWise
    blocks = -(-k // 128)
    if not same_sizes(scale_a.shape, (m, blocks)):
        return None
    if same_sizes(scale_b.shape, (blocks, n)):
        return ScalingType.BlockWise1x128, ScalingType.BlockWise1x128
    is_square = same_sizes(scale_b.shape, (blocks, -(-n // 128)))
    return (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128) if is_square else None


def _is_faster_on_gpu(a: Tensor, b: Tensor, left: str, right: str) -> bool:
    """Whether our kernel is the better one, or the only one."""
    x_format, weight_format = resolve_format(left), resolve_format(right)
    if x_format.family in ("mx", "nvfp4"):
        return not is_native(x_format, get_device_features(a.device))
    if x_format.block != weight_format.block and weight_format.block != (128, 128):
        return False
    m, k, n = (size_hint(size) for size in (*a.shape, b.shape[1]))  # the operator decides again
    return not heuristics_for(a.device).prefers_library_scaled_mm(weight_format.block, m, n, k)


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten._scaled_mm.default: replace_scaled_mm,
    aten._scaled_mm_v2.default: replace_scaled_mm_v2,
    aten._grouped_mm.default: replace_grouped_mm,
    aten._scaled_grouped_mm.default: replace_scaled_grouped_mm,
    aten._scaled_grouped_mm_v2.default: replace_scaled_grouped_mm_v2,
}
