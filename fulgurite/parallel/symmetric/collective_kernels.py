# mypy: allow-untyped-defs, allow-incomplete-defs
"""One-shot collectives as a Triton kernel that writes into the memory of other ranks.

    exchange_kernel   inbox of rank w, slot r ← the part of rank r for rank w; then flags; then
                      out = sum over r of inbox[r], in the order of ranks        (IS_SUM)
                      out[r] = inbox[r]                                           (otherwise)

Each program exchanges a region of its own with the same program of the other ranks: it writes its
elements into all inboxes, sets a flag there, waits for the flags of all ranks, and reads its own inbox.
Programs don't wait for each other, so one launch does all of it.

The number of a program's step lives on the device, so a captured graph counts on. Its last bit selects
one of two buffers. A rank overwrites a buffer only after the flags of the step between have arrived;
their senders had finished reading by then. A flag holds the number of its step and is never reset.

The wait ends after `max_polls`. `status` then holds TIMED_OUT and the rank whose flag is missing; later
steps poll once, so that nothing hangs. A flag of a later step counts as arrived: its rank has given up.

    W ranks    P programs    an inbox is [2 buffers, W, P, region]; flags are [2 buffers, W, P]
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton

TIMED_OUT = tl.constexpr(1)  # status[0]; status[1] is the rank
FLAG_BYTES = tl.constexpr(4)
# Integers that differ between ranks and calls; one compiled kernel serves all of them.
UNSPECIALIZED = ("offset", "stop", "numel", "part_stride", "rank", "max_polls")


@triton.jit(do_not_specialize=UNSPECIALIZED)
def exchange_kernel(
    x_ptr, out_ptr, peers_ptr, steps_ptr, status_ptr,
    offset, stop, numel, part_stride, rank, max_polls,
    COUNT: tl.constexpr, REGION: tl.constexpr, REGION_BYTES: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr, W: tl.constexpr, W_PADDED: tl.constexpr, BLOCK: tl.constexpr,
    IS_SUM: tl.constexpr,
):  # fmt: skip
    """Elements from `offset` to `stop` of each part; part w begins at w * part_stride.

    A program exchanges COUNT of them; its region has room for REGION.
    """
    program = tl.program_id(0)
    step = tl.load(steps_ptr + program) + 1
    buffer = (step & 1).to(tl.int64)
    SLOTS: tl.constexpr = W * MAX_PROGRAMS
    slot = (buffer * SLOTS + program) * REGION_BYTES
    flags_offset = 2 * SLOTS * REGION_BYTES + (buffer * SLOTS + program) * FLAG_BYTES
    first = tl.zeros([], tl.int64) + offset + program.to(tl.int64) * COUNT
    lane = tl.arange(0, BLOCK)
    for turn in range(W):
        peer = (rank + turn) % W  # ranks don't all write to the same one at once
        inbox = tl.load(peers_ptr + peer) + slot + rank.to(tl.int64) * MAX_PROGRAMS * REGION_BYTES
        target = tl.multiple_of(inbox.to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
        source = x_ptr + peer.to(tl.int64) * part_stride
        for start in range(0, COUNT, BLOCK):
            index = first + start + lane
            value = tl.load(source + index, index < stop)
            tl.store(target + start + lane, value, index < stop)
    tl.debug_barrier()
    peers = tl.arange(0, W_PADDED)
    in_world = peers < W
    addresses = tl.load(peers_ptr + peers, in_world, 0) + flags_offset
    flags = (addresses + rank * MAX_PROGRAMS * FLAG_BYTES).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(flags, step + peers * 0, in_world, sem="release", scope="sys")
    own = tl.load(peers_ptr + rank)
    arrived = (own + flags_offset + peers.to(tl.int64) * MAX_PROGRAMS * FLAG_BYTES).to(
        tl.pointer_type(tl.int32)
    )
    limit = tl.where(tl.load(status_ptr) == 0, max_polls, 1)
    seen = tl.atomic_add(arrived, 0, in_world, sem="acquire", scope="sys")
    missing = tl.sum((in_world & (seen - step < 0)).to(tl.int32), 0)
    polls = 1
    while (missing > 0) & (polls < limit):
        seen = tl.atomic_add(arrived, 0, in_world, sem="acquire", scope="sys")
        missing = tl.sum((in_world & (seen - step < 0)).to(tl.int32), 0)
        polls += 1
    if (missing > 0) & (tl.load(status_ptr) == 0):
        absent = tl.min(tl.where(in_world & (seen - step < 0), peers, W_PADDED), 0)
        tl.store(status_ptr + 1, absent)
        tl.store(status_ptr, TIMED_OUT)
    tl.debug_barrier()
    tl.store(steps_ptr + program, step)
    inbox = tl.multiple_of((own + slot).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    for start in range(0, COUNT, BLOCK):
        index = first + start + lane
        if IS_SUM:
            total = tl.zeros([BLOCK], tl.float32)
            for source_rank in tl.static_range(W):
                part = inbox + source_rank * MAX_PROGRAMS * REGION + start + lane
                total += tl.load(part, index < stop, 0.0, cache_modifier=".cg").to(tl.float32)
            tl.store(out_ptr + index, total.to(out_ptr.dtype.element_ty), index < stop)
        else:
            for source_rank in range(W):
                part = inbox + source_rank * MAX_PROGRAMS * REGION + start + lane
                value = tl.load(part, index < stop, cache_modifier=".cg")
                tl.store(out_ptr + source_rank * numel + index, value, index < stop)
