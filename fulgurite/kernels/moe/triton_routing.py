# mypy: allow-untyped-defs, allow-incomplete-defs
"""Routing on a GPU: scores, groups, the top-k experts and their weights in one kernel.

In: the operator's arguments. Out: weights and experts, or NotImplemented (float64).

    route            logits in memory; a program takes a tile of tokens
    route_tokens     programs share the experts of a tile of tokens; the last one to finish selects

Floats are compared as integers of the same order, NaN the largest (`sort_key`), and the first of
equals is taken: the selection is that of the reference, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.moe.router_config import RouterConfig
from fulgurite.kernels.tuning import heuristics_for

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
EXCLUDED = tl.constexpr(-(2**31))  # below every key: selected already, or not allowed
NAN_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def sort_key(x):
    """A float as an integer of the same order; NaN is the largest, both zeros are equal."""
    code = (x + 0.0).to(tl.int32, bitcast=True)
    code = tl.where(code == EXCLUDED, 0, code)  # -0
    return tl.where(x != x, NAN_KEY, tl.where(code < 0, code ^ NAN_KEY, code))


@triton.jit
def key_to_float(key):
    """The float of a key."""
    return tl.where(key < 0, key ^ NAN_KEY, key).to(tl.float32, bitcast=True)


@triton.jit
def argmax_first(key, index, SIZE: tl.constexpr):
    """[T, SIZE] -> the largest key of each row and the first index that has it."""
    top = tl.max(key, 1)
    return top, tl.min(tl.where(key == top[:, None], index, SIZE), 1)


@triton.jit
def apply_scoring(x, valid, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1 / (1 + tl.exp(-x))
    else:
        x = tl.where(valid, x, float("-inf"))
        is_nan = tl.sum((valid & ((x != x) | (x == float("inf")))).to(tl.int32), 1) > 0
        row_max = tl.max(tl.where(x != x, float("-inf"), x), 1)
        exponentials = tl.exp(x - row_max[:, None])
        softmax = exponentials / tl.sum(exponentials, 1)[:, None]
        return tl.where(is_nan[:, None], float("nan"), softmax)


@triton.jit
def select_topk(
    logits, bias, token, T, weights_ptr, experts_ptr, scaling_factor, E,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, TOPK_BEFORE_SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, CORRECTION_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, TOP_K_POW2: tl.constexpr, GROUPS_POW2: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a tile of tokens, logits [BLOCK_M, EXPERTS_POW2] in registers."""
    e = tl.arange(0, EXPERTS_POW2)[None, :]
    valid = e < E
    scores = logits if TOPK_BEFORE_SCORING else apply_scoring(logits, valid, SIGMOID)
    by_logits: tl.constexpr = (not CORRECTION_BIAS) and not (TOPK_GROUPS < NUM_GROUPS and TOP2_SUM)
    choice = logits if by_logits else scores
    if CORRECTION_BIAS:
        choice = choice + bias
    key = tl.where(valid, sort_key(choice), EXCLUDED)
    if TOPK_GROUPS < NUM_GROUPS:
        size = E // NUM_GROUPS
        g = tl.arange(0, GROUPS_POW2)[None, :]
        group_score = tl.full([BLOCK_M, GROUPS_POW2], EXCLUDED, tl.int32)
        for group in range(NUM_GROUPS):
            group_keys = tl.where((e // size == group) & valid, key, EXCLUDED)
            top, best = argmax_first(group_keys, e, EXPERTS_POW2)
            if TOP2_SUM:
                second = tl.max(tl.where(e == best[:, None], EXCLUDED, group_keys), 1)
                both = sort_key(key_to_float(top) + key_to_float(second))
                top = tl.where(second == EXCLUDED, top, both)
            group_score = tl.where(g == group, top[:, None], group_score)
        allowed = tl.zeros([BLOCK_M, EXPERTS_POW2], tl.int32)
        for _group in range(TOPK_GROUPS):
            _score, best = argmax_first(group_score, g, GROUPS_POW2)
            group_score = tl.where(g == best[:, None], EXCLUDED, group_score)
            allowed = allowed | ((e // size) == best[:, None]).to(tl.int32)
        key = tl.where(allowed > 0, key, EXCLUDED)
    j = tl.arange(0, TOP_K_POW2)[None, :]
    weights = tl.zeros([BLOCK_M, TOP_K_POW2], tl.float32)
    selected = tl.zeros([BLOCK_M, TOP_K_POW2], tl.int64)
    for index in range(TOP_K):
        _top, best = argmax_first(key, e, EXPERTS_POW2)
        is_best = e == best[:, None]
        key = tl.where(is_best, EXCLUDED, key)
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        weights = tl.where(j == index, weight[:, None], weights)
        selected = tl.where(j == index, best[:, None].to(tl.int64), selected)
    if TOPK_BEFORE_SCORING:
        weights = tl.where(j < TOP_K, apply_scoring(weights, j < TOP_K, SIGMOID), 0.0)
    if RENORMALIZE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    at = token[:, None].to(tl.int64) * TOP_K + j
    keep = (token < T)[:, None] & (j < TOP_K)
    tl.store(weights_ptr + at, weights * scaling_factor, keep)
    tl.store(experts_ptr + at, selected, keep)


@triton.jit
def load_bias(bias_ptr, e, E, HAS_BIAS: tl.constexpr):
    """The correction bias of all experts [1, experts], or 0."""
    if HAS_BIAS:
        return tl.load(bias_ptr + e, e < E, 0.0).to(tl.float32)[None, :]
    else:
        return 0.0


@cached_launch(do_not_specialize=["T"])
def route_kernel(
    logits_ptr, correction_bias_ptr, weights_ptr, experts_ptr, T, E, stride, scaling_factor,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, TOPK_BEFORE_SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, CORRECTION_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, TOP_K_POW2: tl.constexpr, GROUPS_POW2: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.arange(0, EXPERTS_POW2)
    at = token.to(tl.int64)[:, None] * stride + e[None, :]
    logits = tl.load(logits_ptr + at, (token < T)[:, None] & (e < E)[None, :], 0.0)
    bias = load_bias(correction_bias_ptr, e, E, CORRECTION_BIAS)
    select_topk(
        logits.to(tl.float32), bias, token, T, weights_ptr, experts_ptr, scaling_factor, E, TOP_K,
        SIGMOID, TOPK_BEFORE_SCORING, RENORMALIZE, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM,
        CORRECTION_BIAS, BLOCK_M, EXPERTS_POW2, TOP_K_POW2, GROUPS_POW2,
    )  # fmt: skip


@cached_launch(do_not_specialize=["T"])
def route_tokens_kernel(
    x_ptr, w_ptr, router_bias_ptr, correction_bias_ptr, logits_ptr, counter_ptr, weights_ptr,
    experts_ptr, T, E, D, x_stride, w_stride, scaling_factor,
    TOP_K: tl.constexpr, SIGMOID: tl.constexpr, TOPK_BEFORE_SCORING: tl.constexpr,
    RENORMALIZE: tl.constexpr, NUM_GROUPS: tl.constexpr, TOPK_GROUPS: tl.constexpr,
    TOP2_SUM: tl.constexpr, CORRECTION_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
    EXPERTS_POW2: tl.constexpr, TOP_K_POW2: tl.constexpr, GROUPS_POW2: tl.constexpr,
    ROUTER_BIAS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Logits of BLOCK_M tokens and BLOCK_N experts; the last program of a tile of tokens
    selects."""
    tile = tl.program_id(0)
    token = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(token < T, token, 0).to(tl.int64)
    expert = tl.where(n < E, n, 0).to(tl.int64)
    d = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, D, BLOCK_K):
        inside = (start + d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + (start + d)[None, :], inside, 0.0)
        w = tl.load(w_ptr + expert[:, None] * w_stride + (start + d)[None, :], inside, 0.0)
        if NATIVE and x.dtype == w.dtype and x.dtype != tl.float32:
            acc = tl.dot(x, tl.trans(w), acc)
        else:
            x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if ROUTER_BIAS:
        acc += tl.load(router_bias_ptr + expert).to(tl.float32)[None, :]
    at = token.to(tl.int64)[:, None] * E + n[None, :]
    tl.store(logits_ptr + at, acc, (token < T)[:, None] & (n < E)[None, :])
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if is_last:
        tl.store(counter_ptr + tile, 0)
        e = tl.arange(0, EXPERTS_POW2)
        mask = (token < T)[:, None] & (e < E)[None, :]
        from_ptr = logits_ptr + token.to(tl.int64)[:, None] * E + e[None, :]
        logits = tl.load(from_ptr, mask, 0.0, cache_modifier=".cg")
        bias = load_bias(correction_bias_ptr, e, E, CORRECTION_BIAS)
        select_topk(
            logits, bias, token, T, weights_ptr, experts_ptr, scaling_factor, E, TOP_K, SIGMOID,
            TOPK_BEFORE_SCORING, RENORMALIZE, NUM_GROUPS, TOPK_GROUPS, TOP2_SUM, CORRECTION_BIAS,
            BLOCK_M, EXPERTS_POW2, TOP_K_POW2, GROUPS_POW2,
        )  # fmt: skip


def _config_constexprs(
    experts: int, correction_bias: Tensor | None, config: RouterConfig
) -> dict[str, Any]:
    """The kernels' compile-time arguments."""
    return {
        "TOP_K": config.top_k, "SIGMOID": config.is_sigmoid,
        "TOPK_BEFORE_SCORING": config.topk_before_scoring, "RENORMALIZE": config.renormalize,
        "NUM_GROUPS": config.num_groups, "TOPK_GROUPS": config.topk_groups,
        "TOP2_SUM": config.is_top2_sum, "CORRECTION_BIAS": correction_bias is not None,
        "EXPERTS_POW2": next_power_of_2(experts), "TOP_K_POW2": next_power_of_2(config.top_k),
        "GROUPS_POW2": next_power_of_2(config.num_groups),
    }  # fmt: skip


def _allocate_outputs(x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], top_k)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


def route(logits: Tensor, correction_bias: Tensor | None, config: RouterConfig) -> Any:
    """`fulgurite::route`."""
    if logits.dtype not in FLOATS or config.is_sparsemixer:
        return NotImplemented
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights, selected = _allocate_outputs(logits, config.top_k)
    tokens, experts = logits.shape
    if tokens:
        launch = heuristics_for(logits.device).route
        route_kernel[(cdiv(tokens, launch.block_m),)](
            logits, logits if correction_bias is None else correction_bias, weights, selected,
            tokens, experts, logits.stride(0), config.scaling_factor, BLOCK_M=launch.block_m,
            num_warps=launch.num_warps, **_config_constexprs(experts, correction_bias, config),
        )  # fmt: skip
    return weights, selected


def route_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    correction_bias: Tensor | None,
    config: RouterConfig,
) -> Any:
    """`route` of x @ weight.T + bias."""
    is_supported = x.dtype in FLOATS and weight.dtype in FLOATS and not config.is_sparsemixer
    if not is_supported or x.stride(1) != 1 or weight.stride(1) != 1 or x.shape[1] == 0:
        return NotImplemented
    (tokens, size), experts = x.shape, weight.shape[0]
    weights, selected = _allocate_outputs(x, config.top_k)
    if tokens == 0:
        return weights, selected
    launch = heuristics_for(x.device).route_tokens(tokens, experts, x.dtype)
    tiles = cdiv(tokens, launch.block_m)
    logits = x.new_empty(tokens, experts, dtype=torch.float32)
    route_tokens_kernel[(tiles, cdiv(experts, launch.block_n))](
        x, weight, x if bias is None else bias, x if correction_bias is None else correction_bias,
        logits, acquire_counters(x.device, tiles), weights, selected, tokens, experts, size,
        x.stride(0), weight.stride(0), config.scaling_factor, BLOCK_M=launch.block_m,
        ROUTER_BIAS=bias is not None, BLOCK_N=launch.block_n, BLOCK_K=launch.block_k, NATIVE=NATIVE,
        num_warps=launch.num_warps, num_stages=launch.num_stages,
        **_config_constexprs(experts, correction_bias, config),
    )  # fmt: skip
    return weights, selected
