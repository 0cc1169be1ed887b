# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts of a few tokens: two kernels from routes to the sum, nothing sorted in between.

    h[t, j] = gate(rms_norm(x[t]) @ gate_up[e].T)            e = experts[t, j]; or without the norm
    out[t]  = residual[t] + sum over j of weights[t, j] * (h[t, j] @ down[e].T)

In: rows x [T, D], their routes and dense weights, gate_up [E, 2I, D] and down [E, D, I]. Out: [T, D].

So few tokens hardly ever share an expert: each pair of token and expert reads its weights by itself, as
wide as memory gives them, and multiplies without the tensor cores. Sums are in float32; h is rounded once.
Numbers of no expert add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.grouped_gemm.triton_grouped_gemm import GATE_IDS
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.moe.triton_small_batch_quantized import run_quantized_experts
from fulgurite.kernels.tuning.moe import MAX_SMALL_BATCH
from fulgurite.quant import QuantTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["E"])
def gate_up_kernel(
    x_ptr, experts_ptr, w_ptr, norm_ptr, h_ptr, E, inner, D, x_stride, w_expert, w_stride,
    eps, offset, alpha, limit,
    K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN numbers of one pair's h."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair)
    live = (expert >= 0) & (expert < E)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    column = tl.arange(0, BK)
    x_ptr += (pair // K).to(tl.int64) * x_stride
    w_ptr += tl.where(live, expert, 0) * w_expert
    rows = tl.where(n < inner, n, 0).to(tl.int64)[:, None] * w_stride
    left = tl.zeros([BN, BK], tl.float32)
    right = tl.zeros([BN, BK], tl.float32)
    squares = tl.zeros([1, BK], tl.float32)
    for start in tl.range(0, D, BK, num_stages=STAGES):
        at = (start + column)[None, :]
        if EVEN:
            x = tl.load(x_ptr + at)
            w = tl.load(w_ptr + rows + at)
            v = tl.load(w_ptr + inner * w_stride + rows + at)
        else:
            x = tl.load(x_ptr + at, at < D, 0.0)
            w = tl.load(w_ptr + rows + at, at < D, 0.0)
            v = tl.load(w_ptr + inner * w_stride + rows + at, at < D, 0.0)
        x = x.to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + at, at < D, 0.0).to(tl.float32) + offset
        left += w.to(tl.float32) * x
        right += v.to(tl.float32) * x
    factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / D + eps) if NORM else 1.0
    out = apply_gate(tl.sum(left, 1) * factor, tl.sum(right, 1) * factor, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    tl.store(h_ptr + pair.to(tl.int64) * inner + n, out.to(h_ptr.dtype.element_ty), n < inner)


@triton.jit(do_not_specialize=["E"])
def down_kernel(
    h_ptr, experts_ptr, weights_ptr, w_ptr, residual_ptr, out_ptr, E, D, inner, w_expert, w_stride,
    residual_stride,
    K: tl.constexpr, BJ: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN numbers of one token, all of its K experts side by side."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    token = tl.program_id(1)
    j = tl.arange(0, BJ)
    expert = tl.load(experts_ptr + token * K + j, j < K, -1)
    live = (expert >= 0) & (expert < E)
    weight = tl.load(weights_ptr + token * K + j, live, 0.0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    n_in = tl.where(n < D, n, 0).to(tl.int64)
    row = tl.where(live, expert, 0)[:, None] * w_expert + n_in[None, :] * w_stride
    from_h = h_ptr + (token * K + tl.where(live, j, 0)).to(tl.int64)[:, None, None] * inner
    column = tl.arange(0, BK)[None, None, :]
    there = live[:, None, None]
    acc = tl.zeros([BJ, BN, BK], tl.float32)
    for start in tl.range(0, inner, BK, num_stages=STAGES):
        at = start + column
        if EVEN and BJ == K:  # numbers of no expert read the first one's weights, and weigh nothing
            w = tl.load(w_ptr + row[:, :, None] + at)
            h = tl.load(from_h + at)
        else:
            w = tl.load(w_ptr + row[:, :, None] + at, there & (at < inner), 0.0)
            h = tl.load(from_h + at, there & (at < inner), 0.0)
        acc += w.to(tl.float32) * h.to(tl.float32)
    sums = tl.sum(acc, 2)
    out = tl.sum(tl.where(live[:, None], sums * weight[:, None], 0.0), 0)
    if RESIDUAL:
        out += tl.load(residual_ptr + token.to(tl.int64) * residual_stride + n_in).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * D + n, out.to(out_ptr.dtype.element_ty), n < D)


# ---- launching -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpertLaunch:
    """Rows of the weight in a program, columns of a step, warps, stages."""

    rows: int
    depth: int
    warps: int
    stages: int


def inner_plan(pairs: int, inner: int, hidden: int) -> ExpertLaunch:
    return ExpertLaunch(8, 512, 4, 3)


def outer_plan(tokens: int, per_token: int, hidden: int, inner: int) -> ExpertLaunch:
    return ExpertLaunch(4 if per_token > 4 else 8, 256, 8, 3)


def run_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: str,
    alpha: float,
    limit: float,
    norm: tuple[Tensor, float, float] | None,
    residual: Tensor | None,
    activations: tuple[str, str] = (UNQUANTIZED, UNQUANTIZED),
) -> Any:
    """[T, D], or NotImplemented for more tokens and other layouts."""
    if isinstance(gate_up, QuantTensor) and isinstance(down, QuantTensor):
        how = (gate, alpha, limit, norm, residual, activations)
        return run_quantized_experts(x, chosen, weights, gate_up, down, *how)
    tokens, hidden = x.shape
    per_token, inner = chosen.shape[1], down.shape[2]
    if (
        not 0 < tokens <= MAX_SMALL_BATCH
        or not _supports(x, weights, gate_up, down, residual)
        or not inner
    ):
        return NotImplemented
    chosen, weights = chosen.contiguous(), weights.contiguous()
    count, starts = down.shape[0], pdl_options(x.device)
    h = torch.empty((tokens * per_token, inner), dtype=x.dtype, device=x.device)
    plan = inner_plan(tokens * per_token, inner, hidden)
    gate_up_kernel[(cdiv(inner, plan.rows), tokens * per_token)](
        x, chosen, gate_up, x if norm is None else norm[0], h, count, inner, hidden, x.stride(0),
        *gate_up.stride()[:2], *(norm[1:] if norm else (0.0, 0.0)), alpha, limit,
        K=per_token, NORM=norm is not None, GATE=GATE_IDS[gate], EVEN=hidden % plan.depth == 0, BN=plan.rows, BK=plan.depth,
        STAGES=plan.stages, num_warps=plan.warps, **starts,
    )  # fmt: skip
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    plan = outer_plan(tokens, per_token, hidden, inner)
    down_kernel[(cdiv(hidden, plan.rows), tokens)](
        h, chosen, weights, down, out if residual is None else residual, out, count, hidden, inner,
        *down.stride()[:2], 0 if residual is None else residual.stride(0),
        K=per_token, BJ=next_power_of_2(per_token), RESIDUAL=residual is not None,
        EVEN=inner % plan.depth == 0, BN=plan.rows, BK=plan.depth, STAGES=plan.stages,
        num_warps=plan.warps, **starts,
    )  # fmt: skip
    return out


def _supports(
    x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, residual: Tensor | None
) -> bool:
    tensors = [x, gate_up, down, *(t for t in (residual,) if t is not None)]
    plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    if not plain or weights.dtype != torch.float32 or x.dtype not in DTYPES:
        return False
    return all(t.dtype == x.dtype and t.stride(-1) == 1 for t in tensors)
