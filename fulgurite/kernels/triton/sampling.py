"""Drawing tokens on a GPU: many programs a row, four readings of the logits, no sorting.

In: logits and each row's settings and random number, as `kernels/sampling.py` says. Out: a token a row.

What min-p, top-k and top-p keep is the front of the list sorted by falling p, so it is said by one
number p* and how many tokens of exactly p* belong to it. The bits of a p in [0, 1] grow with it.

    most_kernel    the largest logit, and where it is: all that greedy rows need
    bins_kernel    how many tokens, and how much p, fall into each of 992 bins of p (32 a power of two);
                   the last program of a row says which bins p* must be in
    edge_kernel    sums what lies above these bins and lists what lies in them, a few of all tokens; the
                   last program of a row finds p* in the list, four bits at a time
    draw_kernel    sums what each chunk of the vocabulary keeps; the last program of a row finds the
                   chunk in which the sum passes the random number, and in it the token

The middle two run only if a row asks for top-k or top-p. Bins are sums of products with ones, so the
tensor cores fill them; they are rounded and only say where to look. What decides is summed in whole
numbers, 2^43 for p = 1, so that no order of programs changes it; what is less than one is never drawn.
Nothing waits for the host.

    R  rows    C  chunks of the vocabulary
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fulgurite.kernels.triton.counters import take_counters

CHUNK = 2048  # tokens of a program
STEP = 64  # tokens that are put into bins at once
BLOCK = 256  # numbers of a list, times sixteen thresholds: what fits in registers
INTERPRETED = triton.knobs.runtime.interpret

# what a row's programs tell each other, int64; zero at first
MOST, ALL, COUNT, ABOVE, LISTED = (tl.constexpr(i) for i in range(5))
LOW, HIGH, LIMITED, EDGE, TIES = (tl.constexpr(i) for i in range(5, 10))
STATE = tl.constexpr(16)
UNIT = tl.constexpr(float(2**43))  # p = 1; 2^19 tokens then sum to less than 2^63
BIN_SHIFT = tl.constexpr(18)  # bits of p within a bin
LEAST_BITS = tl.constexpr((127 - 31) << 23)  # 2^-31, below which all p share bin 0
BINS = tl.constexpr(1024)
SLACK = tl.constexpr(1e-5)  # by how much sums over bins may be off


@triton.jit
def _largest(state_row):
    """The row's largest logit."""
    key = ((tl.load(state_row + MOST) >> 31) - 2147483648).to(tl.int32)
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _probabilities(logits_row, offsets, size, most, temperature):
    """p relative to the largest; outside the row -1."""
    x = tl.load(logits_row + offsets, offsets < size, float("-inf")).to(tl.float32)
    return tl.where(offsets < size, tl.exp((x - most) / temperature), -1.0)


@triton.jit
def _units(p):
    return (p * UNIT).to(tl.int64)


@triton.jit
def most_kernel(
    logits, state, tokens, counters, size, stride, CHUNK: tl.constexpr, GREEDY: tl.constexpr
):  # fmt: skip
    """The largest logit and the smallest token that has it; NaN is larger than all."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + offsets, offsets < size, float("-inf")).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)  # -0 is 0
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x != x, 0x7FFFFFFF, tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF))
    packed = ((key.to(tl.int64) + 2147483648) << 31) | (0x7FFFFFFF - offsets).to(tl.int64)
    packed = tl.where(offsets < size, packed, 0)
    tl.atomic_max(state + row * STATE + MOST, tl.max(packed, 0))
    if GREEDY:
        if tl.atomic_add(counters + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
            tl.store(counters + row, 0)
            found = tl.load(state + row * STATE + MOST, cache_modifier=".cg")
            tl.store(tokens + row, 0x7FFFFFFF - (found & 0x7FFFFFFF))


@triton.jit
def _bin(p):
    bits = p.to(tl.int32, bitcast=True)
    return tl.maximum(bits - LEAST_BITS, 0) >> BIN_SHIFT


@triton.jit
def _add_part(first, p, hot, total):
    """What of p fits a bfloat16 into the bins, and the rest of p."""
    part = p.to(tl.bfloat16)
    total = tl.dot(tl.where(first, part[None, :], 0.0).to(tl.bfloat16), hot, total)
    return total, p - part.to(tl.float32)


@triton.jit
def bins_kernel(
    logits, state, counts, sums, settings, counters, size, stride, CHUNK: tl.constexpr,
    STEP: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """counts, sums: float32 [R, BINS]. A bin is two digits of 32: one-hot matrices multiply."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = settings + row * 5
    top_k, top_p = tl.load(mine + 2), tl.load(mine + 3)
    if (top_k <= 0) & (top_p >= 1):
        return
    temperature, min_p = tl.load(mine).to(tl.float32), tl.load(mine + 1).to(tl.float32)
    most = _largest(state + row * STATE)
    digit = tl.arange(0, 32)
    count, total = tl.zeros([32, 32], tl.float32), tl.zeros([32, 32], tl.float32)
    for start in range(0, CHUNK, STEP):
        offsets = chunk * CHUNK + start + tl.arange(0, STEP)
        p = _probabilities(logits + row * stride, offsets, size, most, temperature)
        found = tl.where(p >= min_p, _bin(p), -1)
        first = digit[:, None] == (found >> 5)[None, :]
        second = (found & 31)[:, None] == digit[None, :]
        if NATIVE:  # p as three bfloat16, which together are exact
            hot = second.to(tl.bfloat16)
            count = tl.dot(first.to(tl.bfloat16), hot, count)
            total, p = _add_part(first, p, hot, total)
            total, p = _add_part(first, p, hot, total)
            total, p = _add_part(first, p, hot, total)
        else:
            hot = second.to(tl.float32)
            count = tl.dot(first.to(tl.float32), hot, count, input_precision="ieee")
            weight = tl.where(first, p[None, :], 0.0)
            total = tl.dot(weight, hot, total, input_precision="ieee")
    place = row * BINS + digit[:, None] * 32 + digit[None, :]
    tl.atomic_add(counts + place, count, count > 0)
    tl.atomic_add(sums + place, total, count > 0)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(counters + row, 0)
        _choose_bins(state + row * STATE, counts + row * BINS, sums + row * BINS, top_k, top_p)


