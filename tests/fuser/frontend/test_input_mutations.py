"""Mutated inputs: stored by the kernel itself where that is safe, and correct where it is not."""

from __future__ import annotations

import pytest
import torch

from fulgurite import fuser
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.statement import verify_region
from tests.fuser import support
from tests.fuser.support import check_close, to_float64, trace

RUNS_ON_TRITON = True


def batch_norm(x, mean, variance, count):
    """Updates running statistics and returns the normalized values."""
    reduced_dims = [0, *range(2, x.dim())]
    var, average = torch.var_mean(x, reduced_dims, correction=0)
    mean.mul_(0.9).add_(average * 0.1)
    variance.mul_(0.9).add_(var * 0.1)
    count.add_(1)
    shape = [1, -1] + [1] * (x.dim() - 2)
    return (x - average.view(shape)) * torch.rsqrt(var.view(shape) + 1e-5)


def momentum(p, g, m):
    m.mul_(0.9).add_(g)
    p.sub_(0.1 * m)
    return ()


def counters(a, b, c):
    a.add_(1), b.add_(2), c.mul_(3)
    return ()


def flipped(x, buffer):
    buffer.copy_(buffer.flip(0) + x)
    return ()


def minus_its_sum(x, buffer):
    buffer.sub_(buffer.sum(-1, keepdim=True) * x)
    return ()


def twice(x, buffer):
    old = buffer * 2
    buffer.add_(x)
    return old


def filled(x, buffer):
    buffer.copy_(x * 3)
    return x + 1


def overwritten(x, buffer):
    old = buffer * x
    buffer.copy_(x)
    return old


def check_mutations(function, *arguments):
    """Runs the kernels and compares results and arguments with eager and float64.

    Returns the region.
    """
    graph = trace(function, [a.clone() for a in arguments])
    given = [support.to_target(a.clone()) for a in arguments]
    if support.TARGET == "cuda":
        with torch.device("cuda"):
            graph = trace(function, [a.clone() for a in given])
    region = fuser.lower_region(graph, use_triton=support.TARGET == "triton")
    for _ in range(2):
        eager, exact = [a.clone() for a in given], [to_float64(a).clone() for a in given]
        results = (region(*given), function(*eager), function(*exact))
        found, theirs, wide = map(support.as_tuple, results)
        for got in zip((*found, *given), (*theirs, *eager), (*wide, *exact), strict=True):
            check_close(*got)
    check_interpreted_mutations(graph, function, arguments)
    return region


def check_interpreted_mutations(graph, function, arguments):
    if support.TARGET == "cuda":
        return
    region = split_axes(lower_graph(graph))
    verify_region(region)
    ours, eager = [a.clone() for a in arguments], [a.clone() for a in arguments]
    interpret_region(region, ours)
    function(*eager)
    torch.testing.assert_close(ours, eager)


def is_in_place(region) -> bool:
    return "_new_out" not in region.source and "copy_(as_strided(" not in region.launcher


@pytest.mark.parametrize("shape", [(4, 8, 5, 7), (3, 5, 2), (2, 1, 9), (2, 3, 4100), (1, 17, 1)])
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
def test_batch_norm_stores_its_statistics(shape, last):
    torch.manual_seed(0)
    x = torch.randn(shape) * 3 + 1
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    channels = shape[1]
    counted = torch.tensor(3)
    region = check_mutations(
        batch_norm, x, torch.randn(channels), torch.rand(channels) + 0.5, counted
    )
    assert is_in_place(region)


@pytest.mark.parametrize("shape", [(), (1,), (0,), (5, 7), (33, 129)])
def test_elementwise_updates(shape):
    torch.manual_seed(0)
    p, g, m = torch.randn(3, *shape).unbind()
    assert is_in_place(check_mutations(momentum, p.clone(), g, m.clone()))


def test_scalar_updates_share_a_kernel():
    region = check_mutations(counters, torch.tensor(1), torch.tensor(2.0), torch.tensor(3))
    assert len(region.kernels) == 1 and is_in_place(region)


def test_inputs_read_at_other_indices():
    torch.manual_seed(0)
    x, buffer = torch.randn(2, 37, 70).unbind()
    assert not is_in_place(check_mutations(flipped, x, buffer))
    check_mutations(minus_its_sum, x[:, :1], buffer)
    region = check_mutations(twice, x, buffer)
    assert is_in_place(region), "a kernel loads everything of a point before it stores"
    assert ("tl.debug_barrier()" in region.source) == (support.TARGET != "cpp")
    assert is_in_place(check_mutations(filled, x, buffer))
    assert not is_in_place(check_mutations(overwritten, x, buffer))


def test_input_with_unexpected_strides_is_copied_back():
    region = check_mutations(momentum, torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 6))
    torch.manual_seed(0)
    p, g, m = (support.to_target(torch.randn(6, 4)).t() for _ in range(3))
    eager = [p.clone(), g.clone(), m.clone()]
    region(p, g, m)
    momentum(*eager)
    torch.testing.assert_close([p, g, m], eager)


def test_input_with_views_is_unsupported():
    def through_a_view(x, buffer):
        buffer.copy_(buffer.view(-1)[:4] * x)
        return ()

    arguments = (torch.randn(4), torch.randn(4))
    graph = trace(through_a_view, arguments)
    (write,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert "views" in fuser.unsupported_reason(write)
