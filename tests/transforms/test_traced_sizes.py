"""Sizes of another graph, in the graph that is being traced."""

from __future__ import annotations

import operator

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fulgurite.transforms.traced_sizes import TracedSizes


def make_sizes(*hints: int) -> list[torch.SymInt]:
    environment = ShapeEnv()
    symbols = [
        environment.create_symbol(hint, ConstantSource(f"n{k}"), dynamic_dim=DimDynamic.DYNAMIC)
        for k, hint in enumerate(hints)
    ]
    pairs = zip(symbols, hints, strict=True)
    return [environment.create_symintnode(symbol, hint=hint) for symbol, hint in pairs]


@pytest.mark.parametrize(
    "compute",
    [
        lambda n, m: torch.sym_max(1, n - 1),
        lambda n, m: torch.sym_min(n, m) * 3 + n * m - 2,
        lambda n, m: n // 2 + m % 3,
        lambda n, m: n + m + n * n,
    ],
)
def test_a_size_is_computed_from_those_of_the_graph(compute):
    n, m = make_sizes(7, 4)
    size = compute(n, m)
    traced = make_fx(lambda a, b: TracedSizes([a, b]).find(size))(n, m)
    assert traced(7, 4) == compute(7, 4) and traced(9, 2) == compute(9, 2)


def test_sums_of_known_parts():
    n, m = make_sizes(7, 4)
    size = torch.sym_max(1, n - m)
    traced = make_fx(lambda a: TracedSizes([a]).find(size))(n - m)
    assert traced(3) == 3 and traced(-1) == 1
    assert not traced.graph.find_nodes(op="call_function", target=operator.sub)


def test_a_part_that_the_graph_lacks():
    n, m = make_sizes(7, 4)
    with pytest.raises(NotImplementedError, match="another graph"):
        TracedSizes([n]).find(n * m)
    assert TracedSizes([]).find(5) == 5
