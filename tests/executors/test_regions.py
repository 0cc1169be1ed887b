"""Regions: as large as dependencies allow, never a cycle, ordered ops in order."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import fulgurite
from fulgurite.executors.regions import lower_trace
from fulgurite.executors.torch import TORCH
from fulgurite.trace import Trace, verify
from fulgurite.trace.metadata import fill_metadata
from fulgurite.trace.node_meta import executor_of, set_executor


class FusingExecutor(fulgurite.Executor):
    name = "fuses"

    def claims(self, node):
        return True

    def lower(self, region):
        return region.forward


def random_trace(seed, length=40):
    """A random graph of adds whose nodes are claimed at random by a fusing executor or torch."""
    draw = random.Random(seed)
    graph = fx.Graph()
    mode = torch._subclasses.FakeTensorMode()
    values = []
    for position in range(3):
        node = graph.placeholder(f"x{position}")
        node.meta["val"] = mode.from_tensor(torch.zeros(4))
        values.append(node)
    for _ in range(length):
        left, right = draw.choice(values[-8:]), draw.choice(values)
        node = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
        set_executor(node, draw.choice(["fuses", "fuses", "torch"]))
        values.append(node)
    graph.output(tuple(values[-3:]))
    module = fx.GraphModule({}, graph)
    fill_metadata(module)
    return Trace(module, "inference", "claimed")


def test_random_graphs_are_right_and_have_few_regions():
    for seed in range(60):
        trace = random_trace(seed)
        final = lower_trace(trace, [FusingExecutor(), TORCH]).at_stage("final")
        verify(final, before=trace)
        inputs = [torch.randn(4) for _ in range(3)]
        torch.testing.assert_close(final.run(*inputs), trace.run(*inputs), rtol=0, atol=0)
        single = sum(executor_of(n) == "torch" for n in trace.ops)
        regions = sum(
            executor_of(n) == "fuses" and "getitem" not in str(n.target) for n in final.ops
        )
        assert regions <= single + 1


def test_one_executor_gives_one_region():
    trace = random_trace(0)
    for node in trace.ops:
        set_executor(node, "fuses")
    final = lower_trace(trace, [FusingExecutor(), TORCH])
    assert sum("getitem" not in str(n.target) for n in final.ops) == 1


def test_random_ops_keep_their_order_across_regions():
    class ClaimsRandom(FusingExecutor):
        name = "takes_random"

        def claims(self, node):
            return "rand_like" in str(node.target) or "mul" in str(node.target)

    def f(x):
        a = torch.rand_like(x)
        b = torch.randn_like(x)
        c = torch.rand_like(x)
        return a * 2, b * 3, c * 4

    x = torch.zeros(5)
    torch.manual_seed(0)
    expected = f(x)
    torch.manual_seed(0)
    torch.testing.assert_close(
        fulgurite.compile(f, executors=[ClaimsRandom(), "torch"])(x), expected
    )


def test_loaded_trace_lowers_its_regions_again():
    calls = []

    class Counts(FusingExecutor):
        name = "counts"

        def lower(self, region):
            calls.append(region)
            return region.forward

    fulgurite.register_executor(Counts())
    f = fulgurite.compile(lambda x, y: ((x + y) * 2, x.sum()), executors=["counts", "torch"])
    x, y = torch.randn(3), torch.randn(3)
    expected = f(x, y)
    assert len(calls) == 1
    torch.testing.assert_close(f.last_trace().load()(x, y), expected)
    assert len(calls) == 2


@pytest.mark.parametrize("label", [5, -1])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize(
    "f",
    [
        F.nll_loss,
        lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
        lambda x, y: F.cross_entropy(x.T.reshape(1, 5, 2, 2) * 2, y.view(1, 2, 2), reduction="sum"),
    ],
)
def test_errors_are_those_of_composite_ops(f, needs_grad, label):
    """A gather raises RuntimeError, the loss that was decomposed to it IndexError."""
    x, y = torch.randn(4, 5, requires_grad=needs_grad), torch.tensor([0, 1, 3, 2])
    compiled = fulgurite.compile(f)
    torch.testing.assert_close(compiled(x, y), f(x, y))
    y[2] = label
    for _ in range(2):
        with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
            compiled(x, y)
