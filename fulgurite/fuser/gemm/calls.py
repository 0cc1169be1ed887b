"""Read GEMM nodes: which matrices a call multiplies, how it scales them, what it adds.

In: an fx node of `mm`, `addmm`, or a scaled matmul in one of its three forms (`torch._scaled_mm`,
`F.scaled_mm`, `fulgurite::scaled_mm`). Out: a `GemmCall`.

Scales per tensor and per row multiply the accumulator: they are part of the epilogue. Scales of 128
columns of K multiply partial sums: the main loop reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn.functional import ScalingType

from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.kernels.gemm.scaled_mm import scaled_mm_op  # noqa: F401  registers the operator
from fulgurite.quant import WHOLE_DIM, resolve_format
from fulgurite.trace.node_meta import fake_value

aten = torch.ops.aten
SCALE_BLOCK = 128  # columns of K that share a scale in the main loop
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Scales:
    """The scales of both matrices.

    block_k              0: one scale for a whole row or matrix; 128: for each 128 columns of K
    rhs_block            neighbouring columns of the right matrix that share scales: 1 or 128
    is_rhs_transposed    whether the right scales are [K / 128, N] instead of [N, K / 128]
    """

    lhs: fx.Node
    rhs: fx.Node
    block_k: int = 0
    rhs_block: int = 1
    is_rhs_transposed: bool = False


@dataclass(frozen=True)
class GemmCall:
    """`lhs @ rhs`, scaled, plus `bias`.

    is_rhs_transposed   whether `rhs` is [N, K]
    is_fast_accum       whether tensor cores may keep all of K in their reduced-precision sums
    """

    lhs: fx.Node
    rhs: fx.Node
    bias: fx.Node | None = None
    scales: Scales | None = None
    is_rhs_transposed: bool = False
    is_fast_accum: bool = False

    @property
    def operands(self) -> tuple[fx.Node, ...]:
        """What the main loop reads."""
        if self.scales is None or not self.scales.block_k:
            return self.lhs, self.rhs
        return self.lhs, self.rhs, self.scales.lhs, self.scales.rhs

    @property
    def library_inputs(self) -> tuple[fx.Node, ...]:
        """What the library's call reads: it adds the bias of a scaled matmul, not that of an addmm."""
        if self.scales is None:
            return self.operands
        bias = () if self.bias is None else (self.bias,)
        return (self.lhs, self.rhs, self.scales.lhs, self.scales.rhs, *bias)

    @property
    def lhs_operands(self) -> tuple[fx.Node, ...]:
        """The operands that several GEMMs of one kernel share."""
        return self.operands[::2]


def is_gemm(node: fx.Node) -> bool:
    return node.target in READERS


def read_gemm(node: fx.Node) -> GemmCall:
    """The call; raises Unsupported for a form that is not generated."""
    schema = node.target._schema  # type: ignore[union-attr]
    arguments = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    names = [a.name for a in schema.arguments]
    arguments |= dict(zip(names, node.args, strict=False)) | node.kwargs
    return READERS[node.target](**{name.lstrip("_"): value for name, value in arguments.items()})


def _read_mm(self: fx.Node, mat2: fx.Node) -> GemmCall:
    return GemmCall(self, mat2)


def _read_addmm(self: fx.Node, mat1: fx.Node, mat2: fx.Node, beta: Any, alpha: Any) -> GemmCall:
    if beta != 1 or alpha != 1:
        raise Unsupported("an addmm with alpha or beta")
    return GemmCall(mat1, mat2, self)


def _read_scaled_mm(
    self: fx.Node,
    mat2: fx.Node,
    scale_a: fx.Node,
    scale_b: fx.Node,
    bias: fx.Node | None,
    scale_result: fx.Node | None,
    out_dtype: torch.dtype | None,
    use_fast_accum: bool,
) -> GemmCall:
    """`torch._scaled_mm`: the shapes of the scales say what they are for."""
    if scale_result is not None:
        raise Unsupported("a scaled matmul whose result is scaled")
    (m, _), n = fake_value(self).shape, fake_value(mat2).shape[1]
    left, right = fake_value(scale_a), fake_value(scale_b)
    is_per_tensor = left.numel() == 1 and right.numel() == 1
    if not is_per_tensor and not (left.shape == (m, 1) and right.shape == (1, n)):
        raise Unsupported("a scaled matmul whose scales are not per tensor or row")
    _check_float32(scale_a, scale_b)
    return GemmCall(
        self, mat2, bias, Scales(scale_a, scale_b), is_fast_accum=bool(use_fast_accum)
    )  # fmt: skip


