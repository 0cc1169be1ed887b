"""Graphs that mutate an input, called with inputs that overlap in other ways than at capture."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.capture.autograd import FUNCTIONAL_INPUTS
from fulgurite.capture.input_aliasing import OTHER_OVERLAPS, SHARED_GRADIENTS, find_overlaps
from fulgurite.errors import FallbackWarning


def mutate_and_add(a, b):
    a.mul_(2)
    return a + b


SLICES = {  # two inputs in a tensor of ten numbers
    "disjoint": (slice(0, 4), slice(5, 9)),
    "overlapping": (slice(0, 4), slice(2, 6)),
    "closer": (slice(0, 4), slice(1, 5)),
    "shifted": (slice(1, 5), slice(3, 7)),
    "backwards": (slice(2, 6), slice(0, 4)),
    "equal": (slice(0, 4), slice(0, 4)),
    "adjacent": (slice(0, 4), slice(4, 8)),
    "interleaved": (slice(0, 8, 2), slice(1, 9, 2)),
}


@pytest.mark.parametrize("first", SLICES)
@pytest.mark.parametrize("grad", [False, True])
def test_every_pair_of_overlaps(first, grad):
    compiled = fulgurite.compile(mutate_and_add, executors="torch")
    for name in (first, *SLICES):
        ours, expected = (torch.arange(10.0, requires_grad=grad) * 1 for _ in range(2))
        found = compiled(*(ours[part] for part in SLICES[name]))
        wanted = mutate_and_add(*(expected[part] for part in SLICES[name]))
        assert torch.equal(found, wanted) and torch.equal(ours, expected), name


def test_cached_addresses():
    """Disjoint inputs are cached by address; overlapping inputs are checked at every call."""
    compiled = fulgurite.compile(mutate_and_add, executors="torch")
    ours, expected = torch.arange(60.0), torch.arange(60.0)
    turns = [(0, 5), *((k, k + 10) for k in range(40)), (0, 2), (0, 5), (5, 0), (2, 0), (0, 5)]
    for a, b in turns * 2:
        found = compiled(ours[a : a + 4], ours[b : b + 4])
        wanted = mutate_and_add(expected[a : a + 4], expected[b : b + 4])
        assert torch.equal(found, wanted) and torch.equal(ours, expected), (a, b)


def test_overlap_across_storages():
    compiled = fulgurite.compile(mutate_and_add, executors="torch")
    x = torch.arange(10.0)
    assert torch.equal(compiled(x[:4], torch.ones(4)), torch.tensor([1.0, 3, 5, 7]))
    shared = torch.from_numpy(x.numpy())  # the same memory in another storage
    assert torch.equal(compiled(x[:4], shared[1:5]), torch.tensor([4.0, 12, 20, 16]))


def test_dynamic_sizes():
    compiled = fulgurite.compile(mutate_and_add, executors="torch", dynamic=True)
    for size, shift in [(4, 10), (5, 2), (6, 1), (7, 10), (0, 3), (1, 0), (8, 3)]:
        ours, expected = torch.arange(20.0), torch.arange(20.0)
        found = compiled(ours[:size], ours[shift : shift + size])
        wanted = mutate_and_add(expected[:size], expected[shift : shift + size])
        assert torch.equal(found, wanted) and torch.equal(ours, expected), (size, shift)


def test_buffer_that_is_also_the_input():
    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("state", torch.zeros(3))

        def forward(self, x):
            self.state.add_(1)
            return self.state + x

    model = Running()
    compiled = fulgurite.compile(model, executors="torch")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(compiled(model.state[:]), torch.full((3,), 4.0))
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 4.0))


def test_disjoint_inputs_stay_compiled():
    compiled = fulgurite.compile(mutate_and_add, executors="torch")
    ran = []
    for x, y in [(torch.ones(4), torch.ones(4)) for _ in range(3)]:
        compiled(x, y)
        graph = compiled.graphs[0].compiled_graphs["inference"]
        graph.replace(lambda a, b, before=graph.run: ran.append(1) or before([a, b]))
    assert (
        len(compiled.graphs) == 1 and len(ran) == 3
    )  # once in the second call, twice in the third


def test_other_overlaps_are_reported():
    compiled, memory = fulgurite.compile(mutate_and_add), torch.arange(10.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        compiled(memory[:4], memory[5:9])
    with pytest.warns(FallbackWarning, match="not compiled for the memory layout"):
        compiled(memory[:4], memory[2:6])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        compiled(memory[:4], memory[1:5])
    assert OTHER_OVERLAPS in str(compiled.explain()) and OTHER_OVERLAPS in str(
        compiled.last_trace()
    )


@pytest.mark.parametrize(
    "spans, pairs",
    [
        ([(0, 4, 0), (4, 8, 1)], []),
        ([(4, 8, 0), (0, 5, 1)], [(0, 1)]),
        ([(0, 9, 0), (1, 2, 1), (3, 4, 2)], [(0, 1), (0, 2)]),
        ([(0, 9, 0), (5, 5, 1)], []),  # empty
        ([(0, 0, 0), (0, 0, 1)], []),
    ],
)
def test_find_overlaps(spans, pairs):
    found = find_overlaps(spans, [torch.zeros(1)] * 3)
    assert [tuple(position for position, _ in pair) for pair in found] == pairs


@pytest.mark.covering
@pytest.mark.parametrize("executors", [["torch"], ["fuser", "torch"]], ids="-".join)
@pytest.mark.parametrize("write", ["x[:, 1] = x[:, 0]", "x.mul_(2)", "x.diagonal().fill_(3)"])
@pytest.mark.parametrize("view", ["x.flatten()", "x[1:]", "x.mT", "x.view(-1)[2:]"])
def test_view_of_a_mutated_input_at_an_offset(executors, write, view):
    """With dynamic sizes, AOTAutograd rebuilds the view from the storage offset of the output."""
    scope = {}
    exec(f"def program(x):\n    {write}\n    return {view}", scope)
    program = scope["program"]
    compiled = fulgurite.compile(program, executors=executors, dynamic=True)
    for size, offset in ((2, 1), (3, 4)):
        ours, eager = (torch.arange(20.0)[offset : offset + size**2] for _ in range(2))
        ours, eager = ours.view(size, size), eager.view(size, size)
        result, expected = compiled(ours), program(eager)
        assert torch.equal(result, expected) and torch.equal(ours, eager)
        assert result.storage_offset() == expected.storage_offset()
        assert result.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("needs_grad", [False, True])
def test_views_of_a_base_of_another_size(needs_grad, dynamic):
    def f(a, b):
        a.mul_(2)
        return a + b.exp()

    compiled = fulgurite.compile(f, dynamic=dynamic)
    for size in (6, 7, 9, 6):
        results = []
        for function in (f, compiled):
            x = torch.arange(float(size), requires_grad=needs_grad)
            base = x / 4
            y = function(base[:4], base[2:6])
            if needs_grad:
                y.sum().backward()
            results.append([y.detach(), base.detach(), x.grad])
        torch.testing.assert_close(results[1], results[0])


def leaf_and_buffer(memory):
    return memory[:6].requires_grad_(), memory[2:]


def buffer_and_leaf(memory):
    return memory[:6], memory[2:].requires_grad_()


def two_leaves(memory):
    return memory[:6].requires_grad_(), memory[2:].requires_grad_()


def views_of_a_result(memory):
    result = memory.requires_grad_() * 1
    return result[:6], result[2:]


def result_and_detached(memory):
    result = memory.requires_grad_() * 1
    return result[:6], result.detach()[2:]


def leaf_and_its_data(memory):
    memory.requires_grad_()
    return memory, memory.data[2:]


def write_without_gradient(x, y):
    with torch.no_grad():
        y.mul_(2)
    return x[:3] * y[:3] * x[3:6]


def write_detached(x, y):
    y.detach().mul_(2)
    return x[:3] * y[:3] * x[3:6]


SHARED = (leaf_and_buffer, buffer_and_leaf, two_leaves)
SHARED += (views_of_a_result, result_and_detached, leaf_and_its_data)


@pytest.mark.parametrize("make_inputs", SHARED)
@pytest.mark.parametrize("program", [write_without_gradient, write_detached])
def test_inputs_with_gradients_that_overlap(program, make_inputs):
    compiled = fulgurite.compile(program)
    results = []
    for function in (program, compiled):
        memory = torch.arange(1.0, 9)
        inputs = make_inputs(memory)
        y = function(*inputs)
        y.sum().backward()
        gradients = [x.grad for x in (*inputs, memory) if x.is_leaf]
        results.append([y.detach(), memory.detach(), gradients])
    torch.testing.assert_close(results[1], results[0])
    assert SHARED_GRADIENTS in str(compiled.explain())


def test_functionalize():
    def program(x):
        y = x.clone()
        y[0].add_(1)
        x.mul_(2)
        return y

    functional = torch.func.functionalize(program)
    for compiled in (fulgurite.compile(functional), fulgurite.compile(lambda x: functional(x))):
        ours, eager = torch.ones(3), torch.ones(3)
        for _ in range(2):
            torch.testing.assert_close(compiled(ours), program(eager))
            torch.testing.assert_close(ours, eager)
        assert FUNCTIONAL_INPUTS in str(compiled.explain())
