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
    for function in (torch.sym_sum, torch.sym_max, torch.sym_not, torch._sym_sqrt, operator.abs, math.floor):
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
