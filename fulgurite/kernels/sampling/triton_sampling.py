# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sampling on a GPU: several programs per row, four passes over the logits, no sort.

In: logits and each row's settings (`sampling/ops.py`). Out: a token per row.

min-p, top-k and top-p keep a prefix of the tokens sorted by falling p. So the kept set is given by
a threshold p* and the number of tokens of exactly p* that are kept. The bits of a p in [0, 1] grow
with p.

    max_kernel         the largest logit, and bounds of p*: for top-k the k-th largest of the maxima
                       of stretches of tokens, for top-p from the sums of p and p squared
    pivot_kernel       the sums of all p above each of 16 or 32 pivots between the bounds: p* is
                       between two of them
    candidates_kernel  sums what is above those two and lists the tokens between them, a few of all
    threshold_kernel   finds p* in the list (or in all tokens, if the list overflowed: rows where
                       thousands of tokens share a p); one program per row, which reads no logits
    sample_kernel      sums what each chunk of the vocabulary keeps; the last program of a row finds
                       the chunk, and in it the token, at which the sum passes the random number

The first two are in `triton_bounds.py`, the next two in `triton_threshold.py`. The middle three run
only if a row has top-k or top-p. Pivots and their sums are rounded and only narrow the search. Sums
that decide are in fixed point, 2^43 for p = 1, so that the order of programs does not change them;
p below one unit is never sampled. p is exp2 of a float32, with a relative error up to 2^-18. There
is no device sync.

    R  rows    C  chunks of the vocabulary
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.sampling import table
from fulgurite.kernels.sampling.triton_bounds import (
    BOUNDS_SIZE,
    MAX_LOGIT,
    NUM_SETTINGS,
    SCALE,
    STATE_SIZE,
    THRESHOLD,
    TIES,
    has_top_k_or_top_p,
    load_logits,
    max_kernel,
    pivot_kernel,
    probabilities,
    to_fixed_point,
)
from fulgurite.kernels.sampling.triton_threshold import candidates_kernel, threshold_kernel
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.kernels.tuning.sampling import SamplingHeuristics

NAN_LOGITS = tl.constexpr(table.NAN_LOGITS)
NO_ALLOWED_TOKEN = tl.constexpr(table.NO_ALLOWED_TOKEN)
# the upper bits of a packed NaN and of a packed -inf, see `_argmax_key`
NAN_KEY = tl.constexpr(0x7FFFFFFF + 2**31)
NEGATIVE_INFINITY_KEY = tl.constexpr(2**31 - 0x7F800001)
MAX_ROWS = 65535  # of a grid's second dimension


@triton.jit
def _argmax_key(logits_row, offsets, size):
    """The largest logit and the smallest token with it, packed in an int64; NaN is largest.

    `_unpack_token` gives the token.
    """
    x = load_logits(logits_row, offsets, size)
    x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
    bits = x.to(tl.int32, bitcast=True)
    keys = tl.where(x != x, 0x7FFFFFFF, tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF))
    key = tl.max(keys, 0)
    token = tl.min(tl.where(keys == key, offsets, 0x7FFFFFFF), 0)
    return ((key.to(tl.int64) + 2147483648) << 31) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _unpack_token(packed):
    """The token of a packed logit, or what there is instead of one: NaN, or all are -inf."""
    key, token = packed >> 31, 0x7FFFFFFF - (packed & 0x7FFFFFFF)
    token = tl.where(key == NAN_KEY, NAN_LOGITS, token)
    return tl.where(key == NEGATIVE_INFINITY_KEY, NO_ALLOWED_TOKEN, token)


