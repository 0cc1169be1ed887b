# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sampling on a GPU, first half: the largest logit, and bounds of the threshold p*.

In: logits and settings of rows. Out: each row's `bounds` and `state`, which `triton_threshold.py`
and `triton_sampling.py` read. The docstring of `triton_sampling.py` describes all kernels.

The last program of a row to finish combines the results of all its programs, in a fixed order.

    R  rows    C  chunks of the vocabulary    P  pivots    S  stretches of a chunk
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch

# indices of a row's state, int64
NUM_CANDIDATES, THRESHOLD, TIES, LOW, HIGH = (tl.constexpr(i) for i in range(5))
STATE_SIZE = tl.constexpr(8)
# indices of a row's bounds, float32: the largest logit, the factor of logits, exponents of pivots
MAX_LOGIT, SCALE, FIRST_PIVOT, PIVOT_STEP = (tl.constexpr(i) for i in range(4))
BOUNDS_SIZE = tl.constexpr(4)
NUM_SETTINGS = tl.constexpr(5)  # columns of the settings
MIN_TEMPERATURE = tl.constexpr(1e-30)
LOG2E = tl.constexpr(1.4426950408889634)
FIXED_POINT_ONE = tl.constexpr(float(2**43))  # of p = 1; 2^19 tokens sum to less than 2^63
ABOVE_ALL_BITS = tl.constexpr(0x7FFFFFFF)  # larger than the bits of every p
SLACK = tl.constexpr(1e-4)  # relative error of bounds and of sums for pivots
MIN_EXPONENT = tl.constexpr(-31.0)  # exponent of the first pivot where there is no bound
IS_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def probabilities(x, max_logit, scale):
    """p relative to the largest; below 2^-126 it is 0."""
    exponent = (x - max_logit) * scale
    if IS_INTERPRETED:
        return tl.exp2(exponent)
    else:  # tl.exp2 spends four more instructions on subnormal results
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def load_logits(logits_row, offsets, size):
    return tl.load(logits_row + offsets, offsets < size, float("-inf")).to(tl.float32)


@triton.jit
def to_fixed_point(p):
    return (p * FIXED_POINT_ONE).to(tl.int64)


@triton.jit
def has_top_k_or_top_p(row_settings):
    return (tl.load(row_settings + 2) > 0) | (tl.load(row_settings + 3) < 1)


