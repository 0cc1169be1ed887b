# mypy: allow-untyped-defs, allow-incomplete-defs
"""One-sided operations inside Triton kernels: put, signal and wait over a symmetric buffer.

    put           peer's buffer, from byte `offset` on ← `count` elements, written by this program
    signal        peer's flag at byte `offset` ← value, after all earlier writes of this program
    wait_signal   whether the own flag has reached a value; what was written before it is then visible

`peers_ptr` holds the address of each rank's buffer (`SymmetricBuffer.peer_pointers_W`); offsets are
bytes, the same on all ranks. Flags are int32, 4-byte aligned, zero at first. They hold growing numbers,
such as the step, and are never reset; comparisons survive an overflow.

`signal` is a release at system scope, `wait_signal` an acquire. A barrier of the program comes before the
first and after the second, so that the writes and reads of all its threads are ordered. The writes of
*other* programs are not: the last program to finish signals for all (an atomic counter, see
dispatch_send_kernel), or each program has a flag of its own.

`wait_signal` gives up after `max_polls` and returns false. `record_timeout` writes it down for the host.

The kernels below are the host's calls (parallel/symmetric/one_sided.py), one operation each.
"""

from __future__ import annotations

from fulgurite.kernels.common.triton_import import tl, triton

TIMED_OUT = tl.constexpr(1)  # status[0]; status[1] is the rank
UNSPECIALIZED = ("peer", "rank", "source", "offset", "value", "count", "max_polls")


@triton.jit
def put(peers_ptr, peer, offset, source_ptr, count, BLOCK: tl.constexpr):
    """Write `count` elements at source_ptr into a peer's buffer. The offset is aligned to them."""
    address = tl.load(peers_ptr + peer) + offset
    target = address.to(tl.pointer_type(source_ptr.dtype.element_ty))
    for start in range(0, count, BLOCK):
        index = start + tl.arange(0, BLOCK)
        tl.store(target + index, tl.load(source_ptr + index, index < count), index < count)


@triton.jit
def signal(peers_ptr, peer, offset, value):
    """Set a peer's flag; what this program wrote before is visible to whoever sees it."""
    flag = (tl.load(peers_ptr + peer) + offset).to(tl.pointer_type(tl.int32))
    tl.debug_barrier()
    tl.atomic_xchg(flag, value, sem="release", scope="sys")


@triton.jit
def wait_signal(peers_ptr, rank, offset, value, max_polls):
    """Wait until the flag of this rank is `value` or later; false after `max_polls`."""
    flag = (tl.load(peers_ptr + rank) + offset).to(tl.pointer_type(tl.int32))
    missing = value - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    polls = 1
    while (missing > 0) & (polls < max_polls):
        missing = value - tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        polls += 1
    tl.debug_barrier()
    return missing <= 0


@triton.jit
def record_timeout(status_ptr, source):
    """The flag of rank `source` did not arrive."""
    tl.store(status_ptr, TIMED_OUT)
    tl.store(status_ptr + 1, source)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def put_kernel(peers_ptr, source_ptr, peer, offset, count, BLOCK: tl.constexpr):
    """`put` by one program for each BLOCK elements."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    size = tl.minimum(count - start, BLOCK)
    element: tl.constexpr = source_ptr.dtype.element_ty.primitive_bitwidth // 8
    put(peers_ptr, peer, offset + start * element, source_ptr + start, size, BLOCK)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def signal_kernel(peers_ptr, peer, offset, value):
    """`signal`; kernels before it in the stream have finished."""
    signal(peers_ptr, peer, offset, value)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def wait_kernel(peers_ptr, status_ptr, rank, source, offset, value, max_polls):
    """`wait_signal`; kernels after it in the stream see what was put before the signal."""
    if not wait_signal(peers_ptr, rank, offset, value, max_polls):
        record_timeout(status_ptr, source)
