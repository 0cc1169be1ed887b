# mypy: allow-untyped-defs, allow-incomplete-defs
"""Tokens straight into the memory of other ranks: dispatch and combine as kernels.

    ways       which row to a rank a token is, and how many go there; counts the step
    send       row of a token ─▶ inbox of each rank it visits, with a header; counts, then a flag
    wait       until every rank's flag has come
    receive    inbox ─▶ values, once for each visit, with the visits' experts and weights
    send_back  sum of a row's results ─▶ `returns` of the rank it came from, at its place; a flag
    sum_up     out[t] = sum over the ranks that t visited of what they returned, in order

A rank's memory is one allocation that all ranks can address; `peers` has the address of each. There are
two copies of everything, used in turn: a step's number, which lives on the device, says which. A flag holds
the number of the step it belongs to, so none is ever reset. Writes are made visible by one release at
system scope behind a count of the finished programs; `wait` acquires.

Nothing here can hang or write out of bounds: `wait` gives up after a number of polls, a row past the
capacity is not written, nor is a visit past the room of its header (only a token that names an expert
twice has so many), and each leaves its reason in `status`. A rank that has no room tells all ranks, by a
count below zero.

A header is int32: source token, which of that token's returns this is, number of visits, nothing; then for
each visit the number of the expert on this rank, and the bits of its weight.

    W ranks    C rows from a rank to a rank    T tokens    k experts of a token    V = min(k, experts of a
    rank) visits of a row at most    M = min(k, W) ranks of a token at most    D hidden size
    place_TW   which of the rows to rank w token t is, by token; -1 if it doesn't go there
"""

from __future__ import annotations

import triton
import triton.language as tl

# status[0]; status[1] is the rank it is about
TIMED_OUT = tl.constexpr(1)
FULL = tl.constexpr(2)
NOWHERE = tl.constexpr(3)
TWICE = tl.constexpr(4)
UNROLLED = tl.constexpr(8)  # loads of a sum that are begun together
OVERFLOWN = tl.constexpr(-1)  # a count: the sender had more rows than fit, for somebody
# Numbers that differ between ranks and steps: a kernel is built once for all of them.
ANY = ("tokens", "rank", "experts", "capacity", "polls")


