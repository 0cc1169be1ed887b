# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts of a small batch: two kernels from routes to the sum, nothing sorted in between.

    h[t, j] = gate(rms_norm(x[t]) @ gate_up[e].T)            e = experts[t, j]; or without the norm
    out[t]  = residual[t] + sum over j of weights[t, j] * (h[t, j] @ down[e].T)

In: `SmallBatchArgs` with dense weights, gate_up [E, 2I, D] and down [E, D, I]. Out: [T, D].

So few tokens hardly ever share an expert. Each pair of token and expert reads its weights by
itself, with wide loads, and multiplies without tensor cores. Sums are in float32; h is rounded
once. Indices that are no experts add nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate
from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.moe.small_batch import SmallBatchArgs
from fulgurite.kernels.moe.triton_small_batch_quantized import run_quantized_experts
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import QuantTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@cached_launch(do_not_specialize=["E"])
def gate_up_kernel(
    x_ptr, experts_ptr, w_ptr, norm_ptr, h_ptr, E, intermediate, D, x_stride, w_expert, w_stride,
    eps, offset, alpha, limit,
    TOP_K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of h of one pair."""
    if PDL:
        wait_for_dependencies()
    pair = tl.program_id(1)
    expert = tl.load(experts_ptr + pair)
    live = (expert >= 0) & (expert < E)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)
    x_ptr += (pair // TOP_K).to(tl.int64) * x_stride
    w_ptr += tl.where(live, expert, 0) * w_expert
    rows = tl.where(n < intermediate, n, 0).to(tl.int64)[:, None] * w_stride
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([1, BLOCK_K], tl.float32)
    for start in tl.range(0, D, BLOCK_K, num_stages=NUM_STAGES):
        at = (start + column)[None, :]
        if EVEN_K:
            x = tl.load(x_ptr + at)
            w = tl.load(w_ptr + rows + at)
            v = tl.load(w_ptr + intermediate * w_stride + rows + at)
        else:
            x = tl.load(x_ptr + at, at < D, 0.0)
            w = tl.load(w_ptr + rows + at, at < D, 0.0)
            v = tl.load(w_ptr + intermediate * w_stride + rows + at, at < D, 0.0)
        x = x.to(tl.float32)
        if NORM:
            squares += x * x
            x *= tl.load(norm_ptr + at, at < D, 0.0).to(tl.float32) + offset
        gate += w.to(tl.float32) * x
        up += v.to(tl.float32) * x
    if PDL:  # only now: programs that wait would take the place of those that multiply
        launch_dependents()
    factor = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / D + eps) if NORM else 1.0
    out = apply_gate(tl.sum(gate, 1) * factor, tl.sum(up, 1) * factor, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    into = h_ptr + pair.to(tl.int64) * intermediate + n
    tl.store(into, out.to(h_ptr.dtype.element_ty), n < intermediate)


@cached_launch(do_not_specialize=["E"])
def down_kernel(
    h_ptr, experts_ptr, weights_ptr, w_ptr, residual_ptr, out_ptr, E, D, intermediate, w_expert,
    w_stride, residual_stride,
    TOP_K: tl.constexpr, TOP_K_POW2: tl.constexpr, RESIDUAL: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one token, all of its experts side by side."""
    if PDL:
        wait_for_dependencies()
    token = tl.program_id(1)
    j = tl.arange(0, TOP_K_POW2)
    expert = tl.load(experts_ptr + token * TOP_K + j, j < TOP_K, -1)
    live = (expert >= 0) & (expert < E)
    weight = tl.load(weights_ptr + token * TOP_K + j, live, 0.0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n_in = tl.where(n < D, n, 0).to(tl.int64)
    row = tl.where(live, expert, 0)[:, None] * w_expert + n_in[None, :] * w_stride
    pair = (token * TOP_K + tl.where(live, j, 0)).to(tl.int64)
    from_h = h_ptr + pair[:, None, None] * intermediate
    column = tl.arange(0, BLOCK_K)[None, None, :]
    mask = live[:, None, None]
    acc = tl.zeros([TOP_K_POW2, BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, intermediate, BLOCK_K, num_stages=NUM_STAGES):
        at = start + column
        if EVEN_K and TOP_K_POW2 == TOP_K:  # pairs without an expert read expert 0, with weight 0
            w = tl.load(w_ptr + row[:, :, None] + at)
            h = tl.load(from_h + at)
        else:
            w = tl.load(w_ptr + row[:, :, None] + at, mask & (at < intermediate), 0.0)
            h = tl.load(from_h + at, mask & (at < intermediate), 0.0)
        acc += w.to(tl.float32) * h.to(tl.float32)
    if PDL:
        launch_dependents()
    sums = tl.sum(acc, 2)
    out = tl.sum(tl.where(live[:, None], sums * weight[:, None], 0.0), 0)
    if RESIDUAL:
        out += tl.load(residual_ptr + token.to(tl.int64) * residual_stride + n_in).to(tl.float32)
    tl.store(out_ptr + token.to(tl.int64) * D + n, out.to(out_ptr.dtype.element_ty), n < D)


# ---- launching -----------------------------------------------------------------------------------


def run_experts(args: SmallBatchArgs) -> Any:
    """[T, D], or NotImplemented for more tokens and other layouts."""
    if isinstance(args.gate_up, QuantTensor) and isinstance(args.down, QuantTensor):
        return run_quantized_experts(args)
    x, gate_up, down, norm, residual = (
        args.x_TD, args.gate_up, args.down, args.norm, args.residual_TD
    )  # fmt: skip
    (tokens, hidden), (top_k, intermediate) = (
        x.shape,
        (args.routes.experts_Tk.shape[1], down.shape[2]),
    )
    heuristics = heuristics_for(x.device)
    if not 0 < tokens <= heuristics.max_small_batch or not _supports(args) or not intermediate:
        return NotImplemented
    weights, selected = (tensor.contiguous() for tensor in args.routes)
    experts, pdl = down.shape[0], pdl_options(x.device)
    h = torch.empty((tokens * top_k, intermediate), dtype=x.dtype, device=x.device)
    launch = heuristics.small_batch_gate_up
    gate_up_kernel[(cdiv(intermediate, launch.block_n), tokens * top_k)](
        x, selected, gate_up, x if norm is None else norm.weight_D, h, experts, intermediate, hidden,
        x.stride(0), *gate_up.stride()[:2], *(norm[1:] if norm else (0.0, 0.0)), args.gate.alpha,
        args.gate.limit, TOP_K=top_k, NORM=norm is not None, GATE=args.gate.kernel_id,
        EVEN_K=hidden % launch.block_k == 0, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k,
        NUM_STAGES=launch.num_stages, num_warps=launch.num_warps, **pdl,
    )  # fmt: skip
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    launch = heuristics.small_batch_down(top_k)
    down_kernel[(cdiv(hidden, launch.block_n), tokens)](
        h, selected, weights, down, out if residual is None else residual, out, experts, hidden,
        intermediate, *down.stride()[:2], 0 if residual is None else residual.stride(0),
        TOP_K=top_k, TOP_K_POW2=next_power_of_2(top_k), RESIDUAL=residual is not None,
        EVEN_K=intermediate % launch.block_k == 0, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k,
        NUM_STAGES=launch.num_stages, num_warps=launch.num_warps, **pdl,
    )  # fmt: skip
    return out


def _supports(args: SmallBatchArgs) -> bool:
    x, weights = args.x_TD, args.routes.weights_Tk
    tensors = [t for t in (x, args.gate_up, args.down, args.residual_TD) if t is not None]
    is_plain = all(type(t) in (Tensor, torch.nn.Parameter) for t in tensors)
    if not is_plain or weights.dtype != torch.float32 or x.dtype not in DTYPES:
        return False
    return all(t.dtype == x.dtype and t.stride(-1) == 1 for t in tensors)
