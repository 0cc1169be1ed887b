"""Memory order: large gradients come last, and nothing else changes."""

from __future__ import annotations

import operator
import random

import pytest
import torch
from torch import Tensor, nn

from fulgurite.compile import compile
from fulgurite.executors import memory_order
from fulgurite.executors.grouping import Group
from fulgurite.trace.cost import view_base
from fulgurite.trace.node_meta import set_fake_value, set_saved_for_backward


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


def test_small_gains_keep_the_program_order() -> None:
    ops = backward(Pooled(inner=256, last=48), torch.randn(1024, 32))
    assert made(ops, 48, 48) < made(ops, 1024, 256)


def random_groups(seed: int) -> list[Group]:
    """A program of random sizes: each group makes one value and reads some earlier ones."""
    draw = random.Random(seed)
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    set_fake_value(nodes[0], torch.empty(64, device="meta"))
    set_saved_for_backward(nodes[0], True)
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


def reference_peak(groups: list[Group]) -> int:
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
def test_random_programs(seed: int) -> None:
    groups = random_groups(seed)
    later = memory_order._delay_terminal_groups(groups)
    assert sorted(group.index for group in later) == list(range(len(groups)))
    done: set[int] = set()
    for group in later:
        assert group.needs <= done
        done.add(group.index)
    for found in (groups, later):
        assert memory_order.peak_bytes(found) == reference_peak(found)
    chosen = memory_order.reorder_for_memory(groups)
    assert memory_order.peak_bytes(chosen) <= memory_order.peak_bytes(groups)
    assert chosen == groups or memory_order.peak_bytes(
        chosen
    ) < memory_order.MAX_PEAK_RATIO * memory_order.peak_bytes(groups)


def test_no_groups() -> None:
    assert memory_order.reorder_for_memory([]) == []


def test_chunks_of_a_split_share_one_buffer() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    made = graph.call_function(torch.ops.aten.mm.default, (x, x))
    parts = graph.call_function(torch.ops.aten.split.Tensor, (made, 2, 1))
    part = graph.call_function(operator.getitem, (parts, 1))
    seen = graph.call_function(torch.ops.aten.t.default, (part,))
    pair = graph.call_function(torch.ops.aten.max.dim, (seen, 0))
    place = graph.call_function(operator.getitem, (pair, 1))
    assert [view_base(node) for node in (seen, part, parts, place)] == [made, made, made, place]
