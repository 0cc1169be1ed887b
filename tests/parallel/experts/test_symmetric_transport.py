"""The symmetric transport between processes: on CPUs in Triton's interpreter, on a GPU that they share.

Equal to all experts on one rank, whose inputs are rounded as the wire format rounds them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from fulgurite.kernels.common.triton_import import HAS_TRITON
from fulgurite.parallel import Placement
from fulgurite.parallel.processes.launch import RankPool
from fulgurite.parallel.symmetric.memory import SHARED_GPU_ENV
from fulgurite.serve.llm import LLM
from tests.forked import run_pytest
from tests.parallel.engine_cases import PLAIN
from tests.parallel.experts import transport_cases as cases
from tests.parallel.test_engine import folder, greedy, prompts

__all__ = ["folder"]  # a fixture
ON_GPU, INTERPRETED = torch.cuda.is_available(), os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
TWO, FOUR = (2, 1, 2), (4, 1, 4)
UNEVEN = (5, 0, 3, 17)
STEPS = {
    "capacity": {},
    "known size": {"step_tokens": 17},
    "chunks": {"step_tokens": 17, "chunk_rows": 7},
    "micro-batches": {"step_tokens": 17, "micro_batches": 2},
}


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable[[int], RankPool]]:
    """`pools(2)`: two processes, started when first asked for."""
    if not (ON_GPU or INTERPRETED):
        pytest.skip("needs a GPU, or TRITON_INTERPRET=1: test_this_file_in_the_interpreter")
    before = os.environ.get(SHARED_GPU_ENV)
    os.environ[SHARED_GPU_ENV] = "1"
    running: dict[int, RankPool] = {}

    def get(count: int) -> RankPool:
        if count not in running or not running[count].is_alive:
            running[count] = RankPool(count)
        return running[count]

    yield get
    for pool in running.values():
        pool.close()
    if before is None:
        del os.environ[SHARED_GPU_ENV]
    else:
        os.environ[SHARED_GPU_ENV] = before


@pytest.mark.skipif(not HAS_TRITON, reason="the transport is Triton kernels")
@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="these tests run in this process")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_this_file_in_the_interpreter(marks):
    """Triton reads the environment when it is imported, so it takes a process of its own."""
    result = run_pytest("-x", "-m", marks, __file__, TRITON_INTERPRET="1")
    assert result.returncode == 0, result.output[-3000:]


def call(function, arguments, options):
    return function(*arguments, **options)


def check(pool: RankPool, *arguments, **options) -> None:
    options["transport"] = "symmetric"
    for error in pool.run(call, cases.compare_to_one_rank, arguments, options):
        assert error < 1e-5


@pytest.mark.parametrize("wire", ["f32", "bf16", "fp8", "nvfp4"])
def test_every_wire_format(pools, wire):
    check(pools(2), TWO, (5, 3, 0), wire=wire)


def test_odd_steps(pools):
    check(pools(2), TWO, (0,))
    check(pools(2), TWO, (6, 0), only=5, per_token=1)
    check(pools(2), TWO, (4, 3), count=4, per_token=4)
    placement = Placement(torch.tensor([[0, 1, 2, 3, 4, 0]]), num_experts=5, num_ranks=2)
    check(pools(2), TWO, (4, 3), count=5, per_token=2, placement=placement)


@pytest.mark.slow  # four ranks in the interpreter on two cores
def test_four_ranks(pools):
    check(pools(4), FOUR, UNEVEN)
    check(pools(4), FOUR, UNEVEN, step_tokens=17, wire="fp8")


@pytest.mark.skipif(not ON_GPU, reason="CPUs multiply dense rows")
@pytest.mark.parametrize("tokens", [5, 64, 512])
def test_fp8_rows_stay_in_fp8_up_to_the_experts(pools, tokens):
    for error, stayed in pools(2).run(cases.compare_fp8, TWO, "symmetric", tokens):
        assert error < 10 * 2**-8 and stayed


def test_the_size_of_a_step_changes_no_bit(pools):
    arguments = TWO, (5, 17), list(STEPS.values())
    found = pools(2).run(call, cases.run_variants, arguments, {"transport": "symmetric"})
    for rank, outputs in enumerate(found):
        for name, out in zip(STEPS, outputs, strict=True):
            assert torch.equal(out, outputs[0]), f"rank {rank}: {name}"


def test_exceeded_capacity_raises_on_every_rank(pools):
    """All five tokens of both ranks go to rank 1."""
    for text, after in pools(2).run(cases.find_error, TWO, "symmetric", 4, None, 5):
        assert text.startswith("CapacityError: rank"), text
        assert "had more than 4 rows for one rank" in text
        assert after < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"wire": "f32", "micro_batches": 2},
        pytest.param({"wire": "auto"}, marks=pytest.mark.slow),  # the interpreter takes seconds
    ],
    ids=str,
)
def test_engine_gives_the_tokens_of_one_rank(pools, folder, options):
    """A few tokens: each launch of a kernel in the interpreter takes milliseconds."""
    path, params = folder("qwen3_moe"), greedy()[:2]
    limits = {"max_batched_tokens": 8, "max_sequences": 2}  # a GPU's bits depend on the batch
    options |= {"transport": "symmetric"} | limits
    found = pools(2).run(cases.generate, path, TWO, prompts()[:2], params, options)
    llm = LLM(path, **PLAIN | limits)
    assert found[0][0] == [one.token_ids for one in llm.generate(prompts()[:2], params)]
    for _, name, reason in found:
        assert name == "SymmetricMemoryDispatcher" and reason == "as asked"
