"""The functions that ranks run in test_one_sided.py."""

from __future__ import annotations

import torch

from fulgurite.errors import RankError
from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton
from fulgurite.parallel.processes.launch import launch
from fulgurite.parallel.symmetric.one_sided import (
    OneSidedMemory,
    put,
    record_timeout,
    signal,
    wait_signal,
)
from tests.parallel.model_cases import mesh_of

SIZES = (5, 16, 1, 1031, 0)  # of int32, and as many bytes
ARRIVED, READ = 0, 1  # channels


def ring(count: int, steps: int) -> list[str]:
    """Each rank puts a tensor into the next one's memory, step by step; what went wrong."""
    mesh = mesh_of((count, 1, count))
    axis = mesh.expert
    before, after = (axis.index - 1) % count, (axis.index + 1) % count
    memory = OneSidedMemory.create(axis, 8192, mesh.device, channels=2)
    wrong = []
    for step in range(1, steps + 1):
        size = SIZES[step % len(SIZES)]
        dtype = (torch.int32, torch.uint8)[step % 2]
        x = (torch.arange(size) + 7 * axis.index + step).to(mesh.device, dtype)
        if step > 1:
            memory.wait(after, step - 1, READ)
        memory.put(x, after, offset=16 * (step % 3))
        memory.signal(after, step, ARRIVED)
        memory.wait(before, step, ARRIVED)
        start = 16 * (step % 3)
        found = memory.data[start : start + x.nbytes].clone().view(dtype)
        wanted = (torch.arange(size) + 7 * before + step).to(mesh.device, dtype)
        memory.signal(before, step, READ)
        if not torch.equal(found, wanted):
            wrong.append(f"step {step}: {found} instead of {wanted}")
    memory.check()
    torch.distributed.barrier()
    return wrong


def give_up(count: int) -> str:
    """The last rank never signals; what the others learn."""
    mesh = mesh_of((count, 1, count))
    axis = mesh.expert
    memory = OneSidedMemory.create(axis, 16, mesh.device)
    memory.max_polls = 2000
    text = ""
    if axis.index != count - 1:
        try:
            memory.wait(count - 1, 1)
            memory.check()
        except RankError as error:
            text = f"{error.ranks} {error}"
    torch.distributed.barrier()
    return text


@triton.jit(do_not_specialize=("rank", "step", "max_polls"))
def exchange_kernel(
    peers_ptr, x_ptr, out_ptr, status_ptr, rank, step, max_polls, flags,
    W: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[p] = the row of rank p for this rank; program p exchanges with rank p."""
    peer = tl.program_id(0)
    put(peers_ptr, peer, rank * COUNT * 4, x_ptr + peer * COUNT, COUNT, BLOCK)
    signal(peers_ptr, peer, flags + rank * 4, step)
    if not wait_signal(peers_ptr, rank, flags + peer * 4, step, max_polls):
        record_timeout(status_ptr, peer)
    inbox = (tl.load(peers_ptr + rank) + peer * COUNT * 4).to(tl.pointer_type(tl.int32))
    for start in range(0, COUNT, BLOCK):
        index = start + tl.arange(0, BLOCK)
        value = tl.load(inbox + index, index < COUNT)
        tl.store(out_ptr + peer * COUNT + index, value, index < COUNT)


def exchange_in_kernel(count: int, steps: int) -> list[bool]:
    """All ranks exchange rows inside one kernel, again and again in the same memory."""
    mesh = mesh_of((count, 1, count))
    axis, columns = mesh.expert, 37
    assert mesh.device.type == "cuda" or INTERPRETED
    memory = OneSidedMemory.create(axis, count * columns * 4, mesh.device)
    wide = torch.int32
    right = []
    for step in range(1, steps + 1):
        x_WC = torch.arange(count * columns, dtype=wide, device=mesh.device).view(count, columns)
        out_WC = torch.empty_like(x_WC)
        exchange_kernel[(count,)](
            memory.buffer.peer_pointers_W, x_WC + 1000 * axis.index + step, out_WC, memory.status,
            axis.index, step, 1 << 20, memory.signal_offset(0), W=count, COUNT=columns, BLOCK=16,
        )  # fmt: skip
        source_W1 = 1000 * torch.arange(count, dtype=wide, device=mesh.device)[:, None]
        right.append(torch.equal(out_WC, x_WC[axis.index] + source_W1 + step))
        memory.check()
        torch.distributed.barrier()  # the memory is free again
    return right


if __name__ == "__main__":
    from tests.parallel.symmetric.one_sided_cases import (
        exchange_in_kernel as by_name,  # ranks import it
    )

    print(launch(by_name, 3, 3, 5))
