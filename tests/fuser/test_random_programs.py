"""Random programs through the fuser, against eager and float64; exact values bit for bit.

More of them:  pytest -m slow tests/fuser/test_random_programs.py
"""

from __future__ import annotations

import pytest
import torch

from fulgurite import fuser
from tests.fuser import support
from tests.fuser.random_programs import RandomProgram, as_real, draw_program, is_same, move_program

RUNS_ON_TRITON = True

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def check_program(got: tuple, program: RandomProgram) -> None:
    for ours, name in zip(got, program.outputs, strict=True):
        theirs = program.eager[name]
        support.check_layout(ours, theirs)
        if program.exact[name]:
            assert is_same(ours, theirs), f"{name}: {ours} instead of exactly {theirs}"
        else:
            coarse = program.coarsest[name]  # results may differ by its ulp
            near = as_real(ours).to(coarse), as_real(theirs).to(coarse)
            support.check_close(*near, as_real(program.wide[name]), slack=16.0)


def trace_program(program: RandomProgram) -> torch.fx.GraphModule | None:
    """Traces a program; None if torch traces another program or the fuser can't take an op."""
    arguments = list(program.inputs.values())
    try:
        graph = support.trace(program.function(), arguments)
        # A traced program may fail or return other strides, and its metadata may have still others.
        check_program(graph(*arguments), program)
        (results,) = graph.graph.output_node().args
        for result, name in zip(results, program.outputs, strict=True):
            support.check_layout(result.meta["val"], program.eager[name])
    except (RuntimeError, AssertionError, NameError, TypeError):
        return None
    nodes = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output")]
    claimed = all(node.op == "call_function" and fuser.can_fuse(node) for node in nodes)
    return graph if claimed else None


# Seeds that Triton kernels can't match: the rounded mean makes the deviation of equal numbers
# nonzero.
ROUNDED_MEANS = {2777, 2811}


def run_seed(seed: int) -> bool:
    """Checks one program on the target. Returns False if there is nothing to compare."""
    if support.TARGET != "cpp" and seed in ROUNDED_MEANS:
        return False
    drawn = draw_program(seed)
    with support.target_device():
        program = move_program(drawn, support.to_gpu) if support.TARGET == "cuda" else drawn
        graph = trace_program(program) if program is not None else None
        if program is None or graph is None:
            return False
        try:
            region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
            check_program(region(*program.inputs.values()), program)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n{program}") from error
    return True


def test_some_programs() -> None:
    assert sum(run_seed(seed) for seed in range(24)) > 12


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 3000, 100))
def test_many_programs(first: int) -> None:
    assert sum(run_seed(seed) for seed in range(first, first + 100)) > 50


def test_programs_are_reproducible() -> None:
    """A seed always gives the same program, and its text is what was run."""
    for seed in range(8):
        program, again = draw_program(seed), draw_program(seed)
        assert str(program) == str(again)
        results = program.function()(*program.inputs.values())
        for name, value in zip(program.outputs, results, strict=True):
            assert is_same(value, program.eager[name]) and isinstance(value, torch.Tensor)