@cached_launch
def argmax_kernel(
    logits, packed, tokens, counters, size, stride, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """tokens[r] = argmax(logits[r]); packed: int64 [R, C], the maximum of each chunk."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    best = _argmax_key(logits + row * stride, chunk * CHUNK + tl.arange(0, CHUNK), size)
    tl.store(packed + row * chunks + chunk, best)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        index = tl.arange(0, CHUNKS)
        chunk_best = tl.load(packed + row * chunks + index, index < chunks, 0, cache_modifier=".cg")
        tl.store(tokens + row, _unpack_token(tl.max(chunk_best, 0)))


@triton.jit
def _above_threshold(logits_row, offsets, size, max_logit, scale, threshold):
    """p above the threshold, in fixed point, and whether p is the threshold."""
    p = probabilities(load_logits(logits_row, offsets, size), max_logit, scale)
    bits = p.to(tl.int32, bitcast=True)
    return tl.where(bits > threshold, to_fixed_point(p), 0), (bits == threshold) & (offsets < size)


@cached_launch
def sample_kernel(
    logits, bounds, state, chunk_sums, chunk_ties, settings, tokens, counters, size, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Sample the token at which the sum of kept p passes the random number.

    chunk_sums, chunk_ties: int64 [R, C], the sum above p* and the number of tokens of p* in a
    chunk.
    """
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    row_settings, state_row = settings + row * NUM_SETTINGS, state + row * STATE_SIZE
    bounds_row = bounds + row * BOUNDS_SIZE
    max_logit, scale = tl.load(bounds_row + MAX_LOGIT), tl.load(bounds_row + SCALE)
    threshold = tl.load(row_settings + 1).to(tl.float32).to(tl.int32, bitcast=True)
    ties = tl.full([], 1 << 31, tl.int64)
    if has_top_k_or_top_p(row_settings):
        threshold, ties = tl.load(state_row + THRESHOLD).to(tl.int32), tl.load(state_row + TIES)
    logits_row, slot = logits + row * stride, row * chunks + chunk
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    above, is_tie = _above_threshold(logits_row, offsets, size, max_logit, scale, threshold)
    inside, num_ties = tl.sum(above, 0), tl.sum(is_tie.to(tl.int32), 0).to(tl.int64)
    tl.store(chunk_sums + slot, inside)
    tl.store(chunk_ties + slot, num_ties)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        tie_units = to_fixed_point(threshold.to(tl.float32, bitcast=True))
        index = tl.arange(0, CHUNKS)
        at = row * chunks + index
        sums = tl.load(chunk_sums + at, index < chunks, 0, cache_modifier=".cg")
        chunk_num_ties = tl.load(chunk_ties + at, index < chunks, 0, cache_modifier=".cg")
        ties_before = tl.cumsum(chunk_num_ties, 0) - chunk_num_ties
        kept_ties = tl.minimum(tl.maximum(ties - ties_before, 0), chunk_num_ties)
        cumulative = tl.cumsum(sums + kept_ties * tie_units, 0)
        total = tl.max(cumulative, 0)
        target = (tl.load(row_settings + 4) * total.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, total - 1)
        chunks_before = tl.sum((cumulative <= target).to(tl.int32), 0)  # the sampled one
        is_chunk = index == chunks_before
        before = tl.sum(tl.where(is_chunk, cumulative - sums - kept_ties * tie_units, 0), 0)
        ties_left = ties - tl.sum(tl.where(is_chunk, ties_before, 0), 0)
        offsets = chunks_before * CHUNK + tl.arange(0, CHUNK)
        above, is_tie = _above_threshold(logits_row, offsets, size, max_logit, scale, threshold)
        rank = tl.cumsum(is_tie.to(tl.int32), 0)
        kept = above + tl.where(is_tie & (rank <= ties_left), tie_units, 0)
        running = before + tl.cumsum(kept, 0)
        token = chunks_before * CHUNK + tl.sum((running <= target).to(tl.int32), 0)
        if tl.abs(max_logit) < float("inf"):
            tl.store(tokens + row, token.to(tl.int64))
        else:  # +inf is the likeliest; NaN or only -inf: no token
            best = tl.zeros([], tl.int64)
            for start in range(0, size, CHUNK):
                best = tl.maximum(best, _argmax_key(logits_row, start + tl.arange(0, CHUNK), size))
            tl.store(tokens + row, _unpack_token(best))


# ---- launching -----------------------------------------------------------------------------------


def greedy_sample(logits_RO: Tensor) -> Tensor:
    """`sampling.ops.greedy_sample`."""
    rows, size = logits_RO.shape
    if not 0 < rows <= MAX_ROWS or not 0 < size < 2**31 or logits_RO.stride(1) != 1:
        return NotImplemented  # type: ignore[no-any-return]
    device = logits_RO.device
    heuristics = heuristics_for(device)
    chunk = heuristics.sampling_chunk
    chunks = cdiv(size, chunk)
    packed = torch.empty(rows, chunks, dtype=torch.int64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    argmax_kernel[(chunks, rows)](
        logits_RO, packed, tokens, acquire_counters(device, rows), size, logits_RO.stride(0),
        CHUNK=chunk, CHUNKS=next_power_of_2(chunks), num_warps=heuristics.sampling_num_warps,
    )  # fmt: skip
    return tokens


class Workspace(NamedTuple):
    """What the programs of a call communicate through. Nothing in it needs to be initialized."""

    bounds: Tensor
    chunk_stats: Tensor
    stretch_max: Tensor
    pivot_sums: Tensor
    candidates: Tensor
    state: Tensor
    chunks: tuple[Tensor, ...]  # int64 [R, C] each: all, above, sums, ties


def _allocate_workspace(
    rows: int, size: int, pivots: int, heuristics: SamplingHeuristics, device: torch.device
) -> Workspace:
    chunk = heuristics.sampling_chunk
    chunks, pivot_chunks = cdiv(size, chunk), cdiv(size, heuristics.sampling_pivot_chunk)
    sizes = [
        rows * tie_units
        for tie_units in (
            BOUNDS_SIZE.value,
            4 * chunks,
            chunk // heuristics.sampling_stretch * chunks,
            2 * pivots * pivot_chunks,
            min(size, heuristics.sampling_capacity) + heuristics.sampling_list_tile,
        )
    ]
    state = torch.empty(rows, STATE_SIZE.value, dtype=torch.int64, device=device)
    by_chunk = torch.empty(4, rows, chunks, dtype=torch.int64, device=device)
    floats = torch.empty(sum(sizes), device=device)
    bounds, stats, stretch_max, pivot_sums, candidates = floats.split(sizes)
    return Workspace(bounds, stats, stretch_max, pivot_sums, candidates, state, by_chunk.unbind(0))


def sample_rows(
    logits_RO: Tensor, settings_R5: Tensor, uses_threshold: bool | None = None
) -> Tensor:
    """`sampling.ops.sample_rows`; `uses_threshold`: whether some row has top-k or top-p."""
    rows, size = logits_RO.shape
    if not 0 < rows <= MAX_ROWS or not 0 < size <= 2**19 or logits_RO.stride(1) != 1:
        return NotImplemented  # type: ignore[no-any-return]
    device = logits_RO.device
    heuristics = heuristics_for(device)
    chunk = heuristics.sampling_chunk
    chunks = cdiv(size, chunk)
    if uses_threshold is None:
        uses_threshold = settings_R5.device.type != "cpu" or needs_threshold(settings_R5)
    settings = settings_R5.to(device, torch.float64, non_blocking=True).contiguous()
    pivots = heuristics.sampling_num_pivots(rows)
    space = _allocate_workspace(rows, size, pivots, heuristics, device)
    counters, stride = acquire_counters(device, rows), logits_RO.stride(0)
    num_warps = heuristics.sampling_num_warps
    grid, shared = (chunks, rows), {"CHUNK": chunk, "CHUNKS": next_power_of_2(chunks)}
    max_kernel[grid](
        logits_RO, space.chunk_stats, space.stretch_max, space.bounds, space.state, settings,
        counters, size, stride, STRETCHES=chunk // heuristics.sampling_stretch, PIVOTS=pivots,
        num_warps=num_warps, **shared,
    )  # fmt: skip
    if uses_threshold:
        _find_thresholds(logits_RO, settings, counters, space, pivots, heuristics)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    sample_kernel[grid](
        logits_RO, space.bounds, space.state, *space.chunks[2:], settings, tokens, counters, size,
        stride, num_warps=num_warps, **shared,
    )  # fmt: skip
    return tokens


def needs_threshold(settings_R5: Tensor) -> bool:
    """Whether some row has top-k or top-p."""
    return bool(((settings_R5[:, 2] > 0) | (settings_R5[:, 3] < 1)).any())


def _find_thresholds(
    logits_RO: Tensor,
    settings: Tensor,
    counters: Tensor,
    space: Workspace,
    pivots: int,
    heuristics: SamplingHeuristics,
) -> None:
    """For rows with top-k or top-p: p*, and how many tokens of p* are kept."""
    rows, size = logits_RO.shape
    chunk, pivot_chunk = heuristics.sampling_chunk, heuristics.sampling_pivot_chunk
    lanes, tile = heuristics.sampling_pivot_lanes, heuristics.sampling_list_tile
    capacity = min(size, heuristics.sampling_capacity)
    chunks, pivot_chunks = cdiv(size, chunk), cdiv(size, pivot_chunk)
    pivot_kernel[(pivot_chunks, rows)](
        logits_RO, space.bounds, space.state, space.pivot_sums, settings, counters, size,
        logits_RO.stride(0), CHUNK=pivot_chunk, CHUNKS=next_power_of_2(pivot_chunks),
        PIVOTS=pivots, LANES=lanes, num_warps=lanes // 32,
    )  # fmt: skip
    shared = (*space.chunks[:2], space.candidates, settings, size, logits_RO.stride(0), capacity)
    candidates_kernel[(chunks, rows)](
        logits_RO, space.bounds, space.state, *shared,
        CHUNK=chunk, TILE=tile, num_warps=heuristics.sampling_num_warps,
    )  # fmt: skip
    threshold_kernel[(rows,)](
        logits_RO, space.bounds, space.state, *shared, chunks,
        CHUNKS=next_power_of_2(chunks), TILE=tile, BLOCK=heuristics.sampling_list_block,
        num_warps=heuristics.sampling_threshold_num_warps,
    )  # fmt: skip
