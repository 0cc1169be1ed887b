"""Replays in native code: no Python of ours, the results of Python's replays, no leaks, locks released."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fulgurite
from fulgurite.cudagraph import CaptureMemory, GraphedFunction, GraphInterface
from fulgurite.cudagraph.replay import ReplayableCall
from fulgurite.host_api import unavailable_reason
from tests.python_frames import find_python_frames

from .fake import FakeCapturedCall, make_fake_backend, use_fake_captures

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no host programs here")

CPU = torch.device("cpu")


def make(
    run: Callable[..., Any],
    *modes: str,
    mutated: tuple[int, ...] = (),
    dynamic: tuple[int, ...] = (),
) -> GraphedFunction:
    def boxed(inputs: list[Any]) -> list[Any]:
        return list(run(*inputs))

    interface = GraphInterface(modes, CPU, mutated, dynamic)  # type: ignore[arg-type]
    return GraphedFunction(
        "graph_0", boxed, interface, CaptureMemory(make_fake_backend()), forced=True
    )


def mutate(x: Tensor, w: Tensor) -> list[Any]:
    x.add_(1)
    return [x * w]


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[str, ...], tuple[int, ...]]] = {
    "copied": (lambda x, w: [x * w], ("copied",), ()),
    "shared": (lambda x, w: [x * w], ("shared",), ()),
    "transposed": (lambda x, w: [(x * w).t()], ("copied",), ()),
    "a slice": (lambda x, w: [(x * w)[:, 1:]], ("copied",), ()),
    "an input": (lambda x, w: [w, x * w, x], ("copied",) * 3, ()),
    "a view of an input": (lambda x, w: [w[1:], x * w], ("copied",) * 2, ()),
    "four results": (lambda x, w: [x * w, x + w, x - w, w - x], ("copied",) * 4, ()),
    "constants": (lambda x, w: [None, x * w, 3], ("copied", "shared", "copied"), ()),
    "no elements": (lambda x, w: [(x * w)[:0]], ("copied",), ()),
    "written": (mutate, ("copied",), (0,)),
}


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("moves", [True, False])
def test_results_are_those_of_the_function(
    name: str, moves: bool, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, modes, mutated = PROGRAMS[name]
    if not is_native:
        monkeypatch.setattr("fulgurite.cudagraph.native_replay.load_library", lambda: None)
    graphed = make(run, *modes, mutated=mutated)
    w, fixed, held = torch.randn(3, 4), torch.empty(3, 4), []
    for step in range(24):
        x = torch.full((3, 4), float(step)) if moves else fixed.fill_(step)
        held.append(x)  # so that addresses differ
        expected_x = x.clone()
        expected = run(expected_x, w)
        results = graphed([x, w])
        assert torch.equal(x, expected_x)
        assert len(results) == len(expected)
        for found, right in zip(results, expected, strict=True):
            if not isinstance(right, Tensor):
                assert found == right
                continue
            assert found.shape == right.shape and found.stride() == right.stride()
            torch.testing.assert_close(found, right, rtol=0, atol=0)
            if right is expected_x or right is w:
                assert found is (x if right is expected_x else w)
    assert graphed.replays >= 20, str(graphed)


@pytest.fixture
def null_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake replay is Python, a graph's is not."""
    monkeypatch.setattr(FakeCapturedCall, "replay", lambda self: None)


@pytest.mark.usefixtures("null_replays")
def test_a_replay_runs_no_python_of_ours() -> None:
    graphed, x, w = (
        make(lambda x, w: [x * w, x + w], "copied", "shared"),
        torch.ones(3),
        torch.ones(3),
    )
    run = graphed.make_callable()
    for _ in range(6):
        run([x, w])
    assert find_python_frames(lambda: run([x, w])) == set()
    assert "_find_and_run" in find_python_frames(lambda: run([x.clone(), w]))


