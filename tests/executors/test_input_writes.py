"""Writes to inputs: in the trace, inside fused regions, and fused into one call; against eager."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fulgurite
from fulgurite.executors.fuser import kernels_of
from fulgurite.trace.mutations import mutated_inputs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8)
        self.second, self.other = nn.Conv2d(8, 5, 3, bias=False), nn.BatchNorm2d(5, momentum=None)

    def forward(self, x):
        return torch.relu(self.other(self.second(torch.relu(self.norm(self.first(x))))))


def copies(call) -> int:
    """How many times torch copies a tensor in a call."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::copy_")


def steps(net, inputs):
    """Losses, gradients and buffers of some training steps."""
    found = []
    for x in inputs:
        net.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        found.append(loss.detach())
    found += [p.grad for p in net.parameters()]
    return [*found, *(b.clone() for b in net.buffers())]


@pytest.mark.parametrize("remat", ["none", "mincut", "full"])
@pytest.mark.parametrize("executors", [["fuser", "torch"], ["torch"]], ids="-".join)
def test_batch_norm_in_training(executors, remat):
    torch.manual_seed(0)
    net, inputs = Net(), torch.randn(3, 4, 3, 9, 9)
    exact = steps(copy.deepcopy(net).double(), inputs.double())
    expected = steps(copy.deepcopy(net), inputs)
    compiled = fulgurite.compile(net, executors=executors, remat=remat, autotune=False)
    for ours, eager, reference in zip(steps(compiled, inputs), expected, exact, strict=True):
        rounding = 1e-6 * reference.abs().max()
        assert (ours - reference).abs().max() <= 2 * (eager - reference).abs().max() + rounding
    net.eval()
    torch.testing.assert_close(compiled(inputs[0]), net(inputs[0]), rtol=1e-4, atol=1e-5)


def layers() -> nn.Sequential:
    pairs = ((nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)) for _ in range(3))
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def test_kernels_store_running_statistics_directly():
    net, x = layers(), torch.randn(9, 6)
    compiled = fulgurite.compile(net, executors=["fuser", "torch"], autotune=False)
    compiled(x)
    assert copies(lambda: compiled(x)) == 0
    assert [b.item() for n, b in net.named_buffers() if "tracked" in n] == [2, 2, 2]
    trace = compiled.last_trace(kind="forward")
    assert len([target for node in trace.graph.nodes for target in mutated_inputs(node)]) == 9
    assert str(trace).count("aten.copy_.default(") == 9
    counters = [k for _, k in kernels_of(trace) if "tracked" in k.source]
    assert len(counters) == 1, "one kernel counts the steps of all layers"


def test_remaining_writes_are_one_call():
    compiled = fulgurite.compile(layers(), executors=["torch"])
    compiled(torch.randn(9, 6))
    text = str(compiled.last_trace(kind="forward"))
    assert text.count("_foreach_copy_(") == 2 and ".copy_(" not in text  # floats, and counters


def old_value_for_backward(x, buffer):
    y = x * buffer.clone()
    buffer.add_(1)
    return y.exp()


def old_and_new(x, buffer):
    before = buffer * 2
    buffer.mul_(x.detach())
    return before + x, buffer.sum()


def swap(x, buffer, other):
    kept = buffer.clone()
    buffer.copy_(other)
    other.copy_(kept)
    return x * 2


def written_twice(x, buffer):
    buffer.add_(1)
    y = x * buffer.clone()
    buffer.mul_(3)
    return y


def across(x, buffer):
    buffer.copy_(buffer.flip(0) + buffer.sum())
    return x + 1


def through_a_view(x, buffer):
    buffer.view(-1)[::2].add_(x.detach().view(-1)[::2])
    return x * 2


def overwritten(x, buffer):
    buffer.fill_(7)
    return x * 3


def copied_from(x, buffer):
    buffer.copy_(x.detach())
    return x * buffer.sum()


def a_row_and_its_sum(x, buffer):
    total = buffer.sum(-1, keepdim=True)
    buffer.sub_(total)
    return x + total


