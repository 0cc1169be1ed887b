"""Memory of CUDA graphs, with fake captures: bytes that captures keep, and decisions that weigh them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import fulgurite
from fulgurite.cudagraph import CaptureMemory, graphed, state
from tests.cudagraph.fake import (
    FakeCapturedCall,
    FakePool,
    FakeStopwatch,
    make_fake_backend,
    use_fake_captures,
)
from tests.cudagraph.programs import Net
from tests.cudagraph.programs import graphed as find_graphed
from tests.cudagraph.test_graphed import call, make

CPU = torch.device("cpu")


def call_in_phases(function, w, phases: int) -> None:
    """Several phases, each with an input at one address."""
    inputs = [torch.full((2,), float(k)) for k in range(phases)]
    for x in [x for x in inputs for _ in range(6)] + inputs * 3:
        (result,) = call(function, x, w)
        assert result.tolist() == (x * w).tolist()
        del result


def test_addresses_have_a_capture_each_while_outputs_are_small():
    function, w = make(modes=("shared",)), torch.ones(2)
    call_in_phases(function, w, 3)
    assert function.captures == 3


def test_one_capture_serves_all_addresses_if_its_outputs_are_large(monkeypatch):
    """Each further one would keep outputs of its own: a second copy of all saved activations."""
    monkeypatch.setattr(state, "MAX_DUPLICATED_BYTES", 0)
    function, w = make(modes=("shared",)), torch.ones(2)
    call_in_phases(function, w, 3)
    assert function.captures == 2, "the second one copies the input"
    assert function.memory.pool(0).on(CPU).kept_bytes == 8


def test_a_replaced_capture_is_freed_before_the_next_one(monkeypatch):
    """Else the pool grows by a second set of outputs: all saved activations of a model."""
    monkeypatch.setattr(state, "MAX_DUPLICATED_BYTES", 0)
    alive, capture = [], FakeCapturedCall.__init__

    def count(self, run, inputs, pool) -> None:
        alive.append(len(pool.outputs))
        capture(self, run, inputs, pool)

    monkeypatch.setattr(FakeCapturedCall, "__init__", count)
    function, w = make(modes=("shared",)), torch.ones(2)
    call_in_phases(function, w, 3)
    assert alive == [0, 0]


def test_outputs_of_a_replaced_capture_stay_valid_while_held(monkeypatch):
    monkeypatch.setattr(state, "MAX_DUPLICATED_BYTES", 0)
    function, w = make(modes=("shared",)), torch.ones(2)
    first, second = torch.full((2,), 3.0), torch.full((2,), 5.0)
    for _ in range(5):
        held = call(function, first, w)[0][1:]  # a view
    for _ in range(8):
        assert call(function, second, w)[0].tolist() == [5.0, 5.0]
    assert function.captures >= 2 and held.tolist() == [3.0]


def test_large_inputs_that_move_are_not_copied_at_every_call(monkeypatch):
    """What a forward without a capture saved; once it is captured, backward is captured, too."""
    monkeypatch.setattr(graphed, "MAX_COPIED_BYTES", 4)
    function, w = make(forced=False), torch.ones(2)
    kept = [torch.full((2,), float(k)) for k in range(20)]
    for x in kept:
        assert call(function, x, w)[0].tolist() == x.tolist()
    assert function.captures == 0
    assert "not captured so far: 8 B of inputs would be copied at every call" in str(function)
    for _ in range(12):
        assert call(function, kept[0], w)[0].tolist() == [0.0, 0.0]
    assert function.captures == 1 and "so far" not in str(function)


def test_large_inputs_at_two_addresses_have_a_capture_each(monkeypatch):
    """Copying them costs more than the outputs that the second capture keeps: the gradient of logits."""
    monkeypatch.setattr(graphed, "MAX_COPIED_BYTES", 4)
    monkeypatch.setattr(state, "MAX_DUPLICATED_BYTES", 0)
    function, w = make(modes=("shared",), forced=False), torch.ones(2)
    first, second = torch.full((2,), 3.0), torch.full((2,), 5.0)
    for x in [first, second] * 20:
        (result,) = call(function, x, w)
        assert result.tolist() == x.tolist()
        del result
    assert function.captures == 2 and function.replays > 20


@pytest.mark.parametrize("total_memory", [1 << 30, 64])
def test_the_more_memory_a_graph_keeps_the_more_it_must_gain(total_memory):
    times = FakeStopwatch([1.2e-3] * 3 + [50e-6], [1.9e-3] * 3 + [1.85e-3], [2.2e-3] * 3 + [2e-3])
    memory = CaptureMemory(make_fake_backend(times, total_memory))
    function, w = make(forced=False, memory=memory), torch.ones(2)
    for step in range(24):
        x = torch.full((2,), float(step))
        assert call(function, x, w)[0].tolist() == [step, step]
    if total_memory > 64:
        assert function.describe().startswith("captured: ")
    else:
        assert "too little for 25.0% of the device's memory" in function.describe()
        assert not memory.pool(0)._pools, "its memory is freed"


def test_training_step_keeps_saved_tensors_and_gradients_once(monkeypatch):
    """However many addresses its inputs had."""
    monkeypatch.setattr(state, "MAX_DUPLICATED_BYTES", 0)
    torch.manual_seed(0)
    eager = Net()
    original = copy.deepcopy(eager)
    batches = [torch.randn(4, 8) for _ in range(3)]
    with use_fake_captures():
        compiled = fulgurite.compile(original, cudagraph=True)
        for x in [x for x in batches for _ in range(8)] + batches * 3:
            for model, module in ((eager, eager), (compiled, original)):
                module.zero_grad(set_to_none=True)
                model(x).square().mean().backward()
            for ours, theirs in zip(original.parameters(), eager.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
        original.zero_grad(set_to_none=True)
        forward, backward = find_graphed(compiled, "forward"), find_graphed(compiled, "backward")
        assert forward.replays > 8 and backward.replays > 8
        for one in (forward, backward):
            calls = [call for state in one._states.values() for call in state.calls()]
            assert len(calls) == 1, str(one)
        (saved,) = (call.kept_bytes for state in forward._states.values() for call in state.calls())
        gradients = sum(p.nbytes for p in original.parameters())
        assert backward.memory.pool(0) is forward.memory.pool(0)
        assert backward.memory.pool(0).on(CPU).kept_bytes <= saved + 1.1 * gradients


def make_training(zeroes_after_forward: bool = False):
    """A model, its compiled form, and a step of both that compares gradients."""
    torch.manual_seed(0)
    eager = Net()
    original = copy.deepcopy(eager)
    compiled = fulgurite.compile(original, cudagraph=True)

    def step(x, keeps_gradients: bool = False) -> None:
        for model, module in ((eager, eager), (compiled, original)):
            loss = model(x).square().mean()
            if zeroes_after_forward:
                module.zero_grad(set_to_none=True)
            loss.backward()
        for ours, theirs in zip(original.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
        if not keeps_gradients and not zeroes_after_forward:
            eager.zero_grad(set_to_none=True)
            original.zero_grad(set_to_none=True)

    return compiled, step


def test_backward_uses_the_pools_of_forward_if_gradients_are_freed():
    with use_fake_captures():
        compiled, step = make_training()
        x = torch.randn(4, 8)
        for _ in range(12):
            step(x)
        forward, backward = find_graphed(compiled, "forward"), find_graphed(compiled, "backward")
        assert forward.captures == backward.captures == 1
        assert forward.replays >= 9 and backward.replays >= 7
        assert backward.memory.pool(0) is forward.memory.pool(0)


@pytest.mark.parametrize("zeroes_after_forward", [False, True])
def test_backward_has_pools_of_its_own_if_gradients_are_held(zeroes_after_forward):
    """Else gradients would block the next forward pass."""
    with use_fake_captures():
        compiled, step = make_training(zeroes_after_forward)
        x = torch.randn(4, 8)
        for k in range(24):
            step(x, keeps_gradients=k % 4 != 3)
        forward, backward = find_graphed(compiled, "forward"), find_graphed(compiled, "backward")
        assert backward.memory.pool(0) is not forward.memory.pool(0)
        assert forward.captures == 1 and forward.replays >= 20, str(forward)


def test_gradients_that_are_held_later():
    """The first captures share a pool; the next ones of backward have another."""
    with use_fake_captures():
        compiled, step = make_training()
        x = torch.randn(4, 8)
        for _ in range(12):
            step(x)
        for k in range(80):
            step(x, keeps_gradients=k % 4 != 3)
        forward, backward = find_graphed(compiled, "forward"), find_graphed(compiled, "backward")
        assert backward.memory.pool(0) is not forward.memory.pool(0)
        assert forward.captures <= 3 and backward.captures <= 5, (str(forward), str(backward))
        before = forward.replays, backward.replays
        for k in range(8):
            step(x, keeps_gradients=k % 4 != 3)
        assert (forward.replays, backward.replays) == (before[0] + 8, before[1] + 8)


def test_captures_of_sizes_that_are_not_used_are_freed():
    function = make(dynamic_inputs=(0, 1))
    for size in (3, 5):
        x = torch.ones(size)
        for _ in range(4):
            call(function, x, x)
    x = torch.ones(7)
    for _ in range(graphed.MAX_UNUSED_REPLAYS * 5):
        call(function, x, x)
    x = torch.ones(9)
    for _ in range(4):
        call(function, x, x)
    sizes = [key[0][0][0] for key, one in function._states.items() if list(one.calls())]
    assert sizes == [7, 9]


@pytest.mark.parametrize("grown", [0, graphed.MIN_RETIRED_BYTES])
def test_memory_grown_for_a_capture_that_is_given_up_is_freed(monkeypatch, grown):
    """torch frees the memory of a pool with its last capture: the other ones move to a new pool."""
    capture = FakeCapturedCall.__init__

    def grow(self, run, inputs, pool) -> None:
        if inputs[0].numel() == 5:
            FakePool.reserved_bytes += grown
        capture(self, run, inputs, pool)

    monkeypatch.setattr(FakePool, "reserved_bytes", 0)
    monkeypatch.setattr(FakeCapturedCall, "__init__", grow)
    # three plain calls, the replays: the second function gains nothing
    memory = CaptureMemory(make_fake_backend())
    fast, slow = make(memory=memory), make(memory=memory, modes=("shared",), forced=False)
    slow.backend = dataclasses.replace(
        memory.backend, stopwatch=FakeStopwatch([30e-6] * 3 + [50e-6], [5e-6])
    )
    w, pools = torch.ones(5), []
    for step in range(30):
        x = torch.full((3,), float(step))
        assert torch.equal(call(fast, x, w[:3])[0], x)
        if step >= 6:
            y = torch.full((5,), float(step))
            assert torch.equal(call(slow, y, w)[0], y)
        pools.append(memory.pool(0).on(CPU))
    assert "a replay is not faster" in slow.describe()
    assert fast.captures == (2 if grown else 1) and fast.replays >= 20
    assert (pools[0] is pools[-1]) == (not grown)
    assert not any(list(state.calls()) for state in slow._states.values())
