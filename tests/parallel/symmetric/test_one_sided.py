"""Put, signal and wait: between processes, from the host and inside kernels; in one process.

On CPUs the kernels run in Triton's interpreter, between processes that share memory. On a GPU the ranks
share it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from fulgurite.errors import ArgumentError, RankError
from fulgurite.kernels.common.triton_import import HAS_TRITON
from fulgurite.parallel import Axis
from fulgurite.parallel.processes.launch import RankPool
from fulgurite.parallel.symmetric.memory import BACKENDS, allocate_local_buffers, choose_backend
from fulgurite.parallel.symmetric.one_sided import OneSidedMemory, count_signal_bytes
from tests.parallel.symmetric import one_sided_cases as cases

ON_GPU = torch.cuda.is_available()
on_a_shared_gpu = pytest.mark.gpu if ON_GPU else lambda test: test  # otherwise on CPUs


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Three ranks; on a GPU they share it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        running = RankPool(3)
    yield running
    running.close()


@on_a_shared_gpu
def test_a_ring_of_puts_and_signals(pool):
    assert pool.run(cases.ring, 3, 40) == [[]] * 3


@on_a_shared_gpu
def test_a_missing_signal_names_its_rank(pool):
    *waiting, silent = pool.run(cases.give_up, 3)
    assert silent == ""
    for text in waiting:
        assert text.startswith("(2,) rank 2 did not answer: its signal")


@pytest.mark.gpu
def test_exchange_inside_a_kernel(pool):
    assert pool.run(cases.exchange_in_kernel, 3, 20) == [[True] * 20] * 3


@pytest.mark.skipif(not HAS_TRITON or ON_GPU, reason="runs in Triton's interpreter")
def test_exchange_inside_an_interpreted_kernel():
    """A process of its own: Triton decides when it is imported whether it interprets."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "tests.parallel.symmetric.one_sided_cases"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith(str([[True] * 5] * 3)), done.stdout[-3000:]


def local_memories(count: int, num_bytes: int, channels: int = 1) -> list[OneSidedMemory]:
    total = num_bytes + count_signal_bytes(count, channels)
    axes = [Axis("expert", tuple(range(count)), rank) for rank in range(count)]
    return [
        OneSidedMemory(axis, buffer, BACKENDS["local"], channels, max_polls=3)
        for axis, buffer in zip(axes, allocate_local_buffers(count, total, "cpu"), strict=True)
    ]


def test_ranks_in_one_process():
    first, second = local_memories(2, 64, channels=2)
    first.put(torch.tensor([1.5, -2.0]), rank=1, offset=8)
    first.signal(rank=1, value=3, channel=1)
    second.wait(rank=0, value=2, channel=1)  # 3 is later than 2
    second.wait(rank=0, value=3, channel=1)
    assert second.data[8:16].view(torch.float32).tolist() == [1.5, -2.0]
    assert not first.data.any()
    with pytest.raises(RankError, match="rank 0 did not answer: its signal 4 never arrived"):
        second.wait(rank=0, value=4, channel=1)
    with pytest.raises(RankError, match="rank 0 did not answer"):
        second.wait(rank=0, value=1, channel=0)  # the other channel has no signal


def test_signals_go_on_after_an_overflow():
    first, second = local_memories(2, 16)
    first.signal(1, 2**31 - 1)
    second.wait(0, 2**31 - 1)
    first.signal(1, -(2**31))  # the next number
    second.wait(0, -(2**31))
    second.wait(0, 2**31 - 1)


def test_puts_outside_of_the_memory_are_refused():
    memory = local_memories(2, 32)[0]
    memory.put(torch.zeros(8), rank=1)
    memory.put(torch.zeros(0), rank=1, offset=32)
    for offset, size in ((4, 8), (-1, 1), (33, 0)):
        with pytest.raises(ArgumentError, match="are not in a memory of 32"):
            memory.put(torch.zeros(size), rank=1, offset=offset)
    for call in (lambda: memory.put(torch.zeros(1), rank=2), lambda: memory.signal(0, 1, 1)):
        with pytest.raises(ArgumentError, match="2 ranks, 1 channels"):
            call()


def test_an_axis_without_shared_memory_says_why():
    axis = Axis("expert", (0,), 0)
    assert choose_backend(axis, torch.device("cpu")).name == "local"
    assert "needs CUDA" in BACKENDS["torch"].unavailable_reason(axis, torch.device("cpu"))
    apart = Axis("expert", (0, 1), 0, nodes=(0, 1))
    reason = BACKENDS["torch"].unavailable_reason(apart, torch.device("cuda"))
    assert reason == "ranks on other nodes have memory of their own"