@triton.jit
def _int32_at(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _finished(counter_ptr, programs):
    """Whether this program is the last one, and then all others' writes are seen; resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit(do_not_specialize=ANY)
def ways_kernel(
    slots_ptr, place_ptr, counts_ptr, step_ptr, sent_step_ptr, status_ptr, tokens, rank, experts,
    K: tl.constexpr, KS: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """place_TW and how many rows each rank gets, one program a rank; one of them counts the step."""
    peer = tl.program_id(0)
    column = tl.arange(0, KS)[None, :]
    count = tl.zeros([], tl.int32)
    most = tl.zeros([], tl.int32)
    lost = tl.zeros([], tl.int32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        there = (token < tokens)[:, None] & (column < K)
        slot = tl.load(slots_ptr + token[:, None].to(tl.int64) * K + column, there, 0)
        mine = there & (slot >= peer * experts) & (slot < (peer + 1) * experts)
        visits = tl.sum(mine.to(tl.int32), 1)
        goes = (visits > 0).to(tl.int32)
        place = tl.where(goes > 0, count + tl.cumsum(goes, 0) - goes, -1)
        tl.store(place_ptr + token.to(tl.int64) * W + peer, place, token < tokens)
        count += tl.sum(goes, 0)
        most = tl.maximum(most, tl.max(visits, 0))
        outside = there & ((slot < 0) | (slot >= W * experts))
        lost += tl.sum(tl.sum(outside.to(tl.int32), 1), 0)
    tl.store(counts_ptr + peer, count)
    if most > V:
        tl.store(status_ptr, TWICE)
        tl.store(status_ptr + 1, rank)
    if peer == 0:
        step = tl.load(step_ptr) + 1
        tl.store(step_ptr, step)
        tl.store(sent_step_ptr, step)
        if lost > 0:
            tl.store(status_ptr, NOWHERE)
            tl.store(status_ptr + 1, rank)


@triton.jit(do_not_specialize=ANY)
def send_kernel(
    rows_ptr, slots_ptr, weights_ptr, place_ptr, counts_ptr, peers_ptr, step_ptr, counter_ptr,
    status_ptr, tokens, rank, experts, capacity, copy_bytes, rows_at, flags_at,
    K: tl.constexpr, KS: tl.constexpr, V: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr,
    HEAD: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token t to rank w, if it visits it: as the place_TW[t, w]-th row from here."""
    token, peer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    step = tl.load(step_ptr)
    copy_at = (step & 1).to(tl.int64) * copy_bytes
    if token < tokens:
        place = tl.load(place_ptr + token * W + peer)
        if (place >= 0) & (place < capacity):
            base = tl.load(peers_ptr + peer) + copy_at
            row = (rank * capacity + place).to(tl.int64)
            into = _int32_at(base + rows_at + row * (WORDS * 4))
            source = rows_ptr + token * WORDS
            for first in tl.static_range(0, WORDS, BLOCK):
                word = first + tl.arange(0, BLOCK)
                tl.store(into + word, tl.load(source + word, word < WORDS), word < WORDS)
            header = _int32_at(base + row * HEAD)
            tl.store(header, token.to(tl.int32))
            lane = tl.arange(0, LANES)
            before = tl.load(place_ptr + token * W + lane, lane < peer, -1)
            tl.store(header + 1, tl.sum((before >= 0).to(tl.int32), 0))
            column = tl.arange(0, KS)
            slot = tl.load(slots_ptr + token * K + column, column < K, -1)
            mine = (slot >= peer * experts) & (slot < (peer + 1) * experts)
            visit = tl.cumsum(mine.to(tl.int32), 0) - 1
            mine = mine & (visit < V)
            weight = tl.load(weights_ptr + token * K + column, column < K, 0.0).to(tl.float32)
            tl.store(header + 4 + 2 * visit, (slot - peer * experts).to(tl.int32), mine)
            tl.store(header + 5 + 2 * visit, weight.to(tl.int32, bitcast=True), mine)
            tl.store(header + 2, tl.sum(mine.to(tl.int32), 0))
    if _finished(counter_ptr, tl.num_programs(0) * tl.num_programs(1)):
        lane = tl.arange(0, LANES)
        here = lane < W
        count = tl.load(counts_ptr + lane, here, 0)
        if tl.max(count, 0) > capacity:
            tl.store(status_ptr, FULL)
            tl.store(status_ptr + 1, rank)
            count = tl.full([LANES], OVERFLOWN, tl.int32)
        flags = tl.load(peers_ptr + lane, here, 0) + copy_at + flags_at + rank * 16
        flags = flags.to(tl.pointer_type(tl.int32))
        tl.store(flags, count, here)
        tl.debug_barrier()
        tl.atomic_xchg(flags + 1, step + lane * 0, here, sem="release", scope="sys")


@triton.jit(do_not_specialize=ANY)
def wait_kernel(
    peers_ptr, step_ptr, counts_ptr, status_ptr, rank, polls, copy_bytes, flags_at,
    W: tl.constexpr, LANES: tl.constexpr, RETURNS: tl.constexpr,
):  # fmt: skip
    """Wait for the flag of every rank; of a dispatch, also give how many rows each has sent."""
    lane = tl.arange(0, LANES)
    here = lane < W
    step = tl.load(step_ptr)
    base = tl.load(peers_ptr + rank) + (step & 1).to(tl.int64) * copy_bytes + flags_at
    flags = (base + lane.to(tl.int64) * 16).to(tl.pointer_type(tl.int32))
    which: tl.constexpr = 2 if RETURNS else 1
    seen = tl.atomic_add(flags + which, 0, here, sem="acquire", scope="sys")
    missing = tl.sum((here & (seen != step)).to(tl.int32), 0)
    polled = 1
    while (missing > 0) & (polled < polls):
        seen = tl.atomic_add(flags + which, 0, here, sem="acquire", scope="sys")
        missing = tl.sum((here & (seen != step)).to(tl.int32), 0)
        polled += 1
    tl.debug_barrier()
    came = here & (seen == step)
    if missing > 0:
        tl.store(status_ptr, TIMED_OUT)
        tl.store(status_ptr + 1, tl.min(tl.where(here & (seen != step), lane, LANES), 0))
    if not RETURNS:
        count = tl.load(flags, came, 0)
        lost = tl.min(tl.where(count < 0, lane, LANES), 0)
        if lost < LANES:
            tl.store(status_ptr, FULL)
            tl.store(status_ptr + 1, lost)
        tl.store(counts_ptr + lane, tl.maximum(count, 0), here)


@triton.jit(do_not_specialize=ANY)
def receive_kernel(
    peers_ptr, step_ptr, counts_ptr, x_ptr, experts_ptr, weights_ptr,
    rank, experts, capacity, copy_bytes, rows_at, scales_at, factor_at,
    V: tl.constexpr, VS: tl.constexpr, HEAD: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Row (source, place) of the inbox as values, for each of its visits; the rest is nobody's."""
    place, source = tl.program_id(0), tl.program_id(1)  # only the first may pass 65535
    row = source.to(tl.int64) * capacity + place
    base = tl.load(peers_ptr + rank) + (tl.load(step_ptr) & 1).to(tl.int64) * copy_bytes
    header = _int32_at(base + row * HEAD)
    there = place < tl.load(counts_ptr + source)
    visits = tl.minimum(tl.load(header + 2, there, 0), V)
    visit = tl.arange(0, VS)
    expert = tl.load(header + 4 + 2 * visit, visit < visits, -1)
    inside = (expert >= 0) & (expert < experts)
    tl.store(experts_ptr + row * V + visit, tl.where(inside, expert, experts), visit < V)
    weight = tl.load(header + 5 + 2 * visit, visit < visits, 0)
    tl.store(weights_ptr + row * V + visit, weight.to(tl.float32, bitcast=True), visit < V)
    if there:
        start = base + rows_at + row * ROW
        for first in tl.static_range(0, D, BLOCK):
            column = first + tl.arange(0, BLOCK)
            value = _decode(start, scales_at, factor_at, column, column < D, KIND)
            value = value.to(x_ptr.dtype.element_ty)
            for j in range(visits):
                tl.store(x_ptr + (row * V + j) * D + column, value, column < D)


@triton.jit
def _decode(start, scales_at, factor_at, column, inside, KIND: tl.constexpr):
    """Values of a row in one of the formats of `kernels.dispatch.WIRES`."""
    if KIND == "nvfp4":
        bytes = tl.multiple_of(start.to(tl.pointer_type(tl.uint8)), 16)
        pair = tl.load(bytes + column // 2, inside, 0).to(tl.int32)
        code = (pair >> ((column & 1) * 4)) & 15
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        scales = (start + scales_at).to(tl.pointer_type(tl.float8e4nv))
        scale = tl.load(scales + column // 16, inside, 0.0).to(tl.float32)
        factor = tl.load((start + factor_at).to(tl.pointer_type(tl.float32)))
        return bits.to(tl.float32, bitcast=True) * (2.0**126) * (scale * factor)
    elif KIND == "fp8":
        values = tl.multiple_of(start.to(tl.pointer_type(tl.float8e4nv)), 16)
        scales = (start + scales_at).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + column // 128, inside, 0.0)
        return tl.load(values + column, inside, 0.0).to(tl.float32) * scale
    else:
        return tl.load(_values_at(start, KIND) + column, inside, 0.0).to(tl.float32)


@triton.jit
def _values_at(start, KIND: tl.constexpr):
    """An address as that of plain values."""
    if KIND == "bf16":
        return tl.multiple_of(start.to(tl.pointer_type(tl.bfloat16)), 16)
    elif KIND == "f16":
        return tl.multiple_of(start.to(tl.pointer_type(tl.float16)), 16)
    else:
        return tl.multiple_of(start.to(tl.pointer_type(tl.float32)), 16)


@triton.jit(do_not_specialize=ANY)
def send_back_kernel(
    y_ptr, counts_ptr, peers_ptr, step_ptr, counter_ptr, status_ptr,
    rank, tokens, capacity, copy_bytes, returns_at, flags_at,
    V: tl.constexpr, M: tl.constexpr, HEAD: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr,
    W: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """The sum of the results of row (source, place), in the order of its visits, to its source.

    Programs walk over the rows: one for each that could come would count itself as finished far more often, on
    one counter.
    """
    step = tl.load(step_ptr)
    copy_at = (step & 1).to(tl.int64) * copy_bytes
    for one in range(tl.program_id(0), capacity * W, tl.num_programs(0)):
        source, place = one % W, one // W
        if place < tl.load(counts_ptr + source):
            row = (tl.zeros([], tl.int64) + source) * capacity + place
            header = _int32_at(tl.load(peers_ptr + rank) + copy_at + row * HEAD)
            token, turn, visits = tl.load(header), tl.load(header + 1), tl.load(header + 2)
            if (token >= 0) & (token < tokens) & (turn >= 0) & (turn < M):
                into = tl.load(peers_ptr + source) + copy_at + returns_at
                into = _values_at(into + (token.to(tl.int64) * M + turn) * ROW, KIND)
                for first in tl.static_range(0, D, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    total = _sum_of_visits(y_ptr + row * V * D, column, visits, V, D, BLOCK)
                    tl.store(into + column, total.to(into.dtype.element_ty), column < D)
            else:
                tl.store(status_ptr, NOWHERE)
                tl.store(status_ptr + 1, source)
    if _finished(counter_ptr, tl.num_programs(0)):
        lane = tl.arange(0, LANES)
        here = lane < W
        flags = tl.load(peers_ptr + lane, here, 0) + copy_at + flags_at + rank * 16
        flags = flags.to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + 2, step + lane * 0, here, sem="release", scope="sys")


@triton.jit
def _sum_of_visits(from_ptr, column, visits, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """Of so many rows of D; up to UNROLLED are all on their way before the first is needed."""
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(V if V < UNROLLED else UNROLLED):
        value = tl.load(from_ptr + j * D + column, column < tl.where(visits > j, D, 0), 0.0)
        total += value.to(tl.float32)
    for j in range(UNROLLED, tl.minimum(visits, V)):
        value = tl.load(from_ptr + j * D + column, column < D, 0.0)
        total += value.to(tl.float32)
    return total


@triton.jit(do_not_specialize=ANY)
def sum_up_kernel(
    peers_ptr, step_ptr, place_ptr, out_ptr, rank, copy_bytes, returns_at,
    M: tl.constexpr, W: tl.constexpr, LANES: tl.constexpr, ROW: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """out[t] = the sum of the results of token t, one from each rank that it has visited."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(peers_ptr + rank) + (tl.load(step_ptr) & 1).to(tl.int64) * copy_bytes
    lane = tl.arange(0, LANES)
    place = tl.load(place_ptr + token * W + lane, lane < W, -1)
    returning = tl.minimum(tl.sum((place >= 0).to(tl.int32), 0), M)
    total = tl.zeros([BLOCK], tl.float32)
    start = _values_at(base + returns_at + token * M * ROW, KIND)
    PITCH: tl.constexpr = ROW // (4 if KIND == "f32" else 2)
    for turn in tl.static_range(M if M < UNROLLED else UNROLLED):
        inside = column < tl.where(returning > turn, D, 0)
        total += tl.load(start + turn * PITCH + column, inside, 0.0).to(tl.float32)
    for turn in range(UNROLLED, returning):
        total += tl.load(start + turn * PITCH + column, column < D, 0.0).to(tl.float32)
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), column < D)
