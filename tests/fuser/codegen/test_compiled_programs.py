"""Kernels of random programs, compiled for a Hopper GPU without one.

Triton's compiler rejects some code that its interpreter runs. More programs:  pytest -m slow
tests/fuser/codegen/test_compiled_programs.py
"""

from __future__ import annotations

import os

import pytest

from fulgurite.fuser.lowering import has_triton
from tests.fuser.codegen.test_triton import compile_ptx, write_graph_sources
from tests.fuser.random_programs import draw_program
from tests.fuser.test_random_programs import trace_program

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.skipif(
        not has_triton() or "TRITON_INTERPRET" in os.environ, reason="needs Triton's compiler"
    ),
]

# Programs that Triton's compiler once rejected: seed → what it rejected.
REJECTED = {
    1389: "the remainder of a byte by a number of another type",
    1473: "the mask of a block over an index into an empty tensor",
    2274: "the same in a variance",
    2492: "an index into an empty tensor",
    3468: "a bool that is a literal",
}


def compile_program(seed: int) -> bool:
    """Compiles the kernels of one program; False where torch or the fuser can't run it."""
    program = draw_program(seed)
    graph = trace_program(program)
    if graph is None:
        return False
    try:
        assert all(compile_ptx(write_graph_sources(graph)))
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\n{program}") from error
    return True


@pytest.mark.parametrize("seed", REJECTED)
def test_programs_that_were_rejected(seed: int) -> None:
    assert compile_program(seed), REJECTED[seed]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(3300, 3700, 50))
def test_random_programs(first: int) -> None:
    assert sum(compile_program(seed) for seed in range(first, first + 50)) > 25
