# mypy: allow-untyped-defs, allow-incomplete-defs
"""Drawing tokens on a GPU, second half: the edge p* of what top-k and top-p keep, exactly.

In: logits, and the two numbers between which `sampling_bounds.py` says p* lies. Out: in each row's
state p*, as bits, and how many tokens of exactly p* are kept.

    R  rows    C  chunks of the vocabulary
"""

from __future__ import annotations

import triton
import triton.language as tl

from fulgurite.kernels.common.triton_launch import prepared
from fulgurite.kernels.sampling.triton_bounds import (
    BEYOND,
    BOUNDS,
    COLUMNS,
    EDGE,
    HIGH,
    LISTED,
    LOW,
    MOST,
    SCALE,
    STATE,
    TIES,
    cuts,
    load,
    probabilities,
    units_of,
)

ONE = tl.constexpr(0x3F800000)  # the bits of 1, the largest p


@prepared(do_not_specialize=["capacity"])
def list_kernel(
    logits, bounds, state, chunk_all, chunk_above, listed, settings, size, stride, capacity,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """listed: float32 [R, capacity + TILE], the p in between, in any order.

    chunk_all, chunk_above: int64 [R, C], sums of all that min-p leaves, and of what lies above.
    """
    chunk, row, chunks = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    mine, state_row = settings + row * COLUMNS, state + row * STATE
    if not cuts(mine):
        return
    most, scale = tl.load(bounds + row * BOUNDS + MOST), tl.load(bounds + row * BOUNDS + SCALE)
    min_p = tl.load(mine + 1).to(tl.float32)
    low, high = tl.load(state_row + LOW).to(tl.int32), tl.load(state_row + HIGH).to(tl.int32)
    low = tl.maximum(low, min_p.to(tl.int32, bitcast=True))
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    p = probabilities(load(logits + row * stride, offsets, size), most, scale)
    bits = p.to(tl.int32, bitcast=True)
    left = (p >= min_p) & (offsets < size)
    units = tl.where(left, units_of(p), 0)
    tl.store(chunk_all + row * chunks + chunk, tl.sum(units, 0))
    tl.store(chunk_above + row * chunks + chunk, tl.sum(tl.where(bits >= high, units, 0), 0))
    number = (left & (bits >= low) & (bits < high)).to(tl.int32)
    count = tl.sum(number, 0)
    if count > 0:
        first = tl.atomic_add(state_row + LISTED, count.to(tl.int64), sem="relaxed").to(tl.int32)
        at = first + tl.cumsum(number, 0) - number
        into = listed + row * (capacity + TILE) + at
        tl.store(into, p, (number > 0) & (at < capacity))


@prepared(do_not_specialize=["capacity"])
def edge_kernel(
    logits, bounds, state, chunk_all, chunk_above, listed, settings, size, stride, capacity, chunks,
    CHUNKS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row. top-k keeps the k largest; top-p of those the first that sum to its share.

    A list of fewer than k has all that min-p leaves.
    """
    row = tl.program_id(0).to(tl.int64)
    mine, state_row = settings + row * COLUMNS, state + row * STATE
    if not cuts(mine):
        return
    most, scale = tl.load(bounds + row * BOUNDS + MOST), tl.load(bounds + row * BOUNDS + SCALE)
    min_p = tl.load(mine + 1).to(tl.float32).to(tl.int32, bitcast=True)
    low, high = tl.load(state_row + LOW).to(tl.int32), tl.load(state_row + HIGH).to(tl.int32)
    low, high = tl.maximum(low, min_p), tl.where(high == BEYOND, ONE + 1, high)
    index = tl.arange(0, CHUNKS)
    total = tl.sum(tl.load(chunk_all + row * chunks + index, index < chunks, 0), 0)
    above = tl.sum(tl.load(chunk_above + row * chunks + index, index < chunks, 0), 0)
    length = tl.load(state_row + LISTED).to(tl.int32)
    row_items = tl.where(length > capacity, size, 0)  # too long: the row itself is the list
    listed_row, logits_row = listed + row * (capacity + TILE), logits + row * stride
    top_k, top_p = tl.load(mine + 2), tl.load(mine + 3)
    edge, ties = low, tl.full([], 1 << 31, tl.int64)  # all tokens of p* are kept
    if (top_k > 0) & (length >= top_k):
        edge, count, over = _search(
            listed_row, logits_row, length, row_items, low, high, above * 0, top_k, most, scale,
            capacity, True, TILE, BLOCK,
        )  # fmt: skip
        ties = top_k.to(tl.int64) - count
        total = over + ties * units_of(edge.to(tl.float32, bitcast=True))
    if top_p < 1:
        wanted = tl.maximum(top_p * total.to(tl.float64), 1.0)
        front, _, over = _search(
            listed_row, logits_row, length, row_items, edge, high, above, wanted, most, scale,
            capacity, False, TILE, BLOCK,
        )  # fmt: skip
        each = tl.maximum(units_of(front.to(tl.float32, bitcast=True)), 1).to(tl.float64)
        needed = tl.maximum(tl.ceil((wanted - over.to(tl.float64)) / each), 1.0).to(tl.int64)
        ties = tl.where(front == edge, tl.minimum(ties, needed), needed)
        edge = front
    tl.store(state_row + EDGE, edge.to(tl.int64))
    tl.store(state_row + TIES, ties)


@triton.jit
def _search(
    listed_row, logits_row, length, row_items, low, high, over, wanted, most, scale, capacity,
    BY_COUNT: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest bits t in [low, high) so that t and more reach `wanted`: with how many and how
    much of that lies above t. `over` is what lies at `high` and above.

    A long list, or a whole row, is read with sixteen thresholds at once until what is between two
    of them fits in registers; there the rest is halved.
    """
    count = tl.zeros([], tl.int32)
    inside, start = length, tl.zeros([], tl.int32)
    while (inside > TILE) & (high > low + 1):
        step = (high - low + 15) // 16
        thresholds = low + tl.arange(0, 16) * step
        counts, sums = _above(
            listed_row, logits_row, length, row_items, thresholds, high, most, scale, BLOCK
        )
        if BY_COUNT:
            passes = (count + counts).to(tl.float64) >= wanted
        else:
            passes = (over + sums).to(tl.float64) >= wanted
        chosen = tl.maximum(tl.sum((passes & (thresholds < high)).to(tl.int32), 0) - 1, 0)
        place = tl.arange(0, 16)
        more = tl.sum(tl.where(place == chosen + 1, counts, 0), 0)
        over += tl.sum(tl.where(place == chosen + 1, sums, 0), 0)
        inside = tl.sum(tl.where(place == chosen, counts, 0), 0) - more
        count += more
        low += chosen * step
        high = tl.minimum(high, low + step)
        start = capacity
    if inside <= TILE:
        if start > 0:
            _compact(
                listed_row, logits_row, length, row_items, low, high, start, most, scale, BLOCK
            )
            length = inside
        offsets = tl.arange(0, TILE)
        p = tl.load(listed_row + start + offsets, offsets < length, -1.0, cache_modifier=".cg")
        bits = tl.where(p >= 0, p.to(tl.int32, bitcast=True), -1)
        units = tl.where(p >= 0, units_of(p), 0)
        while low + 1 < high:
            trial = low + (high - low) // 2
            if BY_COUNT:
                enough = count + tl.sum((bits >= trial).to(tl.int32), 0) >= wanted
            else:
                reached = over + tl.sum(tl.where(bits >= trial, units, 0), 0)
                enough = reached.to(tl.float64) >= wanted
            low, high = tl.where(enough, trial, low), tl.where(enough, high, trial)
        count += tl.sum((bits > low).to(tl.int32), 0)
        over += tl.sum(tl.where(bits > low, units, 0), 0)
    return low, count.to(tl.int64), over


@triton.jit
def _item(listed_row, logits_row, length, row_items, offsets, most, scale):
    """The bits of listed p, or of a row's; -1 where there is none."""
    from_list = (offsets < length) & (offsets >= row_items)
    p = tl.load(listed_row + offsets, from_list, -1.0, cache_modifier=".cg")
    x = tl.load(logits_row + offsets, offsets < row_items, float("-inf")).to(tl.float32)
    p = tl.where(offsets < row_items, probabilities(x, most, scale), p)
    return p, tl.where(p >= 0, p.to(tl.int32, bitcast=True), -1)


@triton.jit
def _above(
    listed_row, logits_row, length, row_items, thresholds, high, most, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """How many tokens below `high` lie above each threshold, and their sums."""
    counts, sums = tl.zeros([16], tl.int32), tl.zeros([16], tl.int64)
    for start in range(0, tl.maximum(length, row_items), BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p, bits = _item(listed_row, logits_row, length, row_items, offsets, most, scale)
        bits = tl.where(bits < high, bits, -1)
        seen = bits[None, :] >= thresholds[:, None]
        counts += tl.sum(seen.to(tl.int32), 1)
        sums += tl.sum(tl.where(seen, units_of(p)[None, :], 0), 1)
    return counts, sums


@triton.jit
def _compact(
    listed_row, logits_row, length, row_items, low, high, into, most, scale, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the tokens in [low, high) behind the list."""
    for start in range(0, tl.maximum(length, row_items), BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p, bits = _item(listed_row, logits_row, length, row_items, offsets, most, scale)
        number = ((bits >= low) & (bits < high)).to(tl.int32)
        through = tl.cumsum(number, 0)
        tl.store(listed_row + into + through - number, p, number > 0)
        into += tl.max(through, 0)
    tl.debug_barrier()
