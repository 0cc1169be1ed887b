"""Kernels of random programs in machine code for a Hopper GPU, which needs no GPU: Triton's compiler refuses what its interpreter runs.

More of them:  pytest -m slow tests/fuser/test_compiled_programs.py
"""

from __future__ import annotations

import os

import pytest

from fulgurite.fuser.pipeline_triton import installed
from tests.fuser.programs import draw_program
from tests.fuser.test_programs import traced
from tests.fuser.test_triton import compiled, graph_stages

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        not installed() or "TRITON_INTERPRET" in os.environ, reason="no Triton that compiles"
    ),
]

REFUSED = {
    1389: "remainders of bytes by a number of another type",
    1473: "a mask of a block over a place in nothing",
    2274: "the same, of a variance",
    2492: "a position in nothing",
    3468: "a truth value that is a literal",
}


def compile_all(seed: int) -> bool:
    """Compiles the kernels of one program; False where torch or the fuser refuses it."""
    program = draw_program(seed)
    graph = traced(program)
    if graph is None:
        return False
    try:
        assert all(compiled(graph_stages(graph)))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\n{program}") from error
    return True


@pytest.mark.parametrize("seed", REFUSED)
def test_what_was_refused(seed: int) -> None:
    assert compile_all(seed), REFUSED[seed]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3300, 3700, 50))
def test_many(first: int) -> None:
    assert sum(compile_all(seed) for seed in range(first, first + 50)) > 25
