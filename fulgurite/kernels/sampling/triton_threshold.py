# mypy: allow-untyped-defs, allow-incomplete-defs
"""Sampling on a GPU, second half: the exact threshold p* of what top-k and top-p keep.

In: logits, and the bounds of p* from `triton_bounds.py`. Out: in each row's state the bits of p*,
and how many tokens of exactly p* are kept.

    R  rows    C  chunks of the vocabulary
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.sampling.triton_bounds import (
    ABOVE_ALL_BITS,
    BOUNDS_SIZE,
    HIGH,
    LOW,
    MAX_LOGIT,
    NUM_CANDIDATES,
    NUM_SETTINGS,
    SCALE,
    STATE_SIZE,
    THRESHOLD,
    TIES,
    has_top_k_or_top_p,
    load_logits,
    probabilities,
    to_fixed_point,
)

ONE_BITS = tl.constexpr(0x3F800000)  # bits of 1.0, the largest p


@cached_launch(do_not_specialize=["capacity"])
def candidates_kernel(
    logits, bounds, state, chunk_all, chunk_above, candidates, settings, size, stride, capacity,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """List the p between the bounds; candidates: float32 [R, capacity + TILE], in any order.

    chunk_all, chunk_above: int64 [R, C], sums of all p that min-p leaves, and of those above the
    bounds.
    """
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    row_settings, state_row = settings + row * NUM_SETTINGS, state + row * STATE_SIZE
    if not has_top_k_or_top_p(row_settings):
        return
    bounds_row = bounds + row * BOUNDS_SIZE
    max_logit, scale = tl.load(bounds_row + MAX_LOGIT), tl.load(bounds_row + SCALE)
    min_p = tl.load(row_settings + 1).to(tl.float32)
    low, high = tl.load(state_row + LOW).to(tl.int32), tl.load(state_row + HIGH).to(tl.int32)
    low = tl.maximum(low, min_p.to(tl.int32, bitcast=True))
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    p = probabilities(load_logits(logits + row * stride, offsets, size), max_logit, scale)
    bits = p.to(tl.int32, bitcast=True)
    left = (p >= min_p) & (offsets < size)
    units = tl.where(left, to_fixed_point(p), 0)
    tl.store(chunk_all + row * chunks + chunk, tl.sum(units, 0))
    tl.store(chunk_above + row * chunks + chunk, tl.sum(tl.where(bits >= high, units, 0), 0))
    is_candidate = (left & (bits >= low) & (bits < high)).to(tl.int32)
    count = tl.sum(is_candidate, 0)
    if count > 0:
        counter = state_row + NUM_CANDIDATES
        first = tl.atomic_add(counter, count.to(tl.int64), sem="relaxed").to(tl.int32)
        position = first + tl.cumsum(is_candidate, 0) - is_candidate
        list_ptrs = candidates + row * (capacity + TILE) + position
        tl.store(list_ptrs, p, (is_candidate > 0) & (position < capacity))


@cached_launch(do_not_specialize=["capacity"])
def threshold_kernel(
    logits, bounds, state, chunk_all, chunk_above, candidates, settings, size, stride, capacity,
    chunks,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p* of one row. top-k keeps the k largest; top-p of those the first that sum to top_p.

    A list of fewer than k candidates has all tokens that min-p leaves.
    """
    row = tl.program_id(0).to(tl.int64)
    row_settings, state_row = settings + row * NUM_SETTINGS, state + row * STATE_SIZE
    if not has_top_k_or_top_p(row_settings):
        return
    bounds_row = bounds + row * BOUNDS_SIZE
    max_logit, scale = tl.load(bounds_row + MAX_LOGIT), tl.load(bounds_row + SCALE)
    min_p = tl.load(row_settings + 1).to(tl.float32).to(tl.int32, bitcast=True)
    low, high = tl.load(state_row + LOW).to(tl.int32), tl.load(state_row + HIGH).to(tl.int32)
    low, high = tl.maximum(low, min_p), tl.where(high == ABOVE_ALL_BITS, ONE_BITS + 1, high)
    index = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(chunk_all + row * chunks + index, index < chunks, 0), 0)
    above = tl.sum(tl.load(chunk_above + row * chunks + index, index < chunks, 0), 0)
    length = tl.load(state_row + NUM_CANDIDATES).to(tl.int32)
    row_items = tl.where(length > capacity, size, 0)  # the list overflowed: search the row itself
    list_row, logits_row = candidates + row * (capacity + TILE), logits + row * stride
    top_k, top_p = tl.load(row_settings + 2), tl.load(row_settings + 3)
    threshold, ties = low, tl.full([], 1 << 31, tl.int64)  # keep all tokens of p*
    if (top_k > 0) & (length >= top_k):
        threshold, count, over = _search_threshold(
            list_row, logits_row, length, row_items, low, high, above * 0, top_k, max_logit, scale,
            capacity, True, TILE, BLOCK,
        )  # fmt: skip
        ties = top_k.to(tl.int64) - count
        total = over + ties * to_fixed_point(threshold.to(tl.float32, bitcast=True))
    if top_p < 1:
        wanted = tl.maximum(top_p * total.to(tl.float64), 1.0)
        top_p_threshold, _, over = _search_threshold(
            list_row, logits_row, length, row_items, threshold, high, above, wanted, max_logit,
            scale, capacity, False, TILE, BLOCK,
        )  # fmt: skip
        tie_units = to_fixed_point(top_p_threshold.to(tl.float32, bitcast=True))
        tie_units = tl.maximum(tie_units, 1).to(tl.float64)
        needed_ties = tl.ceil((wanted - over.to(tl.float64)) / tie_units)
        needed_ties = tl.maximum(needed_ties, 1.0).to(tl.int64)
        ties = tl.where(top_p_threshold == threshold, tl.minimum(ties, needed_ties), needed_ties)
        threshold = top_p_threshold
    tl.store(state_row + THRESHOLD, threshold.to(tl.int64))
    tl.store(state_row + TIES, ties)


