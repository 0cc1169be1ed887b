"""Which nodes may be dropped."""

from __future__ import annotations

import math
import operator

import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.trace.purity import is_pure


def test_functions_of_sizes_are_pure():
    graph = torch.fx.Graph()
    sizes = [graph.placeholder(name) for name in "ab"]
    for function in (
        torch.sym_sum,
        torch.sym_max,
        torch.sym_not,
        torch._sym_sqrt,
        operator.abs,
        math.floor,
    ):
        assert is_pure(graph.call_function(function, (sizes,))), function


def test_sums_of_sizes_that_nothing_reads_are_dropped():
    """The size of a pooled dimension that an adaptive pooling sums up, and nobody reads."""

    def function(x):
        pooled = F.max_pool3d(x.cosh().reshape(1, 1, -1, 1, x.size(-1)), (2, 1, 2), 1)
        return F.adaptive_avg_pool3d(pooled.reshape(1, 1, -1, 1, pooled.size(-1)), (3, 1, 2))

    compiled = fulgurite.compile(function, dynamic=True)
    for shape in ((5, 5, 4, 5), (4, 4, 5, 4)):
        x = torch.randn(shape)
        torch.testing.assert_close(compiled(x), function(x))
    assert "sym_sum" in str(compiled.history[1]) and "sym_sum" not in str(compiled.last_trace())


def test_sizes_that_a_decomposition_does_not_read_are_dropped():
    """`alpha` is 1 at capture, which a guard holds: the decomposition has no product."""

    def function(x, k):
        return x.sub(x * 3, alpha=k + 1)

    compiled = fulgurite.compile(function, dynamic=True)
    x = torch.arange(6)
    for k in (0, 0, 2, -1):
        assert torch.equal(compiled(x, k), function(x, k))
        assert all(n.users or not is_pure(n) for n in compiled.last_trace().graph.nodes)
