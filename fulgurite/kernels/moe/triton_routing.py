# mypy: allow-untyped-defs, allow-incomplete-defs
"""Routing on a GPU: scores, groups, the k best experts and their weights in one kernel.

In: the operator's arguments. Out: weights and experts, or NotImplemented (float64).

    route            logits in memory; a tile of tokens a program
    route_tokens     programs share the experts of a tile of tokens; the last to finish chooses

Numbers are compared as integers with the order of the floats, NaN above all (`sort_key`), and the first
of equals is taken: the choice is that of the reference, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton

NATIVE = not INTERPRETED
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
EXCLUDED = tl.constexpr(-(2**31))  # below every rank: chosen already, or not allowed
NAN_KEY = tl.constexpr(2**31 - 1)


@triton.jit
def sort_key(x):
    """A float as an integer with the same order, NaN above all and both zeros equal."""
    code = (x + 0.0).to(tl.int32, bitcast=True)
    code = tl.where(code == EXCLUDED, 0, code)  # -0
    return tl.where(x != x, NAN_KEY, tl.where(code < 0, code ^ NAN_KEY, code))


@triton.jit
def key_to_float(rank):
    """The float of a rank."""
    return tl.where(rank < 0, rank ^ NAN_KEY, rank).to(tl.float32, bitcast=True)


@triton.jit
def argmax_first(rank, place, SIZE: tl.constexpr):
    """[T, SIZE] -> the largest of each row and the first place that has it."""
    top = tl.max(rank, 1)
    return top, tl.min(tl.where(rank == top[:, None], place, SIZE), 1)


@triton.jit
def apply_scoring(x, valid, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1 / (1 + tl.exp(-x))
    else:
        x = tl.where(valid, x, float("-inf"))
        odd = tl.sum((valid & ((x != x) | (x == float("inf")))).to(tl.int32), 1) > 0
        most = tl.max(tl.where(x != x, float("-inf"), x), 1)
        shares = tl.exp(x - most[:, None])
        chance = shares / tl.sum(shares, 1)[:, None]
        return tl.where(odd[:, None], float("nan"), chance)


@triton.jit
def select_topk(
    logits, bias, token, T, weights_ptr, experts_ptr, scaling, E,
    K: tl.constexpr, SIGMOID: tl.constexpr, FIRST: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BY_TWO: tl.constexpr, BIAS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """Experts and weights of a tile of tokens, logits [BT, BE] in registers."""
    e = tl.arange(0, BE)[None, :]
    valid = e < E
    scores = logits if FIRST else apply_scoring(logits, valid, SIGMOID)
    by_logits: tl.constexpr = (not BIAS) and not (KEPT < GROUPS and BY_TWO)
    choice = logits if by_logits else scores
    if BIAS:
        choice = choice + bias
    rank = tl.where(valid, sort_key(choice), EXCLUDED)
    if KEPT < GROUPS:
        size = E // GROUPS
        g = tl.arange(0, BG)[None, :]
        strength = tl.full([BT, BG], EXCLUDED, tl.int32)
        for group in range(GROUPS):
            mine = tl.where((e // size == group) & valid, rank, EXCLUDED)
            top, at = argmax_first(mine, e, BE)
            if BY_TWO:
                second = tl.max(tl.where(e == at[:, None], EXCLUDED, mine), 1)
                both = sort_key(key_to_float(top) + key_to_float(second))
                top = tl.where(second == EXCLUDED, top, both)
            strength = tl.where(g == group, top[:, None], strength)
        allowed = tl.zeros([BT, BE], tl.int32)
        for _kept in range(KEPT):
            _most, best = argmax_first(strength, g, BG)
            strength = tl.where(g == best[:, None], EXCLUDED, strength)
            allowed = allowed | ((e // size) == best[:, None]).to(tl.int32)
        rank = tl.where(allowed > 0, rank, EXCLUDED)
    j = tl.arange(0, BK)[None, :]
    weights = tl.zeros([BT, BK], tl.float32)
    chosen = tl.zeros([BT, BK], tl.int64)
    for index in range(K):
        _top, best = argmax_first(rank, e, BE)
        here = e == best[:, None]
        rank = tl.where(here, EXCLUDED, rank)
        weight = tl.sum(tl.where(here, scores, 0.0), 1)
        weights = tl.where(j == index, weight[:, None], weights)
        chosen = tl.where(j == index, best[:, None].to(tl.int64), chosen)
    if FIRST:
        weights = tl.where(j < K, apply_scoring(weights, j < K, SIGMOID), 0.0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, 1)[:, None] + 1e-20)
    place = token[:, None].to(tl.int64) * K + j
    keep = (token < T)[:, None] & (j < K)
    tl.store(weights_ptr + place, weights * scaling, keep)
    tl.store(experts_ptr + place, chosen, keep)


@triton.jit(do_not_specialize=["T"])
def route_kernel(
    logits_ptr, bias_ptr, weights_ptr, experts_ptr, T, E, stride, scaling,
    K: tl.constexpr, SIGMOID: tl.constexpr, FIRST: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BY_TWO: tl.constexpr, BIAS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    place = token.to(tl.int64)[:, None] * stride + e[None, :]
    logits = tl.load(logits_ptr + place, (token < T)[:, None] & (e < E)[None, :], 0.0)
    bias = tl.load(bias_ptr + e, e < E, 0.0).to(tl.float32)[None, :] if BIAS else 0.0
    select_topk(
        logits.to(tl.float32), bias, token, T, weights_ptr, experts_ptr, scaling, E, K, SIGMOID,
        FIRST, RENORMALISE, GROUPS, KEPT, BY_TWO, BIAS, BT, BE, BK, BG,
    )  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def route_tokens_kernel(
    x_ptr, w_ptr, add_ptr, bias_ptr, logits_ptr, count_ptr, weights_ptr, experts_ptr,
    T, E, D, x_stride, w_stride, scaling,
    K: tl.constexpr, SIGMOID: tl.constexpr, FIRST: tl.constexpr, RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, BY_TWO: tl.constexpr, BIAS: tl.constexpr,
    BT: tl.constexpr, BE: tl.constexpr, BK: tl.constexpr, BG: tl.constexpr,
    ADD: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Logits of BT tokens and BN experts; whoever finishes a tile of tokens last chooses."""
    tile = tl.program_id(0)
    token = tile * BT + tl.arange(0, BT)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    row = tl.where(token < T, token, 0).to(tl.int64)
    expert = tl.where(n < E, n, 0).to(tl.int64)
    d = tl.arange(0, BD)
    acc = tl.zeros([BT, BN], tl.float32)
    for start in range(0, D, BD):
        inside = (start + d < D)[None, :]
        x = tl.load(x_ptr + row[:, None] * x_stride + (start + d)[None, :], inside, 0.0)
        w = tl.load(w_ptr + expert[:, None] * w_stride + (start + d)[None, :], inside, 0.0)
        if NATIVE and x.dtype == w.dtype and x.dtype != tl.float32:
            acc = tl.dot(x, tl.trans(w), acc)
        else:
            x, w = x.to(tl.float32), w.to(tl.float32)
            acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    if ADD:
        acc += tl.load(add_ptr + expert).to(tl.float32)[None, :]
    place = token.to(tl.int64)[:, None] * E + n[None, :]
    tl.store(logits_ptr + place, acc, (token < T)[:, None] & (n < E)[None, :])
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == tl.num_programs(1) - 1
    if last:
        tl.store(count_ptr + tile, 0)
        e = tl.arange(0, BE)
        there = (token < T)[:, None] & (e < E)[None, :]
        from_ptr = logits_ptr + token.to(tl.int64)[:, None] * E + e[None, :]
        logits = tl.load(from_ptr, there, 0.0, cache_modifier=".cg")
        bias = tl.load(bias_ptr + e, e < E, 0.0).to(tl.float32)[None, :] if BIAS else 0.0
        select_topk(
            logits, bias, token, T, weights_ptr, experts_ptr, scaling, E, K, SIGMOID, FIRST,
            RENORMALISE, GROUPS, KEPT, BY_TWO, BIAS, BT, BE, BK, BG,
        )  # fmt: skip


