"""Donated inputs: outputs are stored in their buffers where that is safe."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite import fuser
from fulgurite.trace.node_meta import mark_donated
from tests.fuser import support
from tests.fuser.support import as_tuple, check_close, to_float64, trace

RUNS_ON_TRITON = True


def scaled(t, w):
    return torch.relu(t * w[0] + w[1])


def gated(t, u):
    return F.silu(t) * u


def viewed(t, x):
    return t.view(x.shape) + torch.sin(x)


def both(t, u):
    return t * 2 + 1, torch.exp(u) - 1


def scaled_by_column_max(t, x):
    """Scaled by what is known of the columns of another tensor."""
    return t * x.amax(0)


def run(function, *arguments, donated=1):
    """Run the kernels with the first arguments donated; return whether each now holds an output."""
    given = [support.to_target(a.clone()) for a in arguments]
    with support.target_device():
        graph = trace(function, given)
    for node in graph.graph.find_nodes(op="placeholder")[:donated]:
        mark_donated(node)
    region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
    for _ in range(2):
        ours = [a.clone() for a in given]
        found = as_tuple(region(*ours))
        theirs, wide = as_tuple(function(*given)), as_tuple(function(*map(to_float64, given)))
        for got, want, exact in zip(found, theirs, wide, strict=True):
            support.check_layout(got, want)
            check_close(got, want, exact)
        addresses = {got.data_ptr() for got in found if got.numel()}
        held = [a.data_ptr() in addresses for a in ours]
        for k, (before, after) in enumerate(zip(given, ours, strict=True)):
            assert held[k] or torch.equal(before, after), (
                "an argument that is not donated was changed"
            )
        assert region.overwritten_inputs == tuple(k for k, holds in enumerate(held) if holds)
    return tuple(held[:donated])


SHAPES = [(1, 2), (5, 7), (33, 129), (3, 4099)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_outputs_reuse_the_buffer(shape, dtype):
    torch.manual_seed(0)
    t, u = torch.randn(2, *shape).to(dtype).unbind()
    assert run(scaled, t, torch.randn(2, shape[1]).to(dtype)) == (True,)
    assert run(gated, t, u, donated=2) == (True, False)  # one result, one place
    assert run(lambda u, t: gated(t, u), u, t) == (True,)
    assert run(both, t, u, donated=2) == (True, True)
    assert run(viewed, t, u.reshape(1, *shape)) == (True,)


def test_a_result_that_a_later_kernel_reads_keeps_its_own_buffer():
    def double_and_reverse(t):
        doubled = t * 2
        return doubled, doubled.flip(0).cumsum(0)

    run(double_and_reverse, torch.randn(64, 96))  # compares with eager


def test_empty_tensors_are_not_reused():
    empty = torch.empty(0, 5)
    assert run(scaled, empty, torch.randn(2, 5)) == (False,)


def test_channels_last():
    torch.manual_seed(0)
    t, x = torch.randn(2, 3, 6, 5, 7).unbind()
    t, x = (a.contiguous(memory_format=torch.channels_last) for a in (t, x))

    def normalized(t, x, mean, variance):
        return torch.relu((t - mean[:, None, None]) * variance[:, None, None].rsqrt() + x)

    assert run(normalized, t, x, torch.randn(6), torch.rand(6) + 0.5) == (True,)


def test_buffers_that_other_kernels_read_before():
    torch.manual_seed(0)
    assert run(scaled_by_column_max, *torch.randn(2, 300, 70).unbind()) == (True,)
    for rows in (3, 70, 4000):  # one kernel or two: right in both ways
        run(lambda t: t * t.amax(0), torch.randn(rows, 70))


def elsewhere(t, x):
    return t.flip(0) + x


def plus_transpose(t, x):
    return x + t.t()


def with_sum(t, x):
    return t - t.sum(-1, keepdim=True) * x


def twice(t, x):
    return t * 2, t + x


def narrower(t, x):
    return (t * x).to(torch.bfloat16)


def part(t, x):
    return t[:, 1:] * x[:, 1:]


def wider(t, x):
    return t[:, None] * x[None]


def padded(t, x):
    return F.pad(t, (1, 0))[:, :-1] + x


def laid_otherwise(t, x):
    return (t * x).t().contiguous()


def itself(t, x):
    return t.view(-1), t * x


@pytest.mark.parametrize(
    "function",
    [elsewhere, plus_transpose, with_sum, twice, narrower, part, wider, padded, laid_otherwise],
    ids=lambda function: function.__name__,
)
def test_unsafe_reuse_is_refused(function):
    torch.manual_seed(0)
    assert run(function, *torch.randn(2, 37, 37).unbind()) == (False,)


def test_returned_input_is_not_overwritten():
    torch.manual_seed(0)
    t, x = torch.randn(2, 37, 37).unbind()
    graph = trace(itself, (t, x))
    mark_donated(graph.graph.find_nodes(op="placeholder")[0])
    region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
    if support.TARGET != "cuda":
        before = t.clone()
        seen, result = region(t, x)
        assert torch.equal(seen, before.view(-1)) and torch.equal(result, before * x)


def test_input_with_gaps_is_not_overwritten():
    torch.manual_seed(0)
    base = torch.randn(20, 40)
    t = base[:, ::2]
    graph = trace(scaled, (t, torch.randn(2, 20)))
    mark_donated(graph.graph.find_nodes(op="placeholder")[0])
    assert fuser.lower_region(graph, use_triton=support.TARGET == "triton").overwritten_inputs == ()


def test_unexpected_strides():
    torch.manual_seed(0)
    t, w = support.to_target(torch.randn(6, 8)), support.to_target(torch.randn(2, 8))
    with support.target_device():
        graph = trace(scaled, (t, w))
    mark_donated(graph.graph.find_nodes(op="placeholder")[0])
    region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
    transposed_t = t.t().contiguous().t()
    (result,) = region(transposed_t, w)
    support.check_layout(result, scaled(t, w))
    torch.testing.assert_close(result, scaled(t, w))


def test_symbolic_sizes_are_not_donated():
    graph = trace(gated, tuple(torch.randn(2, 5, 7).unbind()), mode="symbolic")
    for node in graph.graph.find_nodes(op="placeholder"):
        mark_donated(node)
    assert fuser.lower_region(graph, use_triton=support.TARGET == "triton").overwritten_inputs == ()
