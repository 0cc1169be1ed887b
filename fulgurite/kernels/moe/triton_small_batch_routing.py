# mypy: allow-untyped-defs, allow-incomplete-defs
"""Routing of a small batch: the norm, the logits, the selection and its weights in one kernel.

    logits = rms_norm(x) @ weight.T + bias             experts with the k largest, and their weights

In: x [T, D], the router's weight [E, D] and a `RouterConfig` without groups. Out: weights and
experts [T, k].

A program holds the weights of a few experts in registers; it loads them before x is ready (PDL).
The last program to finish selects. An expert's position is the number of larger ones (or equal ones
with a smaller index), counted for all experts at once instead of k times the largest of the rest.
Floats are compared as in `triton_routing.py`: the same selection, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.moe.router_config import RmsNormArgs, RouterConfig
from fulgurite.kernels.moe.triton_routing import EXCLUDED, FLOATS, apply_scoring, sort_key
from fulgurite.kernels.tuning import heuristics_for


@cached_launch
def route_small_batch_kernel(
    x_ptr, w_ptr, norm_ptr, router_bias_ptr, correction_bias_ptr, logits_ptr, counter_ptr, weights_ptr, experts_ptr,
    T, E, D, x_stride, w_stride, scaling_factor, eps, offset,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, TOPK_BEFORE_SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, NORM: tl.constexpr, ROUTER_BIAS: tl.constexpr,
    CORRECTION_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, BLOCK_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of BLOCK_N experts for all tokens; the last program selects."""
    if PDL:
        launch_dependents()
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_K)
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
        if ROUTER_BIAS:
            logit += tl.load(router_bias_ptr + n, n < E, 0.0).to(tl.float32)
        tl.store(logits_ptr + token * E + n, logit, n < E)
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counter_ptr, 0)
        for token in range(T):
            _select_topk_by_counting(
                logits_ptr + token * E, correction_bias_ptr, weights_ptr + token * TOP_K,
                experts_ptr + token * TOP_K, E, scaling_factor, TOP_K, SIGMOID, TOPK_BEFORE_SCORING,
                RENORMALIZE, CORRECTION_BIAS, EXPERTS_POW2, BLOCK_E,
            )  # fmt: skip


@triton.jit
def _select_topk_by_counting(
    logits_ptr, correction_bias_ptr, weights_ptr, experts_ptr, E, scaling_factor,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, TOPK_BEFORE_SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, CORRECTION_BIAS: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Experts and weights of one token."""
    e = tl.arange(0, EXPERTS_POW2)
    valid = e < E
    logits = tl.load(logits_ptr + e, valid, 0.0, cache_modifier=".cg")
    scores = logits
    if not TOPK_BEFORE_SCORING:
        scores = _flatten_row(apply_scoring(logits[None, :], valid[None, :], SIGMOID), EXPERTS_POW2)
    if CORRECTION_BIAS:  # selects by scores: they go to memory, where every thread reads them
        choice = scores + tl.load(correction_bias_ptr + e, valid, 0.0).to(tl.float32)
        tl.debug_barrier()
        tl.store(logits_ptr + e, choice, valid)
        tl.debug_barrier()
    else:
        choice = logits
    key = tl.where(valid, sort_key(choice), EXCLUDED)
    position = tl.zeros([EXPERTS_POW2], tl.int32)
    for start in tl.static_range(0, EXPERTS_POW2, BLOCK_E):
        j = start + tl.arange(0, BLOCK_E)
        other = tl.load(logits_ptr + j, j < E, 0.0, cache_modifier=".cg")
        other = tl.where(j < E, sort_key(other), EXCLUDED)[None, :]
        precedes = (other > key[:, None]) | ((other == key[:, None]) & (j[None, :] < e[:, None]))
        position += tl.sum(precedes.to(tl.int32), 1)
    is_selected = valid & (position < TOP_K)
    if TOPK_BEFORE_SCORING:
        scores = _flatten_row(
            apply_scoring(logits[None, :], is_selected[None, :], SIGMOID), EXPERTS_POW2
        )
    weights = tl.where(is_selected, scores, 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 0) + 1e-20)
    tl.store(weights_ptr + position, weights * scaling_factor, is_selected)
    tl.store(experts_ptr + position, e.to(tl.int64), is_selected)


@triton.jit
def _flatten_row(x, SIZE: tl.constexpr):
    return tl.reshape(x, [SIZE])


def route_small_batch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction_bias: Tensor | None,
    norm: RmsNormArgs | None,
    config: RouterConfig,
) -> Any:
    """Weights and experts [T, k]; NotImplemented for more tokens, groups and other layouts."""
    (tokens, size), experts = x.shape, weight.shape[0]
    heuristics = heuristics_for(x.device)
    if not 0 < tokens <= heuristics.max_small_batch or config.selects_groups:
        return NotImplemented
    if config.is_sparsemixer:
        return NotImplemented
    if not 0 < size <= heuristics.router_max_hidden_size:
        return NotImplemented
    if experts > heuristics.router_max_experts:
        return NotImplemented
    is_supported = x.dtype in FLOATS and weight.dtype in FLOATS
    if not is_supported or x.stride(1) != 1 or weight.stride(1) != 1:
        return NotImplemented
    norm_weight, eps, offset = norm or (x, 0.0, 0.0)
    launch = heuristics.small_batch_router(experts, size)
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    weights = torch.empty((tokens, config.top_k), dtype=torch.float32, device=x.device)
    selected = torch.empty((tokens, config.top_k), dtype=torch.int64, device=x.device)
    route_small_batch_kernel[(cdiv(experts, launch.block_n),)](
        x, weight, norm_weight, x if bias is None else bias,
        x if correction_bias is None else correction_bias, logits, acquire_counters(x.device, 1),
        weights, selected, tokens, experts, size, x.stride(0), weight.stride(0),
        config.scaling_factor, eps, offset, TOP_K=config.top_k, SIGMOID=config.is_sigmoid,
        TOPK_BEFORE_SCORING=config.topk_before_scoring, RENORMALIZE=config.renormalize,
        NORM=norm is not None, ROUTER_BIAS=bias is not None,
        CORRECTION_BIAS=correction_bias is not None, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k,
        EXPERTS_POW2=next_power_of_2(experts), BLOCK_E=launch.block_m, num_warps=launch.num_warps,
        **pdl_options(x.device),
    )  # fmt: skip
    return weights, selected