@triton.jit
def _search_threshold(
    list_row, logits_row, length, row_items, low, high, over, wanted, max_logit, scale, capacity,
    BY_COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest bits t in [low, high) such that tokens of t and more reach `wanted`.

    Returns t, and the count and sum of the tokens above t. `over` is the sum of tokens at `high`
    and above. A long list, or a whole row, is compared with sixteen thresholds at once, until the
    tokens between two of them fit in registers; there the search is a bisection.
    """
    count = tl.zeros([], tl.int32)
    num_inside, start = length, tl.zeros([], tl.int32)
    while (num_inside > TILE) & (high > low + 1):
        step = (high - low + 15) // 16
        thresholds = low + tl.arange(0, 16) * step
        counts, sums = _count_above(
            list_row, logits_row, length, row_items, thresholds, high, max_logit, scale, BLOCK
        )
        if BY_COUNT:
            is_reached = (count + counts).to(tl.float64) >= wanted
        else:
            is_reached = (over + sums).to(tl.float64) >= wanted
        interval = tl.maximum(tl.sum((is_reached & (thresholds < high)).to(tl.int32), 0) - 1, 0)
        lane = tl.arange(0, 16)
        count_above = tl.sum(tl.where(lane == interval + 1, counts, 0), 0)
        over += tl.sum(tl.where(lane == interval + 1, sums, 0), 0)
        num_inside = tl.sum(tl.where(lane == interval, counts, 0), 0) - count_above
        count += count_above
        low += interval * step
        high = tl.minimum(high, low + step)
        start = capacity
    if num_inside <= TILE:
        if start > 0:
            _compact(
                list_row, logits_row, length, row_items, low, high, start, max_logit, scale, BLOCK
            )
            length = num_inside
        offsets = tl.arange(0, TILE)
        p = tl.load(list_row + start + offsets, offsets < length, -1.0, cache_modifier=".cg")
        bits = tl.where(p >= 0, p.to(tl.int32, bitcast=True), -1)
        units = tl.where(p >= 0, to_fixed_point(p), 0)
        while low + 1 < high:
            middle = low + (high - low) // 2
            if BY_COUNT:
                is_enough = count + tl.sum((bits >= middle).to(tl.int32), 0) >= wanted
            else:
                sum_reached = over + tl.sum(tl.where(bits >= middle, units, 0), 0)
                is_enough = sum_reached.to(tl.float64) >= wanted
            low, high = tl.where(is_enough, middle, low), tl.where(is_enough, high, middle)
        count += tl.sum((bits > low).to(tl.int32), 0)
        over += tl.sum(tl.where(bits > low, units, 0), 0)
    return low, count.to(tl.int64), over


@triton.jit
def _load_candidates(list_row, logits_row, length, row_items, offsets, max_logit, scale):
    """p and its bits, of the list or of the row itself; bits are -1 past the end."""
    from_list = (offsets < length) & (offsets >= row_items)
    p = tl.load(list_row + offsets, from_list, -1.0, cache_modifier=".cg")
    x = tl.load(logits_row + offsets, offsets < row_items, float("-inf")).to(tl.float32)
    p = tl.where(offsets < row_items, probabilities(x, max_logit, scale), p)
    return p, tl.where(p >= 0, p.to(tl.int32, bitcast=True), -1)


@triton.jit
def _count_above(
    list_row, logits_row, length, row_items, thresholds, high, max_logit, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """Count and sum of the tokens from each threshold up to `high`."""
    counts, sums = tl.zeros([16], tl.int32), tl.zeros([16], tl.int64)
    for start in range(0, tl.maximum(length, row_items), BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p, bits = _load_candidates(
            list_row, logits_row, length, row_items, offsets, max_logit, scale
        )
        bits = tl.where(bits < high, bits, -1)
        is_above = bits[None, :] >= thresholds[:, None]
        counts += tl.sum(is_above.to(tl.int32), 1)
        sums += tl.sum(tl.where(is_above, to_fixed_point(p)[None, :], 0), 1)
    return counts, sums


@triton.jit
def _compact(
    list_row, logits_row, length, row_items, low, high, out_start, max_logit, scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the tokens in [low, high) to `out_start` of the list."""
    for start in range(0, tl.maximum(length, row_items), BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p, bits = _load_candidates(
            list_row, logits_row, length, row_items, offsets, max_logit, scale
        )
        is_candidate = ((bits >= low) & (bits < high)).to(tl.int32)
        cumulative = tl.cumsum(is_candidate, 0)
        tl.store(list_row + out_start + cumulative - is_candidate, p, is_candidate > 0)
        out_start += tl.max(cumulative, 0)
    tl.debug_barrier()
