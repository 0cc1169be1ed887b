# mypy: allow-untyped-defs, allow-incomplete-defs
"""Drawing tokens on a GPU, first half: the largest logit, and between which numbers p* lies.

In: logits and settings of rows. Out: each row's `bounds` and `state`, which `sampling_edge.py` and
`sampling.py` go on with; there is the whole in a few lines.

What the programs of a row have found is put together by the last of them to finish, in a fixed
order.

    R  rows    C  chunks of the vocabulary    P  pivots    S  stretches of a chunk
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulgurite.kernels.common.triton_launch import prepared

# a row's state, int64
LISTED, EDGE, TIES, LOW, HIGH = (tl.constexpr(i) for i in range(5))
STATE = tl.constexpr(8)
# a row's bounds, float32: the largest logit, the factor of logits, powers of two around p*
MOST, SCALE, FIRST, STEP = (tl.constexpr(i) for i in range(4))
BOUNDS = tl.constexpr(4)
COLUMNS = tl.constexpr(5)  # of the settings
LOG2_E = tl.constexpr(1.4426950408889634)
UNIT = tl.constexpr(float(2**43))  # p = 1; 2^19 tokens then sum to less than 2^63
BEYOND = tl.constexpr(0x7FFFFFFF)  # bits above those of every p
SLACK = tl.constexpr(1e-4)  # by how much bounds and sums for pivots may be off
LEAST = tl.constexpr(-31.0)  # the first of pivots without a bound, as a power of two
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def probabilities(x, most, scale):
    """p relative to the largest; what is below 2^-126 is 0."""
    exponent = (x - most) * scale
    if INTERPRETED:
        return tl.exp2(exponent)
    else:  # tl.exp2 has four more instructions, for results that small
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [exponent], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def load(logits_row, offsets, size):
    return tl.load(logits_row + offsets, offsets < size, float("-inf")).to(tl.float32)


@triton.jit
def units_of(p):
    return (p * UNIT).to(tl.int64)


@triton.jit
def cuts(mine):
    return (tl.load(mine + 2) > 0) | (tl.load(mine + 3) < 1)


@prepared
def most_kernel(
    logits, parts, largest, bounds, state, settings, counters, size, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, STRETCHES: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """parts: float32 [R, 4, C], of each chunk the largest logit, the sums of p and p squared
    relative to that, and the least logit. largest: float32 [R, C, S]."""
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    mine = settings + row * COLUMNS
    scale = ((1.0 / tl.load(mine)) * LOG2_E).to(tl.float32)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load(logits + row * stride, offsets, size)
    most = tl.max(x, 0)
    p = probabilities(x, tl.where(most == float("-inf"), 0.0, most), scale)
    into = parts + row * 4 * chunks + chunk
    tl.store(into, most)
    tl.store(into + chunks, tl.sum(p, 0))
    tl.store(into + 2 * chunks, tl.sum(p * p, 0))
    tl.store(into + 3 * chunks, tl.min(tl.where(offsets < size, x, float("inf")), 0))
    if tl.load(mine + 2) > 0:
        each = tl.max(tl.reshape(x, [STRETCHES, CHUNK // STRETCHES]), 1)
        at = (row * chunks + chunk) * STRETCHES + tl.arange(0, STRETCHES)
        tl.store(largest + at, each)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        _bound(
            parts + row * 4 * chunks, largest + row * chunks * STRETCHES, bounds + row * BOUNDS,
            state + row * STATE, mine, scale, size, chunks, CHUNKS, STRETCHES, PIVOTS,
        )  # fmt: skip


@triton.jit
def _bound(
    parts_row, largest_row, bounds_row, state_row, mine, scale, size, chunks,
    CHUNKS: tl.constexpr, STRETCHES: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The row's largest logit (NaN for one without a distribution), and bounds of p*.

    Of top-p: the tokens up to p* sum to more than 1 - top_p of all and have at most p* each, and
    those from p* on sum to top_p of all and to at most (sum of p squared) / p*.
    """
    index = tl.arange(0, CHUNKS)
    here, part = index < chunks, parts_row + index
    tops = tl.load(part, here, float("-inf"), cache_modifier=".cg")
    totals = tl.load(part + chunks, here, 0.0, cache_modifier=".cg")
    squares = tl.load(part + 2 * chunks, here, 0.0, cache_modifier=".cg")
    least = tl.load(part + 3 * chunks, here, float("inf"), cache_modifier=".cg")
    most = tl.max(tops, 0)
    if tl.sum((totals != totals).to(tl.int32), 0) > 0:
        most = most * 0.0 + float("nan")
    tl.store(bounds_row + MOST, most)
    tl.store(bounds_row + SCALE, scale)
    tl.store(state_row + LISTED, 0)
    tl.store(state_row + HIGH, BEYOND)
    top_k, top_p = tl.load(mine + 2), tl.load(mine + 3).to(tl.float32)
    if top_k > 0:
        low = _kth(largest_row, chunks * STRETCHES, most, scale, top_k, CHUNKS * STRETCHES)
        tl.store(state_row + LOW, low.to(tl.int64))
        tl.store(bounds_row + FIRST, LEAST)
        tl.store(bounds_row + STEP, -LEAST / PIVOTS)
    else:
        min_p = tl.load(mine + 1).to(tl.float32)
        factor = probabilities(tops, most, scale)  # of this chunk's largest
        factor = tl.where(factor > 0, factor, 0.0)
        total = tl.sum(totals * factor, 0)
        square = tl.sum(squares * factor * factor, 0)
        left = tl.where(min_p > 0, tl.maximum(total - size * min_p, 1.0), total)
        first = tl.maximum((1 - top_p) * left / size, tl.maximum(min_p, 1e-30))
        first = tl.maximum(first, tl.exp2((tl.min(least, 0) - most) * scale)) * (1 - SLACK)
        last = square / tl.maximum(top_p * left, 1e-30) * (1 + SLACK)
        first, last = tl.log2(first), tl.log2(tl.minimum(tl.maximum(last, first), 1.0))
        tl.store(state_row + LOW, 0)
        tl.store(bounds_row + FIRST, first)
        tl.store(bounds_row + STEP, tl.maximum(last - first, 0.0) / PIVOTS)