@cached_launch
def max_kernel(
    logits, chunk_stats, stretch_max, bounds, state, settings, counters, size, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STRETCHES: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The largest logit and the bounds of p*.

    chunk_stats: float32 [R, 4, C], of each chunk the largest logit, the sums of p and p squared
    relative to it, and the smallest logit. stretch_max: float32 [R, C, S].
    """
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    row_settings = settings + row * NUM_SETTINGS
    # Temperature 0: every other logit gets p = 0, and of equals the random number 0 takes the first.
    scale = ((1.0 / tl.maximum(tl.load(row_settings), MIN_TEMPERATURE)) * LOG2E).to(tl.float32)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + row * stride, offsets, size)
    max_logit = tl.max(x, 0)
    p = probabilities(x, tl.where(max_logit == float("-inf"), 0.0, max_logit), scale)
    stats_ptrs = chunk_stats + row * 4 * chunks + chunk
    tl.store(stats_ptrs, max_logit)
    tl.store(stats_ptrs + chunks, tl.sum(p, 0))
    tl.store(stats_ptrs + 2 * chunks, tl.sum(p * p, 0))
    tl.store(stats_ptrs + 3 * chunks, tl.min(tl.where(offsets < size, x, float("inf")), 0))
    if tl.load(row_settings + 2) > 0:
        stretch_values = tl.max(tl.reshape(x, [STRETCHES, CHUNK // STRETCHES]), 1)
        at = (row * chunks + chunk) * STRETCHES + tl.arange(0, STRETCHES)
        tl.store(stretch_max + at, stretch_values)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        _compute_bounds(
            chunk_stats + row * 4 * chunks, stretch_max + row * chunks * STRETCHES,
            bounds + row * BOUNDS_SIZE, state + row * STATE_SIZE, row_settings, scale, size, chunks,
            CHUNKS, STRETCHES, PIVOTS,
        )  # fmt: skip


@triton.jit
def _compute_bounds(
    stats_row, stretch_row, bounds_row, state_row, row_settings, scale, size, chunks,
    CHUNKS: tl.constexpr, STRETCHES: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The row's largest logit (NaN if it has no distribution), and bounds of p*.

    For top-p: tokens up to p* sum to more than 1 - top_p of all and have at most p* each, and
    tokens from p* on sum to top_p of all and to at most (sum of p squared) / p*.
    """
    index = tl.arange(0, CHUNKS)
    is_chunk, stats_ptrs = index < chunks, stats_row + index
    chunk_max = tl.load(stats_ptrs, is_chunk, float("-inf"), cache_modifier=".cg")
    totals = tl.load(stats_ptrs + chunks, is_chunk, 0.0, cache_modifier=".cg")
    squares = tl.load(stats_ptrs + 2 * chunks, is_chunk, 0.0, cache_modifier=".cg")
    chunk_min = tl.load(stats_ptrs + 3 * chunks, is_chunk, float("inf"), cache_modifier=".cg")
    max_logit = tl.max(chunk_max, 0)
    if tl.sum((totals != totals).to(tl.int32), 0) > 0:
        max_logit = max_logit * 0.0 + float("nan")
    tl.store(bounds_row + MAX_LOGIT, max_logit)
    tl.store(bounds_row + SCALE, scale)
    tl.store(state_row + NUM_CANDIDATES, 0)
    tl.store(state_row + HIGH, ABOVE_ALL_BITS)
    top_k, top_p = tl.load(row_settings + 2), tl.load(row_settings + 3).to(tl.float32)
    if top_k > 0:
        low = _kth_largest_bits(
            stretch_row, chunks * STRETCHES, max_logit, scale, top_k, CHUNKS * STRETCHES
        )
        tl.store(state_row + LOW, low.to(tl.int64))
        tl.store(bounds_row + FIRST_PIVOT, MIN_EXPONENT)
        tl.store(bounds_row + PIVOT_STEP, -MIN_EXPONENT / PIVOTS)
    else:
        min_p = tl.load(row_settings + 1).to(tl.float32)
        chunk_p = probabilities(chunk_max, max_logit, scale)  # p of each chunk's largest logit
        chunk_p = tl.where(chunk_p > 0, chunk_p, 0.0)
        total = tl.sum(totals * chunk_p, 0)
        total_square = tl.sum(squares * chunk_p * chunk_p, 0)
        left = tl.where(min_p > 0, tl.maximum(total - size * min_p, 1.0), total)
        first = tl.maximum((1 - top_p) * left / size, tl.maximum(min_p, 1e-30))
        first = tl.maximum(first, tl.exp2((tl.min(chunk_min, 0) - max_logit) * scale)) * (1 - SLACK)
        last = total_square / tl.maximum(top_p * left, 1e-30) * (1 + SLACK)
        first, last = tl.log2(first), tl.log2(tl.minimum(tl.maximum(last, first), 1.0))
        tl.store(state_row + LOW, 0)
        tl.store(bounds_row + FIRST_PIVOT, first)
        tl.store(bounds_row + PIVOT_STEP, tl.maximum(last - first, 0.0) / PIVOTS)


@triton.jit
def _kth_largest_bits(values_row, count, max_logit, scale, wanted, TILE: tl.constexpr):
    """Bits of a p that at least `wanted` of the logits reach; 0 if there are fewer logits."""
    offsets = tl.arange(0, TILE)
    x = tl.load(values_row + offsets, offsets < count, float("-inf"), cache_modifier=".cg")
    p = probabilities(x, max_logit, scale).to(tl.int32, bitcast=True)
    low = tl.zeros([], dtype=tl.int32)
    for index in range(16):  # bits 29 to 14: more would hardly sharpen the bound
        trial = low | (1 << (29 - index))
        reached = tl.sum(((p >= trial) & (offsets < count)).to(tl.int32), 0)
        low = tl.where(reached >= wanted, trial, low)
    return low


@triton.jit
def _pivots(bounds_row, PIVOTS: tl.constexpr):
    first, step = tl.load(bounds_row + FIRST_PIVOT), tl.load(bounds_row + PIVOT_STEP)
    return tl.exp2(first + tl.arange(0, PIVOTS) * step)


@cached_launch
def pivot_kernel(
    logits, bounds, state, sums, settings, counters, size, stride, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """sums: float32 [R, 2, P, C], of p above each pivot, and of all p that min-p leaves.

    Rows with top-k need this only if the maxima of stretches gave no bound: then it counts tokens.
    """
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    row_settings = settings + row * NUM_SETTINGS
    top_k, top_p = tl.load(row_settings + 2), tl.load(row_settings + 3)
    if (tl.load(state + row * STATE_SIZE + LOW) > 0) | (not has_top_k_or_top_p(row_settings)):
        return
    bounds_row = bounds + row * BOUNDS_SIZE
    max_logit, scale = tl.load(bounds_row + MAX_LOGIT), tl.load(bounds_row + SCALE)
    min_p = tl.load(row_settings + 1).to(tl.float32)
    pivots = _pivots(bounds + row * BOUNDS_SIZE, PIVOTS)[:, None]
    above, left = tl.zeros([PIVOTS, LANES], tl.float32), tl.zeros([LANES], tl.float32)
    for start in tl.range(0, CHUNK, LANES, loop_unroll_factor=4):
        offsets = chunk * CHUNK + start + tl.arange(0, LANES)
        p = probabilities(load_logits(logits + row * stride, offsets, size), max_logit, scale)
        p = tl.where(p >= min_p, p, 0.0)
        weight = tl.where(top_k > 0, tl.where(offsets < size, 1.0, 0.0), p)
        left += weight
        above += (p[None, :] >= pivots).to(tl.float32) * weight[None, :]
    pivot = tl.arange(0, PIVOTS)
    sums_ptrs = sums + row * 2 * PIVOTS * chunks + chunk
    tl.store(sums_ptrs + pivot * chunks, tl.sum(above, 1))
    tl.store(sums_ptrs + PIVOTS * chunks, tl.sum(left, 0))
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        _narrow_bounds(
            bounds + row * BOUNDS_SIZE, state + row * STATE_SIZE, sums + row * 2 * PIVOTS * chunks,
            top_k, top_p, chunks, CHUNKS, PIVOTS,
        )  # fmt: skip


@triton.jit
def _narrow_bounds(
    bounds_row, state_row, sums_row, top_k, top_p, chunks, CHUNKS: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """The last pivot that p* certainly reaches, and the first that it certainly doesn't."""
    pivots = _pivots(bounds_row, PIVOTS).to(tl.int32, bitcast=True)
    pivot, index = tl.arange(0, PIVOTS)[:, None], tl.arange(0, CHUNKS)[None, :]
    above = tl.load(sums_row + pivot * chunks + index, index < chunks, 0.0, cache_modifier=".cg")
    above = tl.sum(above, 1)
    chunk_index = tl.arange(0, CHUNKS)
    left = tl.load(
        sums_row + PIVOTS * chunks + chunk_index, chunk_index < chunks, 0.0, cache_modifier=".cg"
    )
    wanted = tl.where(top_k > 0, top_k, top_p * tl.sum(left, 0)).to(tl.float32)
    low = tl.max(tl.where(above >= wanted * (1 + SLACK), pivots, 0), 0)
    tl.store(state_row + LOW, low.to(tl.int64))
    if top_k <= 0:
        high = tl.min(tl.where(above < wanted * (1 - SLACK), pivots, ABOVE_ALL_BITS), 0)
        tl.store(state_row + HIGH, high.to(tl.int64))
