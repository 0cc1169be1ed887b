"""Compile before and after DDP, FSDP, FSDP2, tensor parallelism and activation checkpointing.

Losses, gradients, parameters and names must be those of the same wrapper without compile, and every unit
must be compiled, without graph breaks.
"""

from __future__ import annotations

import pytest

from tests.parallel import wrapper_cases as cases
from tests.parallel.test_tensor import config_of

SLOW = (  # variants of the others
    *("compile(DDP), outer graph", "compile(FSDP2 of linears)", "FSDP2(compile of each layer)"),
    *("compile(FSDP)", "tensor parallel(compile)", "compile(tensor parallel), layers"),
    *("checkpoint inside, layers", "compile(checkpoint_wrapper), layers"),
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in cases.CASES],
)
def test_training_under_a_wrapper(ranks_with_groups, name):
    for graphs, units, breaks in ranks_with_groups(2).run(cases.compare, name):
        assert all(graphs), "something is not compiled"
        assert tuple(units) == cases.CASES[name].units
        assert not breaks


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_gradient_accumulation_without_synchronization(ranks_with_groups, kind):
    assert all(ranks_with_groups(2).run(cases.check_gradient_accumulation, kind))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("llama", (1, 2, 1)), pytest.param("mixtral", (2, 1, 2), marks=pytest.mark.slow)],
)
def test_models_on_our_own_mesh(ranks_with_groups, name, shape):
    assert all(
        ranks_with_groups(2).run(
            cases.check_parallelized, config_of(name, num_hidden_layers=2), shape
        )
    )


@pytest.mark.covering
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", cases.FUNCTIONS)
def test_functions_of_dtensors(ranks_with_groups, function, grad):
    if grad and function is cases.write:
        pytest.skip("a leaf that needs a gradient can't be written")
    assert all(ranks_with_groups(2).run(cases.check_dtensors, function, grad))
