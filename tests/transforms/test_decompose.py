"""Decompositions: results are what the op returns, in memory of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import fulgurite
from fulgurite.transforms.decompose import decompose
from tests.fuser.support import trace

aten = torch.ops.aten
INT64_MAX = 2**63 - 1


def test_results_share_no_memory_with_arguments():
    """torch decomposes a shuffle of one group to views; the op returns a copy."""

    def function(x):
        return F.channel_shuffle(x, 1)

    x = torch.randn(1, 1, 1, 1, 2)
    compiled = fulgurite.compile(function, dynamic=True)
    result = compiled(x)
    expected = function(x).clone()
    x.zero_()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_ldexp_does_not_overflow_in_between(dtype):
    """2^200 is infinite in float32, 2^-100 * 2^200 is not."""
    x = torch.tensor([2.0**-100, -1.25, 1.5, 3, 0]).to(dtype)
    exponents = torch.tensor([200, -149, -150, 3, 200])
    actual = fulgurite.compile(torch.ldexp)(x, exponents)
    torch.testing.assert_close(actual, torch.ldexp(x, exponents), equal_nan=True, rtol=0, atol=0)


def test_only_refusals_of_torch_leave_an_op_whole(monkeypatch):
    """A decomposition may refuse its arguments; an error of our own code is raised."""
    module = trace(lambda x: torch.ops.aten.hardsigmoid(x), (torch.randn(3),))
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    assert decompose(module, node) is not None

    def refuse(*_):
        raise RuntimeError("not for this dtype")

    table = {node.target: refuse}
    monkeypatch.setattr("fulgurite.transforms.decompose.decomposition_table", lambda: table)
    assert decompose(module, node) is None

    def break_down(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("fulgurite.transforms.decompose.decomposition_table", lambda: {})
    monkeypatch.setattr("fulgurite.transforms.decompose.get_decomposition", lambda _: break_down)
    with pytest.raises(RuntimeError, match="a bug"):
        decompose(module, node)


def test_strides_that_count_an_empty_dimension_as_one():
    """The size of `a` is `1 - n` here, and its contiguous strides have Max(1, 1 - n)."""

    def f(x, a, n):
        return x[:, -n:], F.logsigmoid(a)

    x, a = torch.randn(2, 3), torch.randn(2, 3)
    results = fulgurite.compile(f, dynamic=True)(x, a, -2)
    for result, expected in zip(results, f(x, a, -2), strict=True):
        torch.testing.assert_close(result, expected)


def test_symbolic_strides_are_computed_in_the_graph():
    """The strides of the result have Max(1, n - 1), which torch's tracer builds since 2.13 only."""

    def fill(x, start, value):
        rows = aten.slice.Tensor(x, 1, 1, INT64_MAX)
        return aten.fill.Tensor(aten.slice.Tensor(rows, 0, start, INT64_MAX), value)

    x, value = torch.ones(5, 4), torch.tensor(2.0)
    module = make_fx(fill, tracing_mode="symbolic")(x, -3, value)
    (node,) = module.graph.find_nodes(op="call_function", target=aten.fill.Tensor)
    decomposed = decompose(module, node)
    assert decomposed.graph.find_nodes(op="call_function", target=torch.sym_max)
    result = decomposed(x[2:, 1:], value)
    assert torch.equal(result, torch.full((3, 3), 2.0)) and result.stride() == (3, 1)
