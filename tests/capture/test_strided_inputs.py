"""`as_strided` counts from the start of the storage: inputs that are slices, and mutated inputs."""

from __future__ import annotations

import warnings

import pytest
import torch

import fulgurite
from fulgurite.capture.strided_inputs import (
    MUTATED_SLICE,
    OTHER_OFFSETS,
    OVERLAPPING_WRITE,
    fills_storage,
)
from fulgurite.errors import FallbackWarning


def read_after_write(a):
    a.add_(1)
    return a.as_strided((3, 1), (2, 1), 1) * 1


def read_own_memory_after_write(a):
    a.add_(1)
    return a.as_strided((3,), (2,)) * 1


def write_through_view(a):
    t = a.as_strided((3, 1), (2, 1), 1)
    t.add_(10)
    t[-1] = 3
    return a * 1


def read_at_offset(a):
    return a.as_strided((3,), (2,), 1) * 1


def read_slice_at_offset(a):
    return a[1:].as_strided((3,), (1,), 2), a[1:].as_strided((3,), (1,), 2) * 1


# equal sizes and strides but for the last: TorchDynamo compiles them once
LAYOUTS = {
    "whole": lambda memory: torch.arange(12.0),
    "at 2": lambda memory: memory[2:14],
    "at 5": lambda memory: memory[5:17],
    "first part": lambda memory: memory[:12],
    "stepped": lambda memory: memory[1::2],
}
FUNCTIONS = [
    read_after_write,
    read_own_memory_after_write,
    write_through_view,
    read_at_offset,
    read_slice_at_offset,
]


@pytest.mark.covering
@pytest.mark.parametrize("first", ["whole", "at 2", "stepped"])  # how the input lies at capture
@pytest.mark.parametrize("f", FUNCTIONS)
def test_inputs_that_are_slices(f, first):
    compiled = fulgurite.compile(f, dynamic=False)
    later = ["whole", "at 5", "first part"] if first != "stepped" else []
    for name in (first, *later):
        ours, eager = torch.arange(24.0), torch.arange(24.0)
        mine, other = LAYOUTS[name](ours).detach(), LAYOUTS[name](eager).detach()
        for _ in range(2):
            torch.testing.assert_close(compiled(mine), f(other), rtol=0, atol=0)
            assert torch.equal(ours, eager)


def test_gradients_of_slices():
    def f(a, w):
        return (a.as_strided((3, 4), (4, 1), 2) * w).sum()

    compiled = fulgurite.compile(f)
    w = torch.randn(4, requires_grad=True)
    for start in (0, 2, 2, 6):
        a = torch.arange(24.0)[start : start + 16]
        (found,) = torch.autograd.grad(compiled(a, w), w)
        assert torch.equal(found, torch.autograd.grad(f(a, w), w)[0])


def call_slices(f, *starts):
    """A compiled function, called with slices of a tensor, and the warnings of its calls."""
    compiled, caught = fulgurite.compile(f, dynamic=False), []
    for start in starts:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            compiled(torch.arange(24.0)[start : start + 12])
        caught += [str(one.message) for one in found if one.category is FallbackWarning]
    return compiled, caught


@pytest.mark.parametrize(
    ("f", "starts", "reason"),
    [(read_after_write, (2, 2, 5), MUTATED_SLICE), (read_at_offset, (0, 0, 5, 5), OTHER_OFFSETS)],
)
def test_calls_that_run_as_captured_are_reported(f, starts, reason):
    compiled, caught = call_slices(f, *starts)
    assert len(caught) == 1 and reason in caught[0]
    assert reason in str(compiled.explain())
    assert reason in str(compiled.last_trace())


def test_calls_that_run_compiled_are_not_reported():
    compiled, caught = call_slices(read_at_offset, 3, 3)
    assert not caught and "as captured" not in str(compiled.explain())


def test_whole_inputs_are_compiled():
    compiled = fulgurite.compile(read_after_write)
    compiled(torch.arange(24.0))
    assert "@fulgurite.region" in str(compiled.last_trace())


def test_fills_storage():
    memory = torch.zeros(24)
    assert all(map(fills_storage, (memory, memory.view(4, 6).t(), torch.zeros(()))))
    assert not any(map(fills_storage, (memory[2:], memory[::2], memory[:12], memory.expand(2, 24))))


def write_shared_elements(a, count):
    """Windows of two elements share all but the first and the last."""
    t = a.as_strided((count, 2), (1, 1), 1)
    t[:, -1:].view(-1)[...] = 1
    return t


def write_rows(a, count):
    t = a.as_strided((count, 2), (2, 1), 1)
    t[:, -1:].view(-1)[...] = 1
    return t


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_to_views_whose_elements_share_memory(dynamic):
    compiled = fulgurite.compile(write_shared_elements, dynamic=dynamic)
    with pytest.warns(FallbackWarning, match=OVERLAPPING_WRITE):
        for count in (2, 2, 4):
            a, b = torch.arange(12.0), torch.arange(12.0)
            result, expected = compiled(a, count), write_shared_elements(b, count)
            assert torch.equal(result, expected) and torch.equal(a, b)
    assert OVERLAPPING_WRITE in str(compiled.explain())


@pytest.mark.parametrize("dynamic", [False, True])
def test_writes_to_views_whose_elements_share_no_memory_are_compiled(dynamic):
    compiled = fulgurite.compile(write_rows, dynamic=dynamic)
    for count in (2, 2, 4):
        a, b = torch.arange(12.0), torch.arange(12.0)
        assert torch.equal(compiled(a, count), write_rows(b, count)) and torch.equal(a, b)
    assert not any(graph.captured_calls for graph in compiled.graphs)
