"""Training graphs in native code: no Python of ours in a step, nothing leaks, errors are eager's."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite
from fulgurite.capture import training, training_native
from fulgurite.host_api import unavailable_reason
from tests.python_frames import find_python_frames

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no host programs here")


def gate(x: Tensor, weight: Tensor) -> Tensor:
    return F.silu(x @ weight) * x.sum(-1, keepdim=True)


def make_inputs(*sizes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*(sizes or (3, 8)), generator=generator).requires_grad_()
    return x, torch.randn(8, 8, generator=generator).requires_grad_()


def compile_warm(function: Callable[..., Any], *inputs: Tensor) -> Callable[..., Any]:
    compiled = fulgurite.compile(function)
    for _ in range(3):
        result = compiled(*inputs)
        torch.autograd.grad(result, inputs, torch.ones_like(result))
    return compiled


def test_a_step_runs_no_python_of_ours_but_the_entry() -> None:
    inputs = make_inputs()
    compiled = compile_warm(gate, *inputs)
    gradient = torch.ones(3, 8)

    def step() -> None:
        torch.autograd.grad(compiled(*inputs), inputs, gradient)

    assert find_python_frames(step) <= {"__call__", "is_capturing"}


@pytest.mark.parametrize("is_native", [True, False])
def test_python_and_native_code_do_the_same(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(training, "load_library", lambda: None)
        monkeypatch.setattr(training_native, "load_library", lambda: None)
    inputs = make_inputs()
    compiled = compile_warm(gate, *inputs)
    gradient = torch.randn(8, 3).T  # another layout than the graph was traced with
    expected = torch.autograd.grad(gate(*inputs), inputs, gradient)
    result = compiled(*inputs)
    assert is_native == ("run_training_backward" in str(type(result.grad_fn).apply))
    found = torch.autograd.grad(result, inputs, gradient, retain_graph=True)
    again = torch.autograd.grad(result, inputs, gradient, create_graph=True)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected)
    (second,) = torch.autograd.grad(again[0].sum(), inputs[1])
    x, weight = inputs
    (first,) = torch.autograd.grad(gate(x, weight), x, gradient, create_graph=True)
    torch.testing.assert_close(second, torch.autograd.grad(first.sum(), weight)[0])


def test_nothing_leaks_over_many_steps() -> None:
    inputs = make_inputs()
    compiled = compile_warm(gate, *inputs)
    gradient = torch.ones(3, 8)

    def run(steps: int) -> tuple[list[int], int]:
        for _ in range(steps):
            torch.autograd.grad(compiled(*inputs), inputs, gradient)
            compiled(*inputs)  # its backward never runs
            held = compiled(*inputs)
            torch.autograd.grad(held, inputs, gradient, retain_graph=True)
            torch.autograd.grad(held, inputs, gradient)
            with pytest.raises(RuntimeError, match="second time"):
                torch.autograd.grad(held, inputs, gradient)
            del held
        gc.collect()
        return [sys.getrefcount(value) for value in (*inputs, gradient)], len(gc.get_objects())

    references, objects = run(5)
    later, more = run(50)
    assert later == references
    assert more - objects < 20


def test_a_failed_backward_leaks_nothing() -> None:
    x, weight = make_inputs()
    compiled = compile_warm(gate, x, weight)

    def run(steps: int) -> list[int]:
        for _ in range(steps):
            result = compiled(x, weight)
            with torch.no_grad():
                weight.add_(0)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.sum().backward()
            del result
        gc.collect()
        return [sys.getrefcount(value) for value in (x, weight)]

    references = run(3)
    assert run(30) == references


def test_a_result_that_is_a_reshaped_product_may_be_modified() -> None:
    """AOTAutograd calls it an unsafe view: the product itself is not seen by anybody."""

    def project(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    inputs = make_inputs(2, 3, 8)
    compiled = compile_warm(project, *inputs)
    result = compiled(*inputs)
    assert not result._is_view()
    assert result._version == 0
    result.mul_(2)
    assert result._version == 1
    expected = torch.autograd.grad(project(*inputs).mul_(2).sum(), inputs)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), inputs), expected)


@pytest.mark.filterwarnings("ignore:Anomaly Detection", "ignore:Error detected in")
def test_anomaly_mode_finds_a_nan_in_the_backward() -> None:
    def root(x: Tensor) -> Tensor:
        return (x * 0).sqrt() * 0

    x = torch.ones(4, requires_grad=True)
    compiled = compile_warm(root, x)
    with (
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="CompiledFunctionBackward.* nan"),
    ):
        compiled(x).sum().backward()


def test_inputs_that_are_no_tensors_are_kept_for_double_backward() -> None:
    def scale(x: Tensor, size: int) -> Tensor:
        return (x * x * size).sum()

    compiled = fulgurite.compile(scale, dynamic=True)
    x = torch.randn(5, requires_grad=True)
    for size in (3, 4, 5, 6):
        (first,) = torch.autograd.grad(compiled(x, size), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        torch.testing.assert_close(second, torch.full_like(x, 2.0 * size))
