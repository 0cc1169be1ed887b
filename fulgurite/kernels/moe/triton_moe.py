# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sorting pairs of token and expert, and summing each token's rows, on a GPU.

In: the operators' arguments. Out: their results, or NotImplemented (float64). No kernel waits for the
host, and none adds with atomics: the same inputs give the same bits.

    index      few pairs: one program compares all with all. Many: counts of stretches of 256 pairs,
               their running sums for each expert, then each pair's place
    combine    a token's rows, one after the other
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
CHUNK_PAIRS = 256  # pairs of token and expert that one program sorts


@triton.jit
def load_pair_experts(experts_ptr, pair, S, E):
    """The expert of each pair, E for numbers of no expert, E + 1 past the last pair."""
    expert = tl.load(experts_ptr + pair, pair < S, 0)
    expert = tl.where((expert < 0) | (expert >= E), E, expert).to(tl.int32)
    return tl.where(pair < S, expert, E + 1)


@triton.jit
def store_order(place, pair, S, per_token, tokens_ptr, slots_ptr, places_ptr):
    inside = pair < S
    tl.store(places_ptr + pair, place, inside)
    tl.store(tokens_ptr + place, pair // per_token, inside)
    tl.store(slots_ptr + place, pair % per_token, inside)


@triton.jit
def count_preceding_pairs(expert, expert_ptr, first, S, E, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """How many pairs of the same stretch come before: the same expert's earlier ones, and, second,
    all of smaller experts."""
    at = tl.arange(0, CHUNK)
    same = tl.zeros([CHUNK], tl.int32)
    smaller = tl.zeros([CHUNK], tl.int32)
    for block in range(0, CHUNK, BLOCK):
        j = block + tl.arange(0, BLOCK)
        other = load_pair_experts(expert_ptr, first + j, S, E)[None, :]
        before = (other == expert[:, None]) & (j[None, :] < at[:, None])
        same += tl.sum(before.to(tl.int32), 1)
        smaller += tl.sum((other < expert[:, None]).to(tl.int32), 1)
    return same, smaller


@triton.jit(do_not_specialize=["S"])
def sort_small_kernel(
    experts_ptr, counts_ptr, offsets_ptr, tokens_ptr, slots_ptr, places_ptr, S, E, per_token,
    CHUNK: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All pairs in one program."""
    pair = tl.arange(0, CHUNK)
    expert = load_pair_experts(experts_ptr, pair, S, E)
    same, smaller = count_preceding_pairs(expert, experts_ptr, 0, S, E, CHUNK, BLOCK)
    store_order(smaller + same, pair, S, per_token, tokens_ptr, slots_ptr, places_ptr)
    e = tl.arange(0, BE)
    counts = tl.zeros([BE], tl.int32)
    for block in range(0, CHUNK, BLOCK):
        other = load_pair_experts(experts_ptr, block + tl.arange(0, BLOCK), S, E)
        counts += tl.sum((other[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + e, counts, e < E)
    tl.store(offsets_ptr + e, tl.cumsum(counts, 0), e < E)


@triton.jit(do_not_specialize=["S"])
def count_pairs_kernel(
    experts_ptr, before_ptr, S, E, CHUNK: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pairs of each expert (and of no expert) in a stretch: before[stretch, E + 1]."""
    chunk = tl.program_id(0)
    e = tl.arange(0, BE)
    counts = tl.zeros([BE], tl.int32)
    for block in range(0, CHUNK, BLOCK):
        pair = chunk * CHUNK + block + tl.arange(0, BLOCK)
        expert = load_pair_experts(experts_ptr, pair, S, E)
        counts += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(before_ptr + chunk * (E + 1) + e, counts, e <= E)


@triton.jit(do_not_specialize=["chunks"])
def scan_counts_kernel(before_ptr, counts_ptr, chunks, E, BLOCK: tl.constexpr):
    """Counts of stretches become the counts before each, for one expert; their sum is its count."""
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        place = before_ptr + chunk * (E + 1) + expert
        counts = tl.load(place, chunk < chunks, 0)
        tl.store(place, total + tl.cumsum(counts, 0) - counts, chunk < chunks)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + expert, total)


@triton.jit(do_not_specialize=["S"])
def scatter_pairs_kernel(
    experts_ptr, before_ptr, counts_ptr, offsets_ptr, tokens_ptr, slots_ptr, places_ptr, S, E, per_token,
    CHUNK: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Where each pair goes: smaller experts, earlier stretches, earlier pairs of its own."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = load_pair_experts(experts_ptr, pair, S, E)
    place, _smaller = count_preceding_pairs(expert, experts_ptr, chunk * CHUNK, S, E, CHUNK, BLOCK)
    place += tl.load(before_ptr + chunk * (E + 1) + expert, expert <= E, 0)
    for start in range(0, E, BLOCK):
        e = start + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + e, e < E, 0)
        place += tl.sum(tl.where(e[None, :] < expert[:, None], counts[None, :], 0), 1)
    store_order(place, pair, S, per_token, tokens_ptr, slots_ptr, places_ptr)
    if chunk == 0:
        e = tl.arange(0, BE)
        counts = tl.load(counts_ptr + e, e < E, 0)
        tl.store(offsets_ptr + e, tl.cumsum(counts, 0), e < E)


def sort_by_expert(experts_Tk: Tensor, experts: int) -> Any:
    """`fulgurite::moe_index`."""
    chosen = experts_Tk.contiguous()
    tokens, per_token = chosen.shape
    pairs = tokens * per_token

    def room(*shape: int) -> Tensor:
        return chosen.new_empty(shape, dtype=torch.int32)

    counts, offsets = room(experts + 1), room(experts)
    of_token, slots, places = room(pairs), room(pairs), room(tokens, per_token)
    wide, order = triton.next_power_of_2(experts + 1), (of_token, slots, places)
    if pairs <= CHUNK_PAIRS:
        size = max(16, triton.next_power_of_2(max(pairs, 1)))
        sort_small_kernel[(1,)](
            chosen, counts, offsets, *order, pairs, experts, per_token,
            CHUNK=size, BE=wide, BLOCK=16, num_warps=4,
        )  # fmt: skip
        return counts[:experts], offsets, *order
    chunks = triton.cdiv(pairs, CHUNK_PAIRS)
    before = room(chunks, experts + 1)
    count_pairs_kernel[(chunks,)](chosen, before, pairs, experts, CHUNK=CHUNK_PAIRS, BE=wide, BLOCK=16)
    scan_counts_kernel[(experts + 1,)](before, counts, chunks, experts, BLOCK=256)
    scatter_pairs_kernel[(chunks,)](
        chosen, before, counts, offsets, *order, pairs, experts, per_token,
        CHUNK=CHUNK_PAIRS, BE=wide, BLOCK=32, num_warps=8,
    )  # fmt: skip
    return counts[:experts], offsets, *order


# ---- summing ---------------------------------------------------------------------------------------


@triton.jit
def combine_kernel(
    y_ptr, places_ptr, weights_ptr, out_ptr, D, y_stride,
    K: tl.constexpr, WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of weights[t, k] * y[places[t, k]], in this order."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(K):
        place = tl.load(places_ptr + token * K + slot).to(tl.int64)
        row = tl.load(y_ptr + place * y_stride + d, d < D, 0.0).to(tl.float32)
        if WEIGHTS:
            row *= tl.load(weights_ptr + token * K + slot)
        total += row
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), d < D)


def combine(
    y: Tensor, places: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Any:
    """`fulgurite::moe_combine`."""
    if y.dtype not in FLOATS or (weights is not None and weights.dtype != torch.float32):
        return NotImplemented
    y = y if y.stride(1) == 1 else y.contiguous()
    out = y.new_empty(places.shape[0], y.shape[1])
    if out.numel():
        block = min(triton.next_power_of_2(y.shape[1]), 1024)
        combine_kernel[(places.shape[0], triton.cdiv(y.shape[1], block))](
            y, places, y if weights is None else weights.contiguous(), out, y.shape[1], y.stride(0),
            K=places.shape[1], WEIGHTS=weights is not None, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return out
