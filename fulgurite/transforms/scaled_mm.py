"""Route torch's scaled and grouped matmuls to our kernels where those are faster or torch has none.

In: a functional graph of user code that calls `F.scaled_mm`, `F.grouped_mm`, `F.scaled_grouped_mm` or
their private forms. Out: the same, with such a call replaced by

    fulgurite::scaled_mm           FP8 per tensor, row and block, MXFP8, MXFP4, NVFP4 (scales unswizzled)
    fulgurite::scaled_grouped_mm   FP8 rows and experts of whole-row scales
    fulgurite::grouped_gemm        16 or 32 bits, few rows an expert

On a CPU all scaled matmuls are replaced. torch's CPU kernels take scales per tensor and row only, and
are slower: 2 to 80 times (1024 x 1024, 256 rows to 1; one core).

On a GPU these are replaced: FP8 shapes for which our kernel was measured faster, MX and NVFP4 where the
GPU has no such MMA, and grouped matmuls of few rows an expert.

Everything else stays with torch, for example a call with `scale_result`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import ScalingType, SwizzleType

from fulgurite.kernels.elementwise.gated_activation import NO_GATE
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.gemm.scaled_mm import scaled_mm_op
from fulgurite.kernels.grouped_gemm.args import DENSE
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm_op
from fulgurite.kernels.grouped_gemm.scaled import scaled_grouped_mm_op
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.kernels.tuning.cpu import CPU_TABLES
from fulgurite.quant import resolve_format
from fulgurite.quant.hardware import get_device_features, is_native
from fulgurite.quant.swizzle import unswizzle_scales
from fulgurite.trace import Trace
from fulgurite.trace.node_meta import fake_value
from fulgurite.transforms.base import transform
from fulgurite.transforms.decompose import inline_decomposition, trace_call

aten = torch.ops.aten
ELEMENTS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
FP4 = torch.float4_e2m1fn_x2
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def has_scaled_mms(trace: Trace) -> bool:
    """Whether the step "route_scaled_mm" applies."""
    return any(node.target in REPLACEMENTS for node in trace.graph.nodes)


@transform
def route_scaled_mm(trace: Trace) -> Trace:
    """Replace scaled and grouped matmuls of torch by operators of ours."""

    def edit(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            build = REPLACEMENTS.get(node.target)
            if build is None or not _has_static_matrices(node):
                continue
            replacement = trace_call(trace.module, node, build)
            if replacement is not None:
                inline_decomposition(node, replacement)

    return trace.edit(edit)


def _has_static_matrices(node: fx.Node) -> bool:
    """Whether both matrices have static sizes; rows and the kernel choice depend on them."""
    matrices = [fake_value(argument) for argument in node.args[:2]]  # type: ignore[arg-type]
    return all(isinstance(size, int) for matrix in matrices for size in matrix.shape)


# ---- scaled matmul -------------------------------------------------------------------------------


@dataclass(frozen=True)
class QuantizedMatrix:
    """[rows, K] as packed data, its scales and the name of their format."""

    data: Tensor
    scales: list[Tensor]
    format: str


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
    left = _read_matrix(self, scale_a, recipe_a, swizzle_a)
    right = _read_matrix(mat2.t(), scale_b, recipe_b, swizzle_b, is_right=True)
    if left is None or right is None or contraction_dim or dtype not in OUT_DTYPES:
        return NotImplemented
    if self.numel() == 0 or mat2.numel() == 0:
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
    if scale_a.numel() == scale_b.numel() == 1:
        return ScalingType.TensorWise, ScalingType.TensorWise
    if scale_a.shape == (m, 1) and scale_b.shape == (1, n):
        return ScalingType.RowWise, ScalingType.RowWise
    blocks = -(-k // 128)
    if scale_a.shape != (m, blocks):
        return None
    if scale_b.shape == (blocks, n):
        return ScalingType.BlockWise1x128, ScalingType.BlockWise1x128
    is_square = scale_b.shape == (blocks, -(-n // 128))
    return (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128) if is_square else None


def _read_matrix(
    data: Tensor,
    scales: list[Tensor],
    recipes: Sequence[Any],
    swizzles: Sequence[Any],
    is_right: bool = False,
) -> QuantizedMatrix | None:
    """An operand [rows, K] in a format of ours; None if there is none."""
    kinds = [ScalingType(recipe) for recipe in recipes]
    (rows, columns), scale = data.shape, scales[0]
    element = ELEMENTS.get(data.dtype)
    if data.stride(-1) != 1:
        return None
    if kinds[0] in (ScalingType.BlockWise1x16, ScalingType.BlockWise1x32):
        return _read_block_scaled(data, scales, kinds, swizzles)
    if element is None or scale.dtype != torch.float32 or len(kinds) != 1:
        return None
    if kinds == [ScalingType.TensorWise]:
        return QuantizedMatrix(data, [scale.reshape(1, 1)], f"fp8_{element}_tensor")
    if kinds == [ScalingType.RowWise]:
        return QuantizedMatrix(data, [scale.reshape(rows, 1)], f"fp8_{element}_row")
    if kinds == [ScalingType.BlockWise1x128]:
        return QuantizedMatrix(data, [scale], f"fp8_{element}_1x128")
    if kinds == [ScalingType.BlockWise128x128] and is_right:
        blocks = scale[: -(-columns // 128)].t()  # [K / 128 padded to four, N / 128]
        return QuantizedMatrix(data, [blocks], f"fp8_{element}_128x128")
    return None


def _read_block_scaled(
    data: Tensor, scales: list[Tensor], kinds: Sequence[ScalingType], swizzles: Sequence[Any]
) -> QuantizedMatrix | None:
    """MX and NVFP4: swizzled scales of one byte, and for NVFP4 perhaps one scale a tensor."""
    if SwizzleType(swizzles[0]) != SwizzleType.SWIZZLE_32_4_4:
        return None
    element = "e2m1" if data.dtype == FP4 else ELEMENTS.get(data.dtype)
    is_nvfp4 = kinds[0] == ScalingType.BlockWise1x16
    name = "nvfp4" if is_nvfp4 else "mxfp4" if element == "e2m1" else f"mxfp8_{element}"
    if element is None or is_nvfp4 != (scales[0].dtype == torch.float8_e4m3fn):
        return None
    if is_nvfp4 and element != "e2m1":
        return None
    packed = data.view(torch.uint8) if element == "e2m1" else data
    columns = data.shape[1] * (2 if element == "e2m1" else 1)
    width = 16 if is_nvfp4 else 32
    if columns % width:
        return None
    found = [unswizzle_scales(scales[0].flatten(), data.shape[0], columns // width)]
    if is_nvfp4:
        whole = scales[1] if len(scales) > 1 else torch.ones(1, device=data.device)
        found.append(whole.reshape(1, 1))
    return QuantizedMatrix(packed, found, name)


def _is_faster_on_gpu(a: Tensor, b: Tensor, left: str, right: str) -> bool:
    """Whether our kernel is the better one, or the only one."""
    x_format, weight_format = resolve_format(left), resolve_format(right)
    if x_format.family in ("mx", "nvfp4"):
        return not is_native(x_format, get_device_features(a.device))
    if x_format.block != weight_format.block and weight_format.block != (128, 128):
        return False
    (m, k), n = a.shape, b.shape[1]
    return not heuristics_for(a.device).prefers_library_scaled_mm(weight_format.block, m, n, k)


# ---- grouped matmul ------------------------------------------------------------------------------


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
    """`aten::_scaled_grouped_mm` of FP8 rows [S, K] and weights [E, K, N] with scales per row."""
    if offs is None or bias is not None or self.dim() != 2 or mat2.dim() != 3:
        return NotImplemented
    weight = mat2.transpose(1, 2)
    elements = ELEMENTS.get(self.dtype), ELEMENTS.get(mat2.dtype)
    has_row_scales = scale_a.shape == self.shape[:1] and scale_b.shape == weight.shape[:2]
    is_cpu = self.device.type == "cpu"  # on GPUs torch's kernel takes this form
    if None in elements or not has_row_scales or not weight.is_contiguous() or not is_cpu:
        return NotImplemented
    if self.numel() == 0 or mat2.numel() == 0 or not _keeps_strides(self, mat2):
        return NotImplemented
    return scaled_grouped_mm_op(
        self, [scale_a.unsqueeze(1)], f"fp8_{elements[0]}_row", offs,
        weight, [scale_b.unsqueeze(2)], f"fp8_{elements[1]}_row", out_dtype or torch.bfloat16,
    )  # fmt: skip


def _keeps_strides(a: Tensor, b: Tensor) -> bool:
    """Whether torch's result is dense: it pads rows to 16 bytes, and readers know its strides."""
    return b.shape[-1] * 2 % 16 == 0


REPLACEMENTS: dict[Any, Callable[..., Any]] = {
    aten._scaled_mm.default: replace_scaled_mm,
    aten._scaled_mm_v2.default: replace_scaled_mm_v2,
    aten._grouped_mm.default: replace_grouped_mm,
    aten._scaled_grouped_mm.default: replace_scaled_grouped_mm,
}
