# mypy: allow-untyped-defs, allow-incomplete-defs
"""Dispatch and combine as Triton kernels that write into the memory of other ranks.

    dispatch_layout_kernel    row_index[t, w] = row of token t among those sent to rank w, or -1
    dispatch_send_kernel      inbox of rank w, row r ← header and wire row of token t; then a flag
    wait_flags_kernel         wait for the flags of all ranks
    dispatch_receive_kernel   x[r, v] ← dequantized row r of the inbox, for each assigned expert v
    combine_send_kernel       returns of the source rank ← sum_v y[r, v]; then a flag
    combine_reduce_kernel     out[t] = sum over the ranks of token t of what they returned, in order

The memory of a rank is one allocation that all ranks can address; `peers` holds the address of each.
It is double-buffered: the step number, which lives on the device, selects the buffer. A flag holds
the number of its step, so flags are never reset. After the last program of a kernel has finished, one
release at system scope publishes all writes; the wait acquires.

No kernel hangs or writes out of bounds. The wait stops after a number of polls. A row beyond the
capacity is not written, nor is an assignment beyond its header (only a token that names an expert
twice has so many). Each of these leaves an error code in `status`. A rank that exceeded the capacity
sends a negative count to all ranks.

A header is int32: source token, copy index (how many ranks before this one the token is sent to),
number of assignments, unused; then, for each assigned expert, its index on this rank and the bits of
its router weight.

    W ranks    C rows from one rank to another (capacity)    T tokens    K experts of a token
    V = min(K, experts of a rank), most assignments of a row    M = min(K, W), most ranks of a token
    D hidden size
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_pdl import launch_dependents, wait_for_dependencies

# status[0] is one of these; status[1] is the rank it is about.
TIMED_OUT = tl.constexpr(1)
CAPACITY_EXCEEDED = tl.constexpr(2)
INVALID_EXPERT = tl.constexpr(3)
DUPLICATE_EXPERT = tl.constexpr(4)
UNROLL = tl.constexpr(8)  # loads of a sum that are issued together
OVERFLOW_COUNT = tl.constexpr(-1)  # the sender had more rows than the capacity for some rank
# Integers that differ between ranks and steps; one compiled kernel serves all of them.
UNSPECIALIZED = ("tokens", "rank", "experts", "capacity", "max_polls")


@triton.jit
def _int32_pointer(address):
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def _is_last_program(counter_ptr, programs):
    """Whether this program is the last to finish. It then sees all writes, and resets the counter."""
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="sys") == programs - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_layout_kernel(
    slots_ptr, row_index_ptr, counts_ptr, step_ptr, sent_step_ptr, status_ptr,
    tokens, rank, experts,
    K: tl.constexpr, K_PADDED: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """row_index_TW and the number of rows to each rank; one program a rank. The first counts the step."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    peer = tl.program_id(0)
    column = tl.arange(0, K_PADDED)[None, :]
    count = tl.zeros([], tl.int32)
    max_assigned = tl.zeros([], tl.int32)
    num_invalid = tl.zeros([], tl.int32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        valid = (token < tokens)[:, None] & (column < K)
        slot = tl.load(slots_ptr + token[:, None].to(tl.int64) * K + column, valid, 0)
        is_local = valid & (slot >= peer * experts) & (slot < (peer + 1) * experts)
        assigned = tl.sum(is_local.to(tl.int32), 1)
        is_sent = (assigned > 0).to(tl.int32)
        index = tl.where(is_sent > 0, count + tl.cumsum(is_sent, 0) - is_sent, -1)
        tl.store(row_index_ptr + token.to(tl.int64) * W + peer, index, token < tokens)
        count += tl.sum(is_sent, 0)
        max_assigned = tl.maximum(max_assigned, tl.max(assigned, 0))
        is_invalid = valid & ((slot < 0) | (slot >= W * experts))
        num_invalid += tl.sum(tl.sum(is_invalid.to(tl.int32), 1), 0)
    tl.store(counts_ptr + peer, count)
    if max_assigned > V:
        tl.store(status_ptr, DUPLICATE_EXPERT)
        tl.store(status_ptr + 1, rank)
    if peer == 0:
        step = tl.load(step_ptr) + 1
        tl.store(step_ptr, step)
        tl.store(sent_step_ptr, step)
        if num_invalid > 0:
            tl.store(status_ptr, INVALID_EXPERT)
            tl.store(status_ptr + 1, rank)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_send_kernel(
    rows_ptr, slots_ptr, weights_ptr, row_index_ptr, counts_ptr, peers_ptr, step_ptr, counter_ptr,
    status_ptr, tokens, rank, experts, capacity, buffer_bytes, rows_offset, flags_offset,
    K: tl.constexpr, K_PADDED: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    W_PADDED: tl.constexpr, HEADER_BYTES: tl.constexpr, ROW_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """inbox[w][rank, row_index[t, w]] = header and row of token t, if it has experts on rank w."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    token, peer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    step = tl.load(step_ptr)
    buffer_offset = (step & 1).to(tl.int64) * buffer_bytes
    if token < tokens:
        index = tl.load(row_index_ptr + token * W + peer)
        if (index >= 0) & (index < capacity):
            base = tl.load(peers_ptr + peer) + buffer_offset
            row = (rank * capacity + index).to(tl.int64)
            target = _int32_pointer(base + rows_offset + row * (ROW_WORDS * 4))
            source = rows_ptr + token * ROW_WORDS
            for first in tl.static_range(0, ROW_WORDS, BLOCK):
                word = first + tl.arange(0, BLOCK)
                value = tl.load(source + word, word < ROW_WORDS)
                tl.store(target + word, value, word < ROW_WORDS)
            header = _int32_pointer(base + row * HEADER_BYTES)
            tl.store(header, token.to(tl.int32))
            lane = tl.arange(0, W_PADDED)
            earlier = tl.load(row_index_ptr + token * W + lane, lane < peer, -1)
            tl.store(header + 1, tl.sum((earlier >= 0).to(tl.int32), 0))
            column = tl.arange(0, K_PADDED)
            slot = tl.load(slots_ptr + token * K + column, column < K, -1)
            is_local = (slot >= peer * experts) & (slot < (peer + 1) * experts)
            assignment = tl.cumsum(is_local.to(tl.int32), 0) - 1
            is_local = is_local & (assignment < V)
            weight = tl.load(weights_ptr + token * K + column, column < K, 0.0).to(tl.float32)
            expert = (slot - peer * experts).to(tl.int32)
            tl.store(header + 4 + 2 * assignment, expert, is_local)
            tl.store(header + 5 + 2 * assignment, weight.to(tl.int32, bitcast=True), is_local)
            tl.store(header + 2, tl.sum(is_local.to(tl.int32), 0))
    if _is_last_program(counter_ptr, tl.num_programs(0) * tl.num_programs(1)):
        lane = tl.arange(0, W_PADDED)
        in_world = lane < W
        count = tl.load(counts_ptr + lane, in_world, 0)
        if tl.max(count, 0) > capacity:
            tl.store(status_ptr, CAPACITY_EXCEEDED)
            tl.store(status_ptr + 1, rank)
            count = tl.full([W_PADDED], OVERFLOW_COUNT, tl.int32)
        flags = tl.load(peers_ptr + lane, in_world, 0) + buffer_offset + flags_offset + rank * 16
        flags = flags.to(tl.pointer_type(tl.int32))
        tl.store(flags, count, in_world)
        tl.debug_barrier()
        tl.atomic_xchg(flags + 1, step + lane * 0, in_world, sem="release", scope="sys")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def wait_flags_kernel(
    peers_ptr, step_ptr, counts_ptr, status_ptr, rank, max_polls, buffer_bytes, flags_offset,
    W: tl.constexpr, W_PADDED: tl.constexpr, IS_COMBINE: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """Wait for the flags of all ranks. After a dispatch also read how many rows each has sent.

    Once a rank counts as lost, later waits poll once: the host hears of it after one timeout.
    """
    if PDL:
        wait_for_dependencies()
    lane = tl.arange(0, W_PADDED)
    in_world = lane < W
    step = tl.load(step_ptr)
    base = tl.load(peers_ptr + rank) + (step & 1).to(tl.int64) * buffer_bytes + flags_offset
    flags = (base + lane.to(tl.int64) * 16).to(tl.pointer_type(tl.int32))
    word: tl.constexpr = 2 if IS_COMBINE else 1
    seen = tl.atomic_add(flags + word, 0, in_world, sem="acquire", scope="sys")
    missing = tl.sum((in_world & (seen != step)).to(tl.int32), 0)
    polls = 1
    limit = tl.where(tl.load(status_ptr) == TIMED_OUT, 1, max_polls)
    while (missing > 0) & (polls < limit):
        seen = tl.atomic_add(flags + word, 0, in_world, sem="acquire", scope="sys")
        missing = tl.sum((in_world & (seen != step)).to(tl.int32), 0)
        polls += 1
    tl.debug_barrier()
    if PDL:  # only now: programs that wait would take the place of those that send
        launch_dependents()
    arrived = in_world & (seen == step)
    if missing > 0:
        tl.store(status_ptr, TIMED_OUT)
        first = tl.min(tl.where(in_world & (seen != step), lane, W_PADDED), 0)
        tl.store(status_ptr + 1, first)
    if not IS_COMBINE:
        count = tl.load(flags, arrived, 0)
        overflowed = tl.min(tl.where(count < 0, lane, W_PADDED), 0)
        if overflowed < W_PADDED:
            tl.store(status_ptr, CAPACITY_EXCEEDED)
            tl.store(status_ptr + 1, overflowed)
        tl.store(counts_ptr + lane, tl.maximum(count, 0), in_world)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def dispatch_receive_kernel(
    peers_ptr, step_ptr, counts_ptr, x_ptr, x_scales_ptr, experts_ptr, weights_ptr,
    rank, experts, capacity, buffer_bytes, rows_offset, scales_offset, token_scale_offset,
    V: tl.constexpr, V_PADDED: tl.constexpr, HEADER_BYTES: tl.constexpr, ROW_BYTES: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    NUM_SCALES: tl.constexpr = 0, SCALES_PADDED: tl.constexpr = 1,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """x[source, index, v] = dequantized row of the inbox; experts[source, index, v] and weights.

    Rows and assignments that nobody sent get the invalid expert index `experts`. With NUM_SCALES, x
    and x_scales get the row's bytes and scales as they were sent, for GEMMs that read them so.
    """
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    index, source = tl.program_id(0), tl.program_id(1)  # only the first may exceed 65535
    row = source.to(tl.int64) * capacity + index
    base = tl.load(peers_ptr + rank) + (tl.load(step_ptr) & 1).to(tl.int64) * buffer_bytes
    header = _int32_pointer(base + row * HEADER_BYTES)
    is_sent = index < tl.load(counts_ptr + source)
    assigned = tl.minimum(tl.load(header + 2, is_sent, 0), V)
    assignment = tl.arange(0, V_PADDED)
    expert = tl.load(header + 4 + 2 * assignment, assignment < assigned, -1)
    is_valid = (expert >= 0) & (expert < experts)
    expert = tl.where(is_valid, expert, experts)
    tl.store(experts_ptr + row * V + assignment, expert, assignment < V)
    weight = tl.load(header + 5 + 2 * assignment, assignment < assigned, 0)
    weight = weight.to(tl.float32, bitcast=True)
    tl.store(weights_ptr + row * V + assignment, weight, assignment < V)
    if is_sent:
        start = base + rows_offset + row * ROW_BYTES
        for first in tl.static_range(0, D, BLOCK):
            column = first + tl.arange(0, BLOCK)
            if NUM_SCALES > 0:
                codes = tl.multiple_of(start.to(tl.pointer_type(tl.uint8)), 16)
                value = tl.load(codes + column, column < D, 0)
            else:
                value = _dequantize_row(
                    start, scales_offset, token_scale_offset, column, column < D, FORMAT
                )
                value = value.to(x_ptr.dtype.element_ty)
            for j in range(assigned):
                tl.store(x_ptr + (row * V + j) * D + column, value, column < D)
        if NUM_SCALES > 0:
            lane = tl.arange(0, SCALES_PADDED)
            scales = (start + scales_offset).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales + lane, lane < NUM_SCALES, 0.0)
            for j in range(assigned):
                target = x_scales_ptr + (row * V + j) * NUM_SCALES + lane
                tl.store(target, scale, lane < NUM_SCALES)


@triton.jit
def _dequantize_row(start, scales_offset, token_scale_offset, column, inside, FORMAT: tl.constexpr):
    """Values of a row in one of `WIRE_FORMATS`."""
    if FORMAT == "nvfp4":
        bytes = tl.multiple_of(start.to(tl.pointer_type(tl.uint8)), 16)
        pair = tl.load(bytes + column // 2, inside, 0).to(tl.int32)
        code = (pair >> ((column & 1) * 4)) & 15
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        scales = (start + scales_offset).to(tl.pointer_type(tl.float8e4nv))
        scale = tl.load(scales + column // 16, inside, 0.0).to(tl.float32)
        token_scale = tl.load((start + token_scale_offset).to(tl.pointer_type(tl.float32)))
        return bits.to(tl.float32, bitcast=True) * (2.0**126) * (scale * token_scale)
    elif FORMAT == "fp8":
        values = tl.multiple_of(start.to(tl.pointer_type(tl.float8e4nv)), 16)
        scales = (start + scales_offset).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + column // 128, inside, 0.0)
        return tl.load(values + column, inside, 0.0).to(tl.float32) * scale
    else:
        return tl.load(_value_pointer(start, FORMAT) + column, inside, 0.0).to(tl.float32)


@triton.jit
def _value_pointer(start, FORMAT: tl.constexpr):
    """An address as a pointer to unquantized values."""
    if FORMAT == "bf16":
        return tl.multiple_of(start.to(tl.pointer_type(tl.bfloat16)), 16)
    elif FORMAT == "f16":
        return tl.multiple_of(start.to(tl.pointer_type(tl.float16)), 16)
    else:
        return tl.multiple_of(start.to(tl.pointer_type(tl.float32)), 16)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_send_kernel(
    y_ptr, counts_ptr, peers_ptr, step_ptr, counter_ptr, status_ptr,
    rank, tokens, capacity, buffer_bytes, returns_offset, flags_offset,
    V: tl.constexpr, M: tl.constexpr, HEADER_BYTES: tl.constexpr, ROW_BYTES: tl.constexpr,
    D: tl.constexpr, W: tl.constexpr, W_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """returns[source][token, copy] = sum_v y[source, index, v], in the order of the assignments.

    Persistent over the rows. With one program a row, far more programs would increment the one
    counter of finished programs.
    """
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    step = tl.load(step_ptr)
    buffer_offset = (step & 1).to(tl.int64) * buffer_bytes
    for item in range(tl.program_id(0), capacity * W, tl.num_programs(0)):
        source, index = item % W, item // W
        if index < tl.load(counts_ptr + source):
            row = (tl.zeros([], tl.int64) + source) * capacity + index
            header = _int32_pointer(tl.load(peers_ptr + rank) + buffer_offset + row * HEADER_BYTES)
            token, copy, assigned = tl.load(header), tl.load(header + 1), tl.load(header + 2)
            if (token >= 0) & (token < tokens) & (copy >= 0) & (copy < M):
                target = tl.load(peers_ptr + source) + buffer_offset + returns_offset
                target = target + (token.to(tl.int64) * M + copy) * ROW_BYTES
                target = _value_pointer(target, FORMAT)
                for first in tl.static_range(0, D, BLOCK):
                    column = first + tl.arange(0, BLOCK)
                    total = _sum_assignments(y_ptr + row * V * D, column, assigned, V, D, BLOCK)
                    tl.store(target + column, total.to(target.dtype.element_ty), column < D)
            else:
                tl.store(status_ptr, INVALID_EXPERT)
                tl.store(status_ptr + 1, source)
    if _is_last_program(counter_ptr, tl.num_programs(0)):
        lane = tl.arange(0, W_PADDED)
        in_world = lane < W
        flags = tl.load(peers_ptr + lane, in_world, 0) + buffer_offset + flags_offset + rank * 16
        flags = flags.to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + 2, step + lane * 0, in_world, sem="release", scope="sys")


@triton.jit
def _sum_assignments(
    y_ptr, column, assigned, V: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """sum_v y[v]; the first UNROLL loads are issued before the first sum needs one."""
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(V if V < UNROLL else UNROLL):
        value = tl.load(y_ptr + j * D + column, column < tl.where(assigned > j, D, 0), 0.0)
        total += value.to(tl.float32)
    for j in range(UNROLL, tl.minimum(assigned, V)):
        value = tl.load(y_ptr + j * D + column, column < D, 0.0)
        total += value.to(tl.float32)
    return total


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_reduce_kernel(
    peers_ptr, step_ptr, row_index_ptr, out_ptr, rank, buffer_bytes, returns_offset,
    M: tl.constexpr, W: tl.constexpr, W_PADDED: tl.constexpr, ROW_BYTES: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    PDL: tl.constexpr = False,
):  # fmt: skip
    """out[t] = sum of the results of token t, one from each rank that it was sent to."""
    if PDL:
        launch_dependents()
        wait_for_dependencies()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = tl.load(peers_ptr + rank) + (tl.load(step_ptr) & 1).to(tl.int64) * buffer_bytes
    lane = tl.arange(0, W_PADDED)
    index = tl.load(row_index_ptr + token * W + lane, lane < W, -1)
    copies = tl.minimum(tl.sum((index >= 0).to(tl.int32), 0), M)
    total = tl.zeros([BLOCK], tl.float32)
    start = _value_pointer(base + returns_offset + token * M * ROW_BYTES, FORMAT)
    STRIDE: tl.constexpr = ROW_BYTES // (4 if FORMAT == "f32" else 2)
    for copy in tl.static_range(M if M < UNROLL else UNROLL):
        inside = column < tl.where(copies > copy, D, 0)
        total += tl.load(start + copy * STRIDE + column, inside, 0.0).to(tl.float32)
    for copy in range(UNROLL, copies):
        total += tl.load(start + copy * STRIDE + column, column < D, 0.0).to(tl.float32)
    tl.store(out_ptr + token * D + column, total.to(out_ptr.dtype.element_ty), column < D)