FUNCTIONS = [
    old_value_for_backward,
    old_and_new,
    written_twice,
    across,
    through_a_view,
    overwritten,
    copied_from,
    a_row_and_its_sum,
]


@pytest.mark.covering
@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("remat", ["mincut", "none", "full"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_old_and_new_values(function, remat, grad):
    if not grad and remat != "mincut":
        pytest.skip("nothing is saved")
    compiled = fulgurite.compile(
        function, executors=["fuser", "torch"], remat=remat, autotune=False
    )
    for shape in [(5, 7), (1, 1), (3, 0)]:
        for _ in range(2):
            results = []
            for each in (function, compiled):
                torch.manual_seed(0)
                x, buffer = torch.randn(shape, requires_grad=grad), torch.randn(shape)
                version = buffer._version
                found = each(x, buffer)
                leaves = found if isinstance(found, tuple) else (found,)
                if grad:
                    sum(leaf.sum() for leaf in leaves).backward()
                assert buffer._version > version
                results.append((*leaves, buffer, x.grad))
            torch.testing.assert_close(results[1], results[0])


def test_library_call_reads_the_old_value():
    """The kernel that makes the new one could run first: it also makes what the call multiplies."""

    def function(x, buffer):
        y = torch.relu(x) @ buffer
        buffer.add_(1)
        return y

    compiled = fulgurite.compile(function, executors=["fuser", "torch"], autotune=False)
    x, ours, expected = torch.randn(4, 4), torch.ones(4, 4), torch.ones(4, 4)
    torch.testing.assert_close(compiled(x, ours), function(x, expected))
    torch.testing.assert_close(ours, expected)


def test_swap():
    a, b = torch.arange(3.0), torch.ones(3)
    fulgurite.compile(swap, autotune=False)(torch.ones(2), a, b)
    assert a.tolist() == [1, 1, 1] and b.tolist() == [0, 1, 2]


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded over"])
def test_layouts_of_written_inputs(layout):
    def make():
        base = torch.arange(48.0)
        if layout == "transposed":
            return base.view(6, 8).t()
        if layout == "strided":
            return base.view(6, 8)[:, ::2]
        return base.view(6, 8)[1:3]

    def function(x, buffer):
        buffer.mul_(2)
        buffer.add_(x)
        return buffer.sum()

    compiled = fulgurite.compile(function, autotune=False)
    ours, expected = make(), make()
    x = torch.ones(())
    torch.testing.assert_close(compiled(x, ours), function(x, expected))
    torch.testing.assert_close(ours._base, expected._base, rtol=0, atol=0)


def test_inputs_that_share_memory():
    def function(a, b):
        a.add_(1)
        b.mul_(2)
        return a + b

    compiled = fulgurite.compile(function, autotune=False)
    for ours_at, other_at in [(slice(0, 6), slice(2, 8)), (slice(0, 4), slice(4, 8))]:
        ours, expected = torch.arange(8.0), torch.arange(8.0)
        found = compiled(ours[ours_at], ours[other_at])
        torch.testing.assert_close(found, function(expected[ours_at], expected[other_at]))
        torch.testing.assert_close(ours, expected)


def test_leaf_that_requires_grad_is_written_under_no_grad():
    def function(weight, x):
        with torch.no_grad():
            weight.mul_(0.5)
        return weight * x

    results = []
    for each in (function, fulgurite.compile(function, autotune=False)):
        weight, x = torch.ones(4, requires_grad=True), torch.arange(4.0)
        each(weight, x).sum().backward()
        results.append((weight.detach(), weight.grad))
    torch.testing.assert_close(results[1], results[0])


def test_random_op_keeps_its_order_among_writes():
    def function(x, buffer):
        y = nn.functional.dropout(x, 0.5)
        buffer.add_(y.mean(0))
        return nn.functional.dropout(y, 0.5)

    results = []
    for each in (function, fulgurite.compile(function, executors=["torch"])):
        torch.manual_seed(3)
        buffer = torch.zeros(6)
        results.append((each(torch.ones(8, 6), buffer), buffer))
    torch.testing.assert_close(results[1], results[0])
