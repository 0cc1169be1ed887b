"""Decompositions of foreach ops: equal to the op, and no recompilation for a new number."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.capture.foreach import foreach_decompositions

FOREACH = [op for op in foreach_decompositions() if "_foreach_" in op._schema.name]
# these read or return something else than numbers of the same size
SKIPPED = {"_foreach_zero", "_foreach_copy", "_foreach_clone", "_foreach_mm"}


def make_argument(argument, count):
    kind = str(argument.type)
    if kind == "List[Tensor]":
        return [torch.rand(k + 2, 3) * 0.8 + 0.1 for k in range(count)]
    if kind.startswith("List["):
        return [0.5 + k for k in range(count)]
    if kind == "Tensor":
        return torch.tensor(0.75)
    if kind == "Scalar" or kind == "number":
        return 2.0
    return None


@pytest.mark.parametrize("op", FOREACH, ids=lambda op: str(op))
def test_each_foreach_op(op):
    if op._schema.name.removeprefix("aten::") in SKIPPED:
        pytest.skip("not a function of numbers")
    arguments = op._schema.arguments
    given = [make_argument(a, 3) for a in arguments if not a.kwarg_only]
    keywords = {a.name: 1.5 for a in arguments if a.kwarg_only and a.name == "alpha"}
    found = foreach_decompositions()[op](*given, **keywords)
    expected = op(*given, **keywords)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    torch.testing.assert_close(found, list(expected))


def test_the_usual_ops_are_decomposed():
    names = {op._schema.name.removeprefix("aten::_foreach_") for op in FOREACH}
    assert {"add", "mul", "div", "addcmul", "addcdiv", "lerp", "sqrt", "norm", "copy"} <= names


def test_results_and_in_place_forms_in_a_graph():
    def function(tensors, others):
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_add_(tensors, others, alpha=-0.5)
        torch._foreach_clamp_min_(tensors, others)
        torch._foreach_copy_(others, torch._foreach_sqrt(torch._foreach_abs(tensors)))
        torch._foreach_zero_(tensors[1:])
        return torch._foreach_norm(others), torch._foreach_max(others)

    def inputs():
        generator = torch.Generator().manual_seed(0)
        return [[torch.randn(k + 1, 3, generator=generator) for k in range(3)] for _ in range(2)]

    ours, eager = inputs(), inputs()
    compiled = fulgurite.compile(function)
    for _ in range(2):
        torch.testing.assert_close(compiled(*ours), function(*eager))
        torch.testing.assert_close(ours, eager)


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="TorchDynamo specializes on `alpha` before our decomposition"
)
@pytest.mark.parametrize("foreach", [True, False])
def test_a_new_number_does_not_recompile(foreach):
    def function(parameters, gradients, lr):
        if foreach:
            torch._foreach_add_(parameters, gradients, alpha=-lr)
        else:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.add_(gradient, alpha=-lr)

    compiled = fulgurite.compile(function)
    gradients = [torch.randn(3), torch.randn(2, 2)]
    ours, eager = ([torch.ones(3), torch.ones(2, 2)] for _ in range(2))
    for step in range(6):
        compiled(ours, gradients, 0.1 / (step + 1))
        function(eager, gradients, 0.1 / (step + 1))
        torch.testing.assert_close(ours, eager)
    assert len(compiled.session.graphs) == 2  # one for the first number, one for all others


def write_views(x, y, number):
    """Each list has tensors that share memory."""
    torch._foreach_add_([x, x[0]], 1.0)
    torch._foreach_add_([x, x[0]], [y, y[0]], alpha=number)
    torch._foreach_mul_([x, y], [y, x])
    torch._foreach_pow_([x[0], x[:2]], [2.0, 3.0])
    torch._foreach_copy_([x[1], x[2]], [x[2], x[0]])
    torch._foreach_addcmul_([x, x[0]], [y, y[1]], [x, x[2]], torch.tensor([1.0, 2.0]))
    return torch._foreach_add_([x, x[0]], 1.0), torch._foreach_neg_([y, y[0]])[1] * 2


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_tensors_of_a_list_that_share_memory_are_written_in_turn(is_shared, dynamic):
    def inputs():
        x = torch.linspace(0.5, 2, 12).view(4, 3)
        return x, (x[:3] if is_shared else torch.linspace(1, 2, 9).view(3, 3))

    def run(function):
        x, y = inputs()
        return function(x[:3], y, 3), x, y

    compiled = fulgurite.compile(write_views, dynamic=dynamic)
    for _ in range(2):
        torch.testing.assert_close(run(compiled), run(write_views))


WEIGHTS = [0.25, 0.75, 0, torch.tensor(0.25), torch.tensor(0.75, dtype=torch.float64)]


@pytest.mark.covering
@pytest.mark.parametrize("weight", WEIGHTS, ids=lambda weight: str(weight))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lerp_in_place_writes_tensors_that_share_memory_in_turn(dtype, weight):
    """TorchDynamo has its own version of this op, which reads all tensors first."""

    def function(x, y, weight):
        torch._foreach_lerp_([x, y, x[0]], [y, x, y[1]], weight)
        return x + y

    def run(function):
        x, y = (torch.linspace(k, 3, 6).view(2, 3).to(dtype) for k in range(2))
        return function(x, y, weight), x, y

    compiled = fulgurite.compile(function)
    for _ in range(2):
        torch.testing.assert_close(run(compiled), run(function))


def test_lerp_in_place_by_new_numbers_compiles_once_more():
    compiled = fulgurite.compile(lambda x, y, weight: torch._foreach_lerp_([x], [y], weight)[0] * 2)
    for weight in (0.1, 0.6, -0.3, 0.9):
        x, y = torch.arange(5.0), torch.ones(5)
        result = compiled(x, y, weight)
        torch.testing.assert_close(x, torch.arange(5.0).lerp(y, weight))
        torch.testing.assert_close(result, x * 2)
    assert len(compiled.session.graphs) == 2