def test_sizes_that_change_are_replayed_natively() -> None:
    graphed = make(lambda n, x: [x[: n - 1] * n], "copied", dynamic=(0, 1))
    run = graphed.make_callable()
    inputs = [(n, torch.randn(size)) for n, size in [(3, 4), (3, 6), (5, 6)]]
    inputs.append((3, torch.randn(2, 6)[:, 0].expand(2)))
    inputs.append((3, torch.randn(12)[::2]))  # the sizes of another, and other strides
    for _ in range(8):
        for n, x in inputs:
            torch.testing.assert_close(run([n, x])[0], x[: n - 1] * n, rtol=0, atol=0)
    assert graphed.captures == len(inputs) and graphed.replays == 6 * len(inputs)
    slow: set[str] = set()
    for n, x in inputs:
        slow |= find_python_frames(lambda n=n, x=x: run([n, x]))  # type: ignore[misc]
    assert "_find_and_run" not in slow


@pytest.mark.parametrize("value", [2.5, True, 1 << 70, None])
def test_inputs_that_native_code_can_not_compare(value: Any) -> None:
    graphed, x = make(lambda v, x: [x + 1], "copied", dynamic=(0,)), torch.zeros(2)
    for _ in range(6):
        assert graphed([value, x])[0].tolist() == [1.0, 1.0]
    assert graphed.replays == 4


@pytest.mark.usefixtures("null_replays")
def test_a_training_step_runs_no_python_of_ours_but_the_entry() -> None:
    def program(x: Tensor, weight: Tensor) -> Tensor:
        return F.silu(x @ weight) * x.sum(-1, keepdim=True)

    x, weight = torch.randn(3, 8).requires_grad_(), torch.randn(8, 8).requires_grad_()
    gradient = torch.ones(3, 8)
    with use_fake_captures():
        compiled = fulgurite.compile(program, cudagraph=True)

        def step() -> Any:
            return torch.autograd.grad(compiled(x, weight), (x, weight), gradient)

        for _ in range(12):
            found = step()
            del found  # else the next step finds them held
        assert find_python_frames(step) <= {"__call__", "is_capturing", "program"}
    assert compiled.session.compiled_graph(-1, "backward").graphed.replays > 3


def make_captured_step() -> tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, Tensor]]:
    """A program and its compiled form, whose forward and backward are replayed. Inside `use_fake_captures`."""

    def program(x: Tensor, weight: Tensor) -> Tensor:
        return torch.sin(x @ weight) * x

    compiled = fulgurite.compile(program, cudagraph=True)
    x, weight = torch.randn(4, 4).requires_grad_(), torch.randn(4, 4).requires_grad_()
    for _ in range(10):
        gradients = torch.autograd.grad(compiled(x, weight).sum(), (x, weight))
        del gradients
    return program, compiled, (x, weight)


def count_replays(compiled: Any) -> int:
    return sum(
        compiled.session.compiled_graph(-1, k).graphed.replays for k in ("forward", "backward")
    )


def test_backward_of_a_captured_step_runs_twice() -> None:
    with use_fake_captures():
        program, compiled, inputs = make_captured_step()
        before = count_replays(compiled)
        out = compiled(*inputs).sum()
        first = [g.clone() for g in torch.autograd.grad(out, inputs, retain_graph=True)]
        second = torch.autograd.grad(out, inputs)
        assert count_replays(compiled) == before + 3
        for expected, one, two in zip(
            torch.autograd.grad(program(*inputs).sum(), inputs), first, second, strict=True
        ):
            torch.testing.assert_close(one, expected)
            torch.testing.assert_close(two, expected)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, inputs)


def test_an_input_that_was_modified_in_place_is_an_error() -> None:
    with use_fake_captures():
        _, compiled, inputs = make_captured_step()
        out = compiled(*inputs).sum()
        with torch.no_grad():
            inputs[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, inputs)


