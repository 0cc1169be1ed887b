"""Results in the memory of inputs that are lent: where that is safe, and right everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite import fuser
from tests.fuser import support
from tests.fuser.support import close, trace, tupled, widened


def scaled(t, w):
    return torch.relu(t * w[0] + w[1])


def gated(t, u):
    return F.silu(t) * u


def seen_otherwise(t, x):
    return t.view(x.shape) + torch.sin(x)


def both(t, u):
    return t * 2 + 1, torch.exp(u) - 1


def of_columns(t, x):
    """Scaled by what is known of the columns of another tensor."""
    return t * x.amax(0)


def run(function, *arguments, lent=1):
    """Runs the kernels with the first arguments lent; whether each of those now holds a result."""
    given = [support.placed(a.clone()) for a in arguments]
    with support.place():
        graph = trace(function, given)
    for node in graph.graph.find_nodes(op="placeholder")[:lent]:
        node.meta["lent"] = True
    region = fuser.lower(graph, use_triton=support.TARGET == "triton")
    for _ in range(2):
        ours = [a.clone() for a in given]
        found = tupled(region(*ours))
        theirs, wide = tupled(function(*given)), tupled(function(*map(widened, given)))
        for got, want, exact in zip(found, theirs, wide, strict=True):
            support.same_place(got, want)
            close(got, want, exact)
        addresses = {got.data_ptr() for got in found if got.numel()}
        held = [a.data_ptr() in addresses for a in ours]
        for k, (before, after) in enumerate(zip(given, ours, strict=True)):
            assert held[k] or torch.equal(before, after), "an argument that is not lent was changed"
        assert region.overwritten == tuple(k for k, holds in enumerate(held) if holds)
    return tuple(held[:lent])


SHAPES = [(1, 2), (5, 7), (33, 129), (3, 4099)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_elementwise_results_take_the_place(shape, dtype):
    torch.manual_seed(0)
    t, u = torch.randn(2, *shape).to(dtype).unbind()
    assert run(scaled, t, torch.randn(2, shape[1]).to(dtype)) == (True,)
    assert run(gated, t, u, lent=2) == (True, False)  # one result, one place
    assert run(lambda u, t: gated(t, u), u, t) == (True,)
    assert run(both, t, u, lent=2) == (True, True)
    assert run(seen_otherwise, t, u.reshape(1, *shape)) == (True,)


def test_nothing_is_lent_of_nothing():
    empty = torch.empty(0, 5)
    assert run(scaled, empty, torch.randn(2, 5)) == (False,)


def test_channels_last():
    torch.manual_seed(0)
    t, x = torch.randn(2, 3, 6, 5, 7).unbind()
    t, x = (a.contiguous(memory_format=torch.channels_last) for a in (t, x))

    def normalized(t, x, mean, variance):
        return torch.relu((t - mean[:, None, None]) * variance[:, None, None].rsqrt() + x)

    assert run(normalized, t, x, torch.randn(6), torch.rand(6) + 0.5) == (True,)


def test_what_other_kernels_read_before():
    torch.manual_seed(0)
    assert run(of_columns, *torch.randn(2, 300, 70).unbind()) == (True,)
    for rows in (3, 70, 4000):  # one kernel or two: right in both ways
        run(lambda t: t * t.amax(0), torch.randn(rows, 70))


def elsewhere(t, x):
    return t.flip(0) + x


def turned(t, x):
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
    [elsewhere, turned, with_sum, twice, narrower, part, wider, padded, laid_otherwise],
    ids=lambda function: function.__name__,
)
def test_what_would_be_wrong_is_not_done(function):
    torch.manual_seed(0)
    assert run(function, *torch.randn(2, 37, 37).unbind()) == (False,)


def test_what_is_returned_itself_stays():
    torch.manual_seed(0)
    t, x = torch.randn(2, 37, 37).unbind()
    graph = trace(itself, (t, x))
    graph.graph.find_nodes(op="placeholder")[0].meta["lent"] = True
    region = fuser.lower(graph, use_triton=support.TARGET == "triton")
    if support.TARGET != "cuda":
        before = t.clone()
        seen, result = region(t, x)
        assert torch.equal(seen, before.view(-1)) and torch.equal(result, before * x)


def test_an_input_with_gaps_stays():
    torch.manual_seed(0)
    base = torch.randn(20, 40)
    t = base[:, ::2]
    graph = trace(scaled, (t, torch.randn(2, 20)))
    graph.graph.find_nodes(op="placeholder")[0].meta["lent"] = True
    assert fuser.lower(graph, use_triton=support.TARGET == "triton").overwritten == ()


def test_other_strides_than_promised():
    torch.manual_seed(0)
    t, w = support.placed(torch.randn(6, 8)), support.placed(torch.randn(2, 8))
    with support.place():
        graph = trace(scaled, (t, w))
    graph.graph.find_nodes(op="placeholder")[0].meta["lent"] = True
    region = fuser.lower(graph, use_triton=support.TARGET == "triton")
    turned_t = t.t().contiguous().t()
    (result,) = region(turned_t, w)
    support.same_place(result, scaled(t, w))
    torch.testing.assert_close(result, scaled(t, w))


def test_sizes_that_are_symbols_are_not_lent():
    graph = trace(gated, tuple(torch.randn(2, 5, 7).unbind()), mode="symbolic")
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["lent"] = isinstance(node.meta.get("val"), torch.Tensor)
    assert fuser.lower(graph, use_triton=support.TARGET == "triton").overwritten == ()