@triton.jit
def _choose_bins(state_row, counts_row, sums_row, top_k, top_p):
    """The bins that hold the edge of top-k and that of top-p, wherever in its bin the former is."""
    bins = tl.arange(0, BINS)
    count = tl.cumsum(tl.load(counts_row + bins, cache_modifier=".cg"), 0, reverse=True)
    total = tl.cumsum(tl.load(sums_row + bins, cache_modifier=".cg"), 0, reverse=True)
    limited = (top_k > 0) & (top_k < tl.max(count, 0))
    wanted = tl.where(limited, top_k, 0.0).to(tl.float32)
    low = tl.max(tl.where(count >= wanted, bins, 0), 0)
    low = tl.where(limited, low, 0)
    high = low
    if top_p < 1:
        share = top_p.to(tl.float32)
        most = tl.sum(tl.where(bins == low, total, 0.0), 0)
        least = tl.sum(tl.where(bins == low + 1, total, 0.0), 0)
        least = tl.where(limited, least, most)
        lower = tl.max(tl.where(total >= share * most * (1 + SLACK), bins, 0), 0)
        high = tl.max(tl.where(total >= share * least * (1 - SLACK), bins, 0), 0)
        low = tl.where(limited, low, lower)
        high = tl.maximum(high, low)
    tl.store(state_row + LIMITED, limited.to(tl.int64))
    tl.store(state_row + LOW, low.to(tl.int64))
    tl.store(state_row + HIGH, high.to(tl.int64))