@triton.jit
def _kth(values_row, count, most, scale, wanted, TILE: tl.constexpr):
    """Bits of a p that at least `wanted` of the logits reach, 0 if there are fewer."""
    offsets = tl.arange(0, TILE)
    x = tl.load(values_row + offsets, offsets < count, float("-inf"), cache_modifier=".cg")
    p = probabilities(x, most, scale).to(tl.int32, bitcast=True)
    low = tl.zeros([], dtype=tl.int32)
    for index in range(16):  # bits 29 to 14: more would not make it much sharper
        trial = low | (1 << (29 - index))
        reached = tl.sum(((p >= trial) & (offsets < count)).to(tl.int32), 0)
        low = tl.where(reached >= wanted, trial, low)
    return low


@triton.jit
def _pivots(bounds_row, PIVOTS: tl.constexpr):
    first, step = tl.load(bounds_row + FIRST), tl.load(bounds_row + STEP)
    return tl.exp2(first + tl.arange(0, PIVOTS) * step)


@prepared
def pivot_kernel(
    logits, bounds, state, sums, settings, counters, size, stride, CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr, PIVOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """sums: float32 [R, 2, P, C], of what lies above each pivot, and of all that min-p leaves.

    Rows with top-k need this only if too few largest logits were known: it counts then.
    """
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    mine = settings + row * COLUMNS
    top_k, top_p = tl.load(mine + 2), tl.load(mine + 3)
    if (tl.load(state + row * STATE + LOW) > 0) | (not cuts(mine)):
        return
    most, scale = tl.load(bounds + row * BOUNDS + MOST), tl.load(bounds + row * BOUNDS + SCALE)
    min_p = tl.load(mine + 1).to(tl.float32)
    pivots = _pivots(bounds + row * BOUNDS, PIVOTS)[:, None]
    above, left = tl.zeros([PIVOTS, LANES], tl.float32), tl.zeros([LANES], tl.float32)
    for start in tl.range(0, CHUNK, LANES, loop_unroll_factor=4):
        offsets = chunk * CHUNK + start + tl.arange(0, LANES)
        p = probabilities(load(logits + row * stride, offsets, size), most, scale)
        p = tl.where(p >= min_p, p, 0.0)
        weight = tl.where(top_k > 0, tl.where(offsets < size, 1.0, 0.0), p)
        left += weight
        above += (p[None, :] >= pivots).to(tl.float32) * weight[None, :]
    place = tl.arange(0, PIVOTS)
    into = sums + row * 2 * PIVOTS * chunks + chunk
    tl.store(into + place * chunks, tl.sum(above, 1))
    tl.store(into + PIVOTS * chunks, tl.sum(left, 0))
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        _choose(
            bounds + row * BOUNDS, state + row * STATE, sums + row * 2 * PIVOTS * chunks, top_k,
            top_p, chunks, CHUNKS, PIVOTS,
        )  # fmt: skip


@triton.jit
def _choose(
    bounds_row, state_row, sums_row, top_k, top_p, chunks, CHUNKS: tl.constexpr,
    PIVOTS: tl.constexpr,
):  # fmt: skip
    """The last pivot that p* surely reaches, and the first that it surely doesn't."""
    pivots = _pivots(bounds_row, PIVOTS).to(tl.int32, bitcast=True)
    place, index = tl.arange(0, PIVOTS)[:, None], tl.arange(0, CHUNKS)[None, :]
    above = tl.load(sums_row + place * chunks + index, index < chunks, 0.0, cache_modifier=".cg")
    above = tl.sum(above, 1)
    lane = tl.arange(0, CHUNKS)
    left = tl.load(sums_row + PIVOTS * chunks + lane, lane < chunks, 0.0, cache_modifier=".cg")
    wanted = tl.where(top_k > 0, top_k, top_p * tl.sum(left, 0)).to(tl.float32)
    low = tl.max(tl.where(above >= wanted * (1 + SLACK), pivots, 0), 0)
    tl.store(state_row + LOW, low.to(tl.int64))
    if top_k <= 0:
        high = tl.min(tl.where(above < wanted * (1 - SLACK), pivots, BEYOND), 0)
        tl.store(state_row + HIGH, high.to(tl.int64))