def test_hooks_of_tensors_and_nodes_see_gradients_of_a_captured_step() -> None:
    with use_fake_captures():
        program, compiled, inputs = make_captured_step()
        found: dict[str, list[Tensor]] = {}
        for name, function in (("eager", program), ("compiled", compiled)):
            seen = found.setdefault(name, [])
            out = function(*inputs)
            out.register_hook(lambda g, seen=seen: seen.append(g.clone()) or g * 2)
            handle = inputs[0].register_hook(lambda g, seen=seen: seen.append(g.clone()))
            out.sum().backward()
            handle.remove()
            seen += [tensor.grad.clone() for tensor in inputs if tensor.grad is not None]
            for tensor in inputs:
                tensor.grad = None
        for expected, value in zip(found["eager"], found["compiled"], strict=True):
            torch.testing.assert_close(value, expected)


def test_double_backward_of_a_captured_step() -> None:
    with use_fake_captures():
        program, compiled, inputs = make_captured_step()
        results = []
        for function in (program, compiled):
            (gradient,) = torch.autograd.grad(function(*inputs).sum(), inputs[0], create_graph=True)
            results.append(torch.autograd.grad(gradient.square().sum(), inputs))
        for expected, value in zip(*results, strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-4, atol=1e-5)


def test_held_results_are_not_overwritten_and_released_ones_are_reused() -> None:
    graphed, x = make(lambda x: [x + 1], "shared"), torch.zeros(2)
    run, held = graphed.make_callable(), []
    for step in range(12):
        x.fill_(step)
        held.append(run([x])[0])
        if step >= 4:
            held.pop(0)
        assert [int(one[0]) for one in held] == [
            k + 1 for k in range(step + 1 - len(held), step + 1)
        ]
    held.clear()
    before = graphed.replays
    for _ in range(4):
        run([x])
    assert graphed.replays == before + 4


def test_an_error_of_a_replay_is_raised_and_releases_the_lock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphed, x = make(lambda x: [x + 1], "copied"), torch.zeros(2)
    run = graphed.make_callable()
    for _ in range(5):
        run([x])

    def fail() -> None:
        raise KeyboardInterrupt

    (state,) = graphed._states.values()
    (call,) = state.calls()
    working = call._replay
    call._replay, call.plan = fail, None
    call.plan = call.make_plan([x])
    with pytest.raises(KeyboardInterrupt):
        run([x])
    assert not graphed.memory.lock.locked()
    call._replay = working
    call.plan = call.make_plan([x])
    before = graphed.replays
    assert run([x])[0].tolist() == [1.0, 1.0] and graphed.replays == before + 1


def test_nothing_is_kept_alive() -> None:
    graphed, w = make(lambda x, w: [x * w, x + w, w], "copied", "shared", "copied"), torch.ones(3)
    run = graphed.make_callable()
    x = torch.ones(3)
    for _ in range(8):
        run([x, w])
    before = sys.getrefcount(w)
    for _ in range(50):
        run([x, w])
    assert sys.getrefcount(w) == before
    gone = weakref.ref(x)
    del x
    assert gone() is None
    (state,) = graphed._states.values()
    call, alive = weakref.ref(next(state.calls())), weakref.ref(graphed)
    gc.disable()
    try:
        del graphed, run, state
        assert alive() is None and call() is None, (
            "captures are freed without the garbage collector"
        )
    finally:
        gc.enable()


def test_a_capture_that_is_dropped_is_not_replayed() -> None:
    graphed, x = make(lambda x: [x + 1], "copied"), torch.zeros(2)
    run = graphed.make_callable()
    for _ in range(5):
        run([x])
    (state,) = graphed._states.values()
    call: ReplayableCall | None = next(state.calls())
    assert call is not None
    state.drop(call)
    gone = weakref.ref(call)
    del call
    assert gone() is None
    assert run([x])[0].tolist() == [1.0, 1.0]


def test_tensor_subclasses_go_through_python() -> None:
    class Marked(Tensor):
        pass

    graphed, x = make(lambda x: [x + 1], "copied"), torch.zeros(2)
    run = graphed.make_callable()
    for _ in range(5):
        run([x])
    assert "_find_and_run" in find_python_frames(lambda: run([x.as_subclass(Marked)]))
