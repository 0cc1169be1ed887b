"""Add the bias of a GPU convolution in a generated kernel.

In: a functional graph. Out: the same, with

    convolution(x, weight, bias)   →   convolution(x, weight, None) + bias[:, None, None]

torch adds the bias in a kernel of its own after cuDNN's. Here it fuses with what reads the convolution: a norm, an
activation. On CPUs the library adds it while it stores the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.trace import Trace
from fulgurite.trace.node_meta import copy_location, fake_value
from fulgurite.transforms.base import transform

aten = torch.ops.aten
BIAS = 2  # position of the argument


def has_biased_convolutions(trace: Trace) -> bool:
    return any(_is_biased_convolution(node) for node in trace.graph.nodes)


@transform
def split_convolution_bias(trace: Trace) -> Trace:
    """Add the bias of convolutions by an op of its own."""
    return trace.edit(split_bias_in_graph)


def split_bias_in_graph(graph: fx.Graph) -> None:
    """The same on a graph in place."""
    for node in list(graph.nodes):
        if not _is_biased_convolution(node):
            continue
        bias: Any = node.args[BIAS]
        dims = fake_value(node).dim()
        channels = 1 if dims == len(node.args[3]) + 2 else 0  # without a batch dimension: 0
        shape = [-1] + [1] * (dims - channels - 1)
        with graph.inserting_before(node):
            arguments = (*node.args[:BIAS], None, *node.args[BIAS + 1 :])
            product = graph.call_function(aten.convolution.default, arguments)
            column = graph.call_function(aten.view.default, (bias, shape))
            result = graph.call_function(aten.add.Tensor, (product, column))
        for new in (product, column, result):
            copy_location(node, new)
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _is_biased_convolution(node: fx.Node) -> bool:
    if node.target is not aten.convolution.default or not isinstance(node.args[BIAS], fx.Node):
        return False
    value = fake_value(node)
    return isinstance(value, Tensor) and adds_bias_separately(value)


def adds_bias_separately(value: Tensor) -> bool:
    """Whether torch adds the bias of such a convolution in a second kernel."""
    return value.device.type == "cuda"
