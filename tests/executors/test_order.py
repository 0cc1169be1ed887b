"""The order of groups: gradients larger than what they are made of come last, and nothing else changes."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch import Tensor, nn

from fulgurite.compile import compile
from fulgurite.executors import order
from fulgurite.executors.gather import Group
from fulgurite.trace.cost import memory_of


class Pooled(nn.Module):
    """Many tokens and small weights, then few tokens and large ones."""

    def __init__(self, inner: int, last: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.many = nn.Sequential(nn.Linear(32, inner), nn.GELU(), nn.Linear(inner, 32), nn.GELU())
        self.few = nn.Sequential(nn.Linear(32, last), nn.GELU(), nn.Linear(last, last))

    def forward(self, x: Tensor) -> Tensor:
        return self.few(self.many(x).unflatten(0, (4, -1)).mean(1))


def backward(model: nn.Module, x: Tensor) -> list[torch.fx.Node]:
    """Compares with eager; what backward runs, in order."""
    compiled = compile(model)
    compiled(x).square().sum().backward()
    ours = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    for found, parameter in zip(ours, model.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-5)
    return list(compiled.last_trace("backward").ops)


def made(ops: list[torch.fx.Node], *shape: int) -> int:
    """The place in the order of the first product of this shape."""
    shapes = [getattr(node.meta.get("val"), "shape", None) for node in ops]
    return next(k for k, node in enumerate(ops) if "mm" in node.name and shapes[k] == shape)


def test_gradients_larger_than_activations_come_last() -> None:
    ops = backward(Pooled(inner=256, last=512), torch.randn(1024, 32))
    assert made(ops, 512, 512) > made(ops, 1024, 256)


def test_gradients_that_gain_little_stay_where_they_are() -> None:
    ops = backward(Pooled(inner=256, last=48), torch.randn(1024, 32))
    assert made(ops, 48, 48) < made(ops, 1024, 256)


def made_up(seed: int) -> list[Group]:
    """A program of random sizes: each group makes one value and reads some earlier ones."""
    draw = random.Random(seed)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    nodes[0].meta = {"val": torch.empty(64, device="meta"), "saved": True}
    groups = []
    for index in range(40):
        read = draw.sample(nodes, min(len(nodes), draw.randint(1, 3)))
        node = graph.call_function(torch.ops.aten.cat.default, (read,))
        node.meta = {"val": torch.empty(draw.choice([1, 8, 64, 512]), device="meta")}
        needs = {nodes.index(source) - 1 for source in read if source is not nodes[0]}
        nodes.append(node)
        groups.append(Group(index, None, [node], needs))
    graph.output([node for node in nodes[1:] if not node.users or draw.random() < 0.1])
    return groups


def plain_peak(groups: list[Group]) -> int:
    """The definition: before each group, what is there and read again or returned; and what it makes."""
    most = 0
    for place in range(len(groups)):
        after = {node for group in groups[place:] for node in group.nodes}
        before = [node for group in groups[:place] for node in group.nodes]
        inputs = {s for group in groups for n in group.nodes for s in n.all_input_nodes}
        alive = [
            node
            for node in (*before, *(n for n in inputs if n.op == "placeholder"))
            if any(user in after or user.op == "output" for user in node.users)
        ]
        bytes = sum(node.meta["val"].nbytes for node in (*alive, *groups[place].nodes))
        most = max(most, bytes)
    return most


@pytest.mark.parametrize("seed", range(30))
def test_any_program(seed: int) -> None:
    groups = made_up(seed)
    later = order._with_ends_later(groups)
    assert sorted(group.index for group in later) == list(range(len(groups)))
    done: set[int] = set()
    for group in later:
        assert group.needs <= done
        done.add(group.index)
    for found in (groups, later):
        assert order.peak(found) == plain_peak(found)
    chosen = order.for_memory(groups)
    assert order.peak(chosen) <= order.peak(groups)
    assert chosen == groups or order.peak(chosen) < order.MOST * order.peak(groups)


def test_none() -> None:
    assert order.for_memory([]) == []


def test_parts_of_a_split_lie_in_one_memory() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.mm.default, (x, x))
    parts = graph.call_function(torch.ops.aten.split.Tensor, (made, 2, 1))
    part = graph.call_function(operator.getitem, (parts, 1))
    seen = graph.call_function(torch.ops.aten.t.default, (part,))
    pair = graph.call_function(torch.ops.aten.max.dim, (seen, 0))
    place = graph.call_function(operator.getitem, (pair, 1))
    assert [memory_of(node) for node in (seen, part, parts, place)] == [made, made, made, place]
