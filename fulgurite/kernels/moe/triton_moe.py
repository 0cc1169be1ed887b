# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sorting pairs of token and expert, and summing each token's rows, on a GPU.

In: the operators' arguments. Out: their results, or NotImplemented (float64). No kernel waits for
the host, and none adds with atomics: the same inputs give the same bits.

    sort_by_expert   few pairs: one program compares all with all. Many: counts of chunks of 256 pairs,
                     their prefix sums for each expert, then the position of each pair
    combine          out[t] = sum over k of weights[t, k] * y[positions[t, k]], in this order
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning import heuristics_for

FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def load_pair_experts(experts_ptr, pair, S, E):
    """The expert of each pair; E if the index is no expert, E + 1 past the last pair."""
    expert = tl.load(experts_ptr + pair, pair < S, 0)
    expert = tl.where((expert < 0) | (expert >= E), E, expert).to(tl.int32)
    return tl.where(pair < S, expert, E + 1)


@triton.jit
def store_order(position, pair, S, top_k, tokens_ptr, slots_ptr, positions_ptr):
    inside = pair < S
    tl.store(positions_ptr + pair, position, inside)
    tl.store(tokens_ptr + position, pair // top_k, inside)
    tl.store(slots_ptr + position, pair % top_k, inside)


@triton.jit
def count_preceding_pairs(
    expert, expert_ptr, first, S, E, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Pairs of the same chunk that come before: earlier ones of the same expert, and all of smaller
    experts."""
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


@cached_launch(do_not_specialize=["S"])
def sort_small_kernel(
    experts_ptr, counts_ptr, offsets_ptr, tokens_ptr, slots_ptr, positions_ptr, S, E, top_k,
    CHUNK: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All pairs in one program."""
    pair = tl.arange(0, CHUNK)
    expert = load_pair_experts(experts_ptr, pair, S, E)
    same, smaller = count_preceding_pairs(expert, experts_ptr, 0, S, E, CHUNK, BLOCK)
    store_order(smaller + same, pair, S, top_k, tokens_ptr, slots_ptr, positions_ptr)
    e = tl.arange(0, EXPERTS_POW2)
    counts = tl.zeros([EXPERTS_POW2], tl.int32)
    for block in range(0, CHUNK, BLOCK):
        other = load_pair_experts(experts_ptr, block + tl.arange(0, BLOCK), S, E)
        counts += tl.sum((other[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_ptr + e, counts, e < E)
    tl.store(offsets_ptr + e, tl.cumsum(counts, 0), e < E)


@cached_launch(do_not_specialize=["S"])
def count_pairs_kernel(
    experts_ptr, counts_before_ptr, S, E, CHUNK: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Pairs of each expert (and of none) in a chunk: counts_before[chunk, E + 1]."""
    chunk = tl.program_id(0)
    e = tl.arange(0, EXPERTS_POW2)
    counts = tl.zeros([EXPERTS_POW2], tl.int32)
    for block in range(0, CHUNK, BLOCK):
        pair = chunk * CHUNK + block + tl.arange(0, BLOCK)
        expert = load_pair_experts(experts_ptr, pair, S, E)
        counts += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts_before_ptr + chunk * (E + 1) + e, counts, e <= E)


@cached_launch(do_not_specialize=["chunks"])
def scan_counts_kernel(counts_before_ptr, counts_ptr, chunks, E, BLOCK: tl.constexpr):
    """Prefix sums of the counts of chunks, for one expert; the total is the expert's count."""
    expert = tl.program_id(0)
    total = tl.zeros([], tl.int32)
    for start in range(0, chunks, BLOCK):
        chunk = start + tl.arange(0, BLOCK)
        at = counts_before_ptr + chunk * (E + 1) + expert
        counts = tl.load(at, chunk < chunks, 0)
        tl.store(at, total + tl.cumsum(counts, 0) - counts, chunk < chunks)
        total += tl.sum(counts, 0)
    tl.store(counts_ptr + expert, total)


@cached_launch(do_not_specialize=["S"])
def scatter_pairs_kernel(
    experts_ptr, counts_before_ptr, counts_ptr, offsets_ptr, tokens_ptr, slots_ptr, positions_ptr, S, E, top_k,
    CHUNK: tl.constexpr, EXPERTS_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The position of each pair: after smaller experts, earlier chunks, and earlier pairs of its
    chunk."""
    chunk = tl.program_id(0)
    pair = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = load_pair_experts(experts_ptr, pair, S, E)
    position, _smaller = count_preceding_pairs(
        expert, experts_ptr, chunk * CHUNK, S, E, CHUNK, BLOCK
    )
    position += tl.load(counts_before_ptr + chunk * (E + 1) + expert, expert <= E, 0)
    for start in range(0, E, BLOCK):
        e = start + tl.arange(0, BLOCK)
        counts = tl.load(counts_ptr + e, e < E, 0)
        position += tl.sum(tl.where(e[None, :] < expert[:, None], counts[None, :], 0), 1)
    store_order(position, pair, S, top_k, tokens_ptr, slots_ptr, positions_ptr)
    if chunk == 0:
        e = tl.arange(0, EXPERTS_POW2)
        counts = tl.load(counts_ptr + e, e < E, 0)
        tl.store(offsets_ptr + e, tl.cumsum(counts, 0), e < E)


def sort_by_expert(experts_Tk: Tensor, experts: int) -> Any:
    """`fulgurite::moe_sort`."""
    experts_Tk = experts_Tk.contiguous()
    tokens, top_k = experts_Tk.shape
    pairs = tokens * top_k

    def empty(*shape: int) -> Tensor:
        return experts_Tk.new_empty(shape, dtype=torch.int32)

    counts, offsets = empty(experts + 1), empty(experts)
    order = (empty(pairs), empty(pairs), empty(tokens, top_k))  # tokens, slots, positions
    experts_pow2 = next_power_of_2(experts + 1)
    heuristics = heuristics_for(experts_Tk.device)
    chunk, small, count = heuristics.sort_chunk_pairs, heuristics.sort_small, heuristics.sort_count
    scan, scatter = heuristics.sort_scan, heuristics.sort_scatter
    if pairs <= chunk:
        sort_small_kernel[(1,)](
            experts_Tk, counts, offsets, *order, pairs, experts, top_k,
            CHUNK=max(16, next_power_of_2(max(pairs, 1))), EXPERTS_POW2=experts_pow2,
            BLOCK=small.block_m, num_warps=small.num_warps,
        )  # fmt: skip
        return counts[:experts], offsets, *order
    chunks = cdiv(pairs, chunk)
    before = empty(chunks, experts + 1)
    count_pairs_kernel[(chunks,)](
        experts_Tk, before, pairs, experts, CHUNK=chunk, EXPERTS_POW2=experts_pow2,
        BLOCK=count.block_m, num_warps=count.num_warps,
    )  # fmt: skip
    scan_counts_kernel[(experts + 1,)](
        before, counts, chunks, experts, BLOCK=scan.block_m, num_warps=scan.num_warps
    )
    scatter_pairs_kernel[(chunks,)](
        experts_Tk, before, counts, offsets, *order, pairs, experts, top_k,
        CHUNK=chunk, EXPERTS_POW2=experts_pow2, BLOCK=scatter.block_m, num_warps=scatter.num_warps,
    )  # fmt: skip
    return counts[:experts], offsets, *order


# ---- combining -------------------------------------------------------------------------------------


@cached_launch
def combine_kernel(
    y_ptr, positions_ptr, weights_ptr, out_ptr, D, y_stride,
    TOP_K: tl.constexpr, HAS_WEIGHTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of weights[t, k] * y[places[t, k]], in this order."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(TOP_K):
        position = tl.load(positions_ptr + token * TOP_K + slot).to(tl.int64)
        row = tl.load(y_ptr + position * y_stride + d, d < D, 0.0).to(tl.float32)
        if HAS_WEIGHTS:
            row *= tl.load(weights_ptr + token * TOP_K + slot)
        total += row
    tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), d < D)


def combine(
    y: Tensor, positions: Tensor, tokens: Tensor, slots: Tensor, weights: Tensor | None
) -> Any:
    """`fulgurite::moe_combine`."""
    if y.dtype not in FLOATS or (weights is not None and weights.dtype != torch.float32):
        return NotImplemented
    y = y if y.stride(1) == 1 else y.contiguous()
    out = y.new_empty(positions.shape[0], y.shape[1])
    if out.numel():
        config = heuristics_for(y.device).combine
        block = min(next_power_of_2(y.shape[1]), config.block_n)
        combine_kernel[(positions.shape[0], cdiv(y.shape[1], block))](
            y, positions, y if weights is None else weights.contiguous(), out, y.shape[1], y.stride(0),
            TOP_K=positions.shape[1], HAS_WEIGHTS=weights is not None, BLOCK=block,
            num_warps=config.num_warps,
        )  # fmt: skip
    return out