def _config_constexprs(experts: int, correction_bias: Tensor | None, *rule: Any) -> dict[str, Any]:
    """A rule as what is compiled in."""
    per_token, score, topk_before_scoring, renormalize, _, groups, topk_groups, group_by = rule
    return {
        "K": per_token, "SIGMOID": score == "sigmoid", "FIRST": topk_before_scoring,
        "RENORMALISE": renormalize, "GROUPS": groups, "KEPT": topk_groups,
        "BY_TWO": group_by == "two", "BIAS": correction_bias is not None,
        "BE": triton.next_power_of_2(experts), "BK": triton.next_power_of_2(per_token),
        "BG": triton.next_power_of_2(groups),
    }  # fmt: skip


def _allocate_outputs(x: Tensor, per_token: int) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], per_token)
    return x.new_empty(shape, dtype=torch.float32), x.new_empty(shape, dtype=torch.int64)


def route(logits: Tensor, correction_bias: Tensor | None, *rule: Any) -> Any:
    """`fulgurite::route`."""
    if logits.dtype not in FLOATS:
        return NotImplemented
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    weights, chosen = _allocate_outputs(logits, rule[0])
    tokens, experts = logits.shape
    if tokens:
        route_kernel[(triton.cdiv(tokens, 4),)](
            logits, logits if correction_bias is None else correction_bias, weights, chosen, tokens, experts,
            logits.stride(0), rule[4], BT=4, num_warps=4, **_config_constexprs(experts, correction_bias, *rule),
        )  # fmt: skip
    return weights, chosen


def route_tokens(
    x: Tensor, weight: Tensor, bias: Tensor | None, correction_bias: Tensor | None, *rule: Any
) -> Any:
    """`route` of x @ weight.T + bias."""
    fits = x.dtype in FLOATS and weight.dtype in FLOATS
    if not fits or x.stride(1) != 1 or weight.stride(1) != 1 or x.shape[1] == 0:
        return NotImplemented
    (tokens, size), experts = x.shape, weight.shape[0]
    weights, chosen = _allocate_outputs(x, rule[0])
    if tokens == 0:
        return weights, chosen
    rows = 16 if tokens <= 1024 else 32
    columns = 16 if tokens <= 64 else min(64, max(16, triton.next_power_of_2(experts)))
    tiles = triton.cdiv(tokens, rows)
    logits = x.new_empty(tokens, experts, dtype=torch.float32)
    route_tokens_kernel[(tiles, triton.cdiv(experts, columns))](
        x, weight, x if bias is None else bias, x if correction_bias is None else correction_bias, logits,
        acquire_counters(x.device, tiles), weights, chosen, tokens, experts, size, x.stride(0),
        weight.stride(0), rule[4], BT=rows, ADD=bias is not None, BN=columns,
        BD=128 if x.dtype != torch.float32 else 64, NATIVE=NATIVE, num_warps=4, num_stages=3,
        **_config_constexprs(experts, correction_bias, *rule),
    )  # fmt: skip
    return weights, chosen
