"""Collectives in symmetric memory: the same bits on every rank, whatever the size.

On a GPU the ranks share it. On CPUs the kernels run in Triton's interpreter, between processes that share
memory. Triton chooses it when kernels are imported, so this file then runs in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fulgurite.kernels.common.triton_import import HAS_TRITON
from fulgurite.parallel.processes.launch import RankPool
from tests.forked import run_pytest
from tests.parallel.symmetric import collective_cases as cases

ON_GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="the collectives are Triton kernels"),
    *([pytest.mark.gpu] if ON_GPU else []),
]
# One element, primes, several chunks, nothing at all, and the same size again.
SHAPES = [(1,), (7, 3), (6, 100), (0, 5), (6, 1), (607,), (6, 1)]


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    if not (ON_GPU or INTERPRETED):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1: test_this_file_in_the_interpreter")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
        running = {count: RankPool(count) for count in (2, 3)}
    yield running
    for pool in running.values():
        pool.close()


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="these tests run in this process")
def test_this_file_in_the_interpreter():
    done = run_pytest(__file__, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.output[-5000:]
    assert "7 passed" in done.stdout, done.stdout[-500:]


@pytest.mark.parametrize(
    ("dtype", "count"),
    [(torch.float32, 3), (torch.float32, 2), (torch.bfloat16, 2), (torch.float16, 2)],
    ids=str,
)
def test_sums_in_the_order_of_ranks(pools, dtype, count):
    found = pools[count].run(cases.exchange, count, dtype, SHAPES)
    assert [wrong for wrong, _ in found] == [[]] * count
    assert all(sums == found[0][1] for _, sums in found)


def test_strides_and_integers(pools):
    assert pools[3].run(cases.exchange_strided, 3) == [True] * 3


def test_axis_uses_symmetric_memory_for_small_messages(pools):
    for same, calls in pools[2].run(cases.exchange_through_axis, 2):
        assert all(same) and calls > 8


def test_lost_rank_is_named(pools):
    texts = pools[3].run(cases.lose_a_rank, 3)
    assert all("(2,)" in text and "rank 2 did not answer" in text for text in texts[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3])
def test_captured_graph_counts_on(pools, count):
    assert pools[count].run(cases.replay_graph, count, 40) == [[]] * count
