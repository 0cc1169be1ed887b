# mypy: allow-untyped-defs, allow-incomplete-defs
"""Routing a few tokens: the norm, the logits, the choice and its weights in one kernel.

    logits = rms_norm(x) @ weight.T + bias                   experts with the K largest, and their weights

In: x [T, D], the router's weight [E, D] and a rule without groups. Out: weights and experts [T, K].

A program holds a few experts' weights, which are on their way before x is there. Whoever is last chooses: an
expert's place is how many are larger (or equal and before it), counted all at once instead of K times the
largest of the rest. Numbers are compared as in `routing.py`: the same choice, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.moe.triton_routing import EXCLUDED, FLOATS, apply_scoring, sort_key
from fulgurite.kernels.tuning.moe import MAX_SMALL_BATCH

REGISTER_ELEMENTS = 16384  # numbers of the weight in a program: 32 registers of each of 256 threads
MAX_HIDDEN_SIZE = 8192  # columns, and
MAX_EXPERTS = 512  # experts that a program compares


@triton.jit
def route_small_batch_kernel(
    x_ptr, w_ptr, norm_ptr, add_ptr, bias_ptr, logits_ptr, count_ptr, weights_ptr, experts_ptr,
    T, E, D, x_stride, w_stride, scaling, eps, offset,
    K: tl.constexpr, SIGMOID: tl.constexpr, FIRST: tl.constexpr, RENORMALISE: tl.constexpr,
    NORM: tl.constexpr, ADD: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of BN experts for all tokens; the last program chooses."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    d = tl.arange(0, BD)
    inside = d < D
    from_w = w_ptr + tl.where(n < E, n, 0).to(tl.int64)[:, None] * w_stride + d[None, :]
    w = tl.load(from_w, inside[None, :], 0.0)
    if NORM:
        norm = tl.load(norm_ptr + d, inside, 0.0).to(tl.float32) + offset
    if PDL:
        wait_for_dependencies()
    for token in range(T):
        x = tl.load(x_ptr + token * x_stride + d, inside, 0.0).to(tl.float32)
        if NORM:
            factor = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
            x = x * norm
        logit = tl.sum(w.to(tl.float32) * x[None, :], 1)
        if NORM:
            logit *= factor
        if ADD:
            logit += tl.load(add_ptr + n, n < E, 0.0).to(tl.float32)
        tl.store(logits_ptr + token * E + n, logit, n < E)
    tl.debug_barrier()
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(count_ptr, 0)
        for token in range(T):
            _select_topk_by_counting(
                logits_ptr + token * E, bias_ptr, weights_ptr + token * K, experts_ptr + token * K,
                E, scaling, K, SIGMOID, FIRST, RENORMALISE, BIAS, BE, BLOCK,
            )  # fmt: skip


@triton.jit
def _select_topk_by_counting(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, E, scaling,
    K: tl.constexpr, SIGMOID: tl.constexpr, FIRST: tl.constexpr, RENORMALISE: tl.constexpr,
    BIAS: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Experts and weights of one token."""
    e = tl.arange(0, BE)
    valid = e < E
    logits = tl.load(logits_ptr + e, valid, 0.0, cache_modifier=".cg")
    scores = logits
    if not FIRST:
        scores = _flatten_row(apply_scoring(logits[None, :], valid[None, :], SIGMOID), BE)
    if BIAS:  # chooses among scores; they go where every thread can read them
        choice = scores + tl.load(bias_ptr + e, valid, 0.0).to(tl.float32)
        tl.debug_barrier()
        tl.store(logits_ptr + e, choice, valid)
        tl.debug_barrier()
    else:
        choice = logits
    rank = tl.where(valid, sort_key(choice), EXCLUDED)
    place = tl.zeros([BE], tl.int32)
    for start in tl.static_range(0, BE, BLOCK):
        j = start + tl.arange(0, BLOCK)
        other = tl.load(logits_ptr + j, j < E, 0.0, cache_modifier=".cg")
        other = tl.where(j < E, sort_key(other), EXCLUDED)[None, :]
        first = (other > rank[:, None]) | ((other == rank[:, None]) & (j[None, :] < e[:, None]))
        place += tl.sum(first.to(tl.int32), 1)
    taken = valid & (place < K)
    if FIRST:
        scores = _flatten_row(apply_scoring(logits[None, :], taken[None, :], SIGMOID), BE)
    weights = tl.where(taken, scores, 0.0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(weights_ptr + place, weights * scaling, taken)
    tl.store(experts_ptr + place, e.to(tl.int64), taken)


@triton.jit
def _flatten_row(x, SIZE: tl.constexpr):
    return tl.reshape(x, [SIZE])


def route_small_batch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction_bias: Tensor | None,
    norm: tuple[Tensor, float, float] | None,
    *rule: Any,
) -> Any:
    """Weights and experts [T, K]; NotImplemented for more tokens, groups and other layouts."""
    per_token, score, topk_before_scoring, renormalize, scaling, groups, topk_groups, _ = rule
    (tokens, size), experts = x.shape, weight.shape[0]
    if not 0 < tokens <= MAX_SMALL_BATCH or topk_groups < groups or not 0 < size <= MAX_HIDDEN_SIZE:
        return NotImplemented
    fits = x.dtype in FLOATS and weight.dtype in FLOATS and experts <= MAX_EXPERTS
    if not fits or x.stride(1) != 1 or weight.stride(1) != 1:
        return NotImplemented
    scale, eps, offset = norm or (x, 0.0, 0.0)
    width = next_power_of_2(size)
    rows = min(8, max(1, REGISTER_ELEMENTS // width))
    programs = cdiv(experts, rows)
    power = next_power_of_2(experts)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    weights = torch.empty((tokens, per_token), dtype=torch.float32, device=x.device)
    chosen = torch.empty((tokens, per_token), dtype=torch.int64, device=x.device)
    route_small_batch_kernel[(programs,)](
        x, weight, scale, x if bias is None else bias, x if correction_bias is None else correction_bias,
        logits, acquire_counters(x.device, 1), weights, chosen, tokens, experts, size, x.stride(0),
        weight.stride(0), scaling, eps, offset, K=per_token, SIGMOID=score == "sigmoid",
        FIRST=topk_before_scoring, RENORMALISE=renormalize, NORM=norm is not None, ADD=bias is not None,
        BIAS=correction_bias is not None, BN=rows, BD=width, BE=power,
        BLOCK=min(power, max(16, REGISTER_ELEMENTS // power)), num_warps=8, **pdl_options(x.device),
    )  # fmt: skip
    return weights, chosen