@triton.jit
def edge_kernel(
    logits, state, listed, settings, counters, size, stride, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """listed: float32 [R, size], the p in the chosen bins, in any order."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    mine = settings + row * 5
    top_k, top_p = tl.load(mine + 2), tl.load(mine + 3)
    if (top_k <= 0) & (top_p >= 1):
        return
    temperature, min_p = tl.load(mine).to(tl.float32), tl.load(mine + 1).to(tl.float32)
    state_row = state + row * STATE
    most = _largest(state_row)
    low, high = tl.load(state_row + LOW).to(tl.int32), tl.load(state_row + HIGH).to(tl.int32)
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    p = _probabilities(logits + row * stride, offsets, size, most, temperature)
    left = p >= min_p
    found = tl.where(left, _bin(p), -1)
    above, inside = found > high, (found >= low) & (found <= high)
    units = _units(p)
    tl.atomic_add(state_row + ALL, tl.sum(tl.where(left, units, 0), 0))
    tl.atomic_add(state_row + COUNT, tl.sum(above.to(tl.int64), 0))
    tl.atomic_add(state_row + ABOVE, tl.sum(tl.where(above, units, 0), 0))
    number = inside.to(tl.int32)
    first = tl.atomic_add(state_row + LISTED, tl.sum(number, 0).to(tl.int64))
    at = first + tl.cumsum(number, 0) - number
    tl.store(listed + row * size + at, p, inside)
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        tl.store(counters + row, 0)
        _find_edge(state_row, listed + row * size, top_k, top_p, min_p, BLOCK)


@triton.jit
def _search(listed_row, length, before, floor, wanted, by_count: tl.constexpr, BLOCK: tl.constexpr):
    """The largest bits t, `floor` at least, with `before` and the listed of t or more at `wanted`."""
    low = tl.zeros([], dtype=tl.int32)
    for index in range(8):
        shift = tl.maximum(26 - 4 * index, 0)
        thresholds = low + (tl.arange(0, 16) << shift)
        reached = tl.zeros([16], dtype=tl.int64) + before
        for start in range(0, length, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            p = tl.load(listed_row + offsets, offsets < length, -1.0, cache_modifier=".cg")
            seen = (p.to(tl.int32, bitcast=True)[:, None] >= thresholds[None, :]) & (p >= 0)[
                :, None
            ]
            if by_count:
                reached += tl.sum(seen.to(tl.int64), 0)
            else:
                reached += tl.sum(tl.where(seen, _units(p)[:, None], 0), 0)
        passes = (reached.to(tl.float64) >= wanted) | (thresholds <= floor)
        low += (tl.sum(passes.to(tl.int32), 0) - 1) << shift
    return low


@triton.jit
def _over(listed_row, length, edge, BLOCK: tl.constexpr):
    """Of the listed above `edge`: how many, and their sum."""
    count, total = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    for start in range(0, length, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        p = tl.load(listed_row + offsets, offsets < length, -1.0, cache_modifier=".cg")
        kept = (p.to(tl.int32, bitcast=True) > edge) & (p >= 0)
        count += tl.sum(kept.to(tl.int64), 0)
        total += tl.sum(tl.where(kept, _units(p), 0), 0)
    return count, total


@triton.jit
def _find_edge(state_row, listed_row, top_k, top_p, min_p, BLOCK: tl.constexpr):
    length = tl.load(state_row + LISTED, cache_modifier=".cg").to(tl.int32)
    count = tl.load(state_row + COUNT, cache_modifier=".cg")
    above = tl.load(state_row + ABOVE, cache_modifier=".cg")
    total = tl.load(state_row + ALL, cache_modifier=".cg")
    edge = min_p.to(tl.int32, bitcast=True)
    ties = tl.full([], 1 << 31, tl.int64)  # all tokens of p* are kept
    if tl.load(state_row + LIMITED) != 0:  # there are more than top_k
        edge = _search(listed_row, length, count, 0, top_k, True, BLOCK)
        over, sum_over = _over(listed_row, length, edge, BLOCK)
        ties = top_k.to(tl.int64) - count - over
        total = above + sum_over + ties * _units(edge.to(tl.float32, bitcast=True))
    if top_p < 1:
        wanted = top_p * total.to(tl.float64)
        front = _search(listed_row, length, above, edge, wanted, False, BLOCK)
        over, sum_over = _over(listed_row, length, front, BLOCK)
        missing = wanted - (above + sum_over).to(tl.float64)
        each = tl.maximum(_units(front.to(tl.float32, bitcast=True)), 1).to(tl.float64)
        needed = tl.maximum(tl.ceil(missing / each), 1.0).to(tl.int64)
        ties = tl.where(front == edge, tl.minimum(ties, needed), needed)
        edge = front
    tl.store(state_row + EDGE, edge.to(tl.int64))
    tl.store(state_row + TIES, ties)


@triton.jit
def _kept(logits_row, offsets, size, most, temperature, edge):
    """p, what lies above the edge in units, and what lies on it."""
    p = _probabilities(logits_row, offsets, size, most, temperature)
    bits = p.to(tl.int32, bitcast=True)
    return p, tl.where((bits > edge) & (p >= 0), _units(p), 0), (bits == edge) & (p >= 0)


@triton.jit
def draw_kernel(
    logits, state, chunk_sums, chunk_ties, settings, tokens, counters, size, stride,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row, chunk, chunks = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    mine = settings + row * 5
    temperature, min_p = tl.load(mine).to(tl.float32), tl.load(mine + 1).to(tl.float32)
    most = _largest(state + row * STATE)
    edge, ties = min_p.to(tl.int32, bitcast=True), tl.full([], 1 << 31, tl.int64)
    if (tl.load(mine + 2) > 0) | (tl.load(mine + 3) < 1):
        edge = tl.load(state + row * STATE + EDGE).to(tl.int32)
        ties = tl.load(state + row * STATE + TIES)
    logits_row = logits + row * stride
    offsets = chunk * CHUNK + tl.arange(0, CHUNK)
    _, above, on = _kept(logits_row, offsets, size, most, temperature, edge)
    tl.store(chunk_sums + row * chunks + chunk, tl.sum(above, 0))
    tl.store(chunk_ties + row * chunks + chunk, tl.sum(on.to(tl.int64), 0))
    tl.debug_barrier()
    if tl.atomic_add(counters + row, 1, sem="acq_rel") == chunks - 1:
        tl.store(counters + row, 0)
        each = _units(edge.to(tl.float32, bitcast=True))
        index = tl.arange(0, CHUNKS)
        at = row * chunks + index
        sums = tl.load(chunk_sums + at, index < chunks, 0, cache_modifier=".cg")
        on_edge = tl.load(chunk_ties + at, index < chunks, 0, cache_modifier=".cg")
        ties_before = tl.cumsum(on_edge, 0) - on_edge
        here = tl.minimum(tl.maximum(ties - ties_before, 0), on_edge)
        through = tl.cumsum(sums + here * each, 0)
        whole = tl.max(through, 0)
        target = (tl.load(mine + 4) * whole.to(tl.float64)).to(tl.int64)
        target = tl.minimum(target, whole - 1)
        passed = tl.sum((through <= target).to(tl.int32), 0)  # chunks before the one
        is_mine = index == passed
        before = tl.sum(tl.where(is_mine, through - sums - here * each, 0), 0)
        allowed = ties - tl.sum(tl.where(is_mine, ties_before, 0), 0)
        offsets = passed * CHUNK + tl.arange(0, CHUNK)
        _, above, on = _kept(logits_row, offsets, size, most, temperature, edge)
        rank = tl.cumsum(on.to(tl.int64), 0)
        running = before + tl.cumsum(above + tl.where(on & (rank <= allowed), each, 0), 0)
        token = passed * CHUNK + tl.sum((running <= target).to(tl.int32), 0)
        if tl.abs(most) < float("inf"):
            tl.store(tokens + row, token)
        else:  # infinite or NaN: no distribution
            tl.store(tokens + row, 0x7FFFFFFF - (tl.load(state + row * STATE + MOST) & 0x7FFFFFFF))


# ---- launching -----------------------------------------------------------------------------------


def greedy(logits_RO: Tensor) -> Tensor:
    """`kernels.sampling.greedy`."""
    rows, size = logits_RO.shape
    if not rows or not 0 < size < 2**31 or logits_RO.stride(1) != 1:
        return NotImplemented  # type: ignore[no-any-return]
    device = logits_RO.device
    state = torch.zeros(rows, STATE.value, dtype=torch.int64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    most_kernel[(rows, triton.cdiv(size, CHUNK))](
        logits_RO, state, tokens, take_counters(device, rows), size, logits_RO.stride(0),
        CHUNK=CHUNK, GREEDY=True, num_warps=4,
    )  # fmt: skip
    return tokens


def sample_rows(
    logits_RO: Tensor,
    temperature_R: Tensor,
    min_p_R: Tensor,
    top_k_R: Tensor,
    top_p_R: Tensor,
    random_R: Tensor,
) -> Tensor:
    """`kernels.sampling.sample_rows`."""
    rows, size = logits_RO.shape
    if not rows or not 0 < size <= 2**19 or logits_RO.stride(1) != 1:
        return NotImplemented  # type: ignore[no-any-return]
    device, stride, chunks = logits_RO.device, logits_RO.stride(0), triton.cdiv(size, CHUNK)
    columns = (temperature_R, min_p_R, top_k_R, top_p_R, random_R)
    settings = torch.stack([column.double() for column in columns], dim=1)
    settings = settings.to(device, non_blocking=True)
    cut = bool(((top_k_R > 0) | (top_p_R < 1)).any())
    state = torch.zeros(rows, STATE.value, dtype=torch.int64, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    counters = take_counters(device, rows)
    grid, shared = (rows, chunks), {"CHUNK": CHUNK, "num_warps": 4}
    most_kernel[grid](logits_RO, state, tokens, counters, size, stride, GREEDY=False, **shared)
    if cut:
        bins = torch.zeros(2, rows, BINS.value, device=device)
        bins_kernel[grid](
            logits_RO, state, *bins.unbind(0), settings, counters, size, stride,
            STEP=STEP, NATIVE=not INTERPRETED, **shared,
        )  # fmt: skip
        listed = torch.empty(rows, size, device=device)
        edge_kernel[grid](
            logits_RO, state, listed, settings, counters, size, stride, BLOCK=BLOCK, **shared
        )
    partial = torch.empty(2, rows, chunks, dtype=torch.int64, device=device)
    draw_kernel[grid](
        logits_RO, state, *partial.unbind(0), settings, tokens, counters, size, stride,
        CHUNKS=triton.next_power_of_2(chunks), **shared,
    )  # fmt: skip
    return tokens