def _read_scaled_mm_v2(
    self: fx.Node,
    mat2: fx.Node,
    scale_a: Sequence[fx.Node],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[fx.Node],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: fx.Node | None,
    out_dtype: torch.dtype | None,
    contraction_dim: Sequence[int],
    use_fast_accum: bool,
) -> GemmCall:
    """`F.scaled_mm`."""
    if len(scale_a) != 1 or len(scale_b) != 1 or contraction_dim:
        raise Unsupported("a scaled matmul with several scales or another contraction")
    kinds = ScalingType(recipe_a[0]), ScalingType(recipe_b[0])
    if kinds not in LIBRARY_SCALES:
        raise Unsupported(f"a matmul scaled by {kinds[0].name} and {kinds[1].name}")
    _check_float32(scale_a[0], scale_b[0])
    scales = Scales(scale_a[0], scale_b[0], *LIBRARY_SCALES[kinds])
    return GemmCall(self, mat2, bias, scales, is_fast_accum=bool(use_fast_accum))


# recipes of `F.scaled_mm` → block_k, rhs_block, is_rhs_transposed
LIBRARY_SCALES = {
    (ScalingType.TensorWise, ScalingType.TensorWise): (0, 1, False),
    (ScalingType.RowWise, ScalingType.RowWise): (0, 1, False),
    (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128): (SCALE_BLOCK, 1, False),
    (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128): (SCALE_BLOCK, SCALE_BLOCK, True),
}


def _read_our_scaled_mm(
    a: fx.Node,
    a_scales: Sequence[fx.Node],
    a_format: str,
    b: fx.Node,
    b_scales: Sequence[fx.Node],
    b_format: str,
    bias: fx.Node | None,
    out_dtype: torch.dtype,
) -> GemmCall:
    """`fulgurite::scaled_mm`: the right matrix is [N, K]."""
    left, right = resolve_format(a_format), resolve_format(b_format)
    if left.family != "fp8" or right.family != "fp8" or fake_value(a).dim() != 2:
        raise Unsupported(f"a matmul of {a_format} and {b_format}")
    blocks = left.block[1], right.block[1]
    if blocks == (WHOLE_DIM, WHOLE_DIM):
        scales = Scales(a_scales[0], b_scales[0])
    elif left.block == (1, SCALE_BLOCK) and blocks[1] == SCALE_BLOCK:
        scales = Scales(a_scales[0], b_scales[0], SCALE_BLOCK, right.block[0])
    else:
        raise Unsupported(f"a matmul of {a_format} and {b_format}")
    return GemmCall(a, b, bias, scales, is_rhs_transposed=True)


def _check_float32(*scales: fx.Node) -> None:
    if any(fake_value(scale).dtype != torch.float32 for scale in scales):
        raise Unsupported("scales that are not float32")


READERS: dict[Any, Callable[..., GemmCall]] = {
    aten.mm.default: _read_mm,
    aten.addmm.default: _read_addmm,
    aten._scaled_mm.default: _read_scaled_mm,
    aten._scaled_mm_v2.default: _read_scaled_mm_v2,
    torch.ops.fulgurite.scaled_mm.default: _read_our_scaled_mm,
}


def unsupported_reason(node: fx.Node) -> str | None:
    """Why a GEMM can't be generated; None if it can."""
    try:
        call = read_gemm(node)
    except Unsupported as reason:
        return str(reason)
    a, b = fake_value(call.lhs), fake_value(call.rhs)
    b = b.t() if call.is_rhs_transposed else b
    is_float8 = a.dtype in FLOAT8 and b.dtype in FLOAT8 and call.scales is not None
    if not is_float8 and (a.dtype not in (torch.bfloat16, torch.float16) or b.dtype != a.dtype):
        return f"a GEMM of {a.dtype}"
    if fake_value(node).dtype in FLOAT8:
        return "a GEMM with a float8 result"
    sizes = (a.shape[1], b.shape[1], *a.stride(), *b.stride())
    if not all(isinstance(size, int) for size in sizes):
        return "a GEMM whose K, N or strides are dynamic"
    rows = a.shape[0]
    if min(a.shape[1], b.shape[1]) < 2 or (isinstance(rows, int) and rows < 2):
        return "a matrix-vector product"
    if 1 not in a.stride() or 1 not in b.stride():
        return "a matrix that is contiguous in neither dimension"
    if is_float8 and (a.stride(1) != 1 or b.stride(0) != 1):
        return "a float8 GEMM whose K is not contiguous"
    return None
