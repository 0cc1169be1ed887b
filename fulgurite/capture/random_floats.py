"""Random floats of Python (`random.uniform(a, b)`) in a captured graph: 0-d tensors of 64 bits.

In: a captured graph and its example inputs. Out: the same graph, with the inputs that it gets. TorchDynamo draws the
number anew at each call and passes it as a float64 tensor, but captures it as a tensor of the default dtype.
Arithmetic of such numbers stays in float64, as in Python. An op with other tensors takes the number in the default
dtype, so that its result has the dtype that a Python number gives; if that is float64, it takes all bits.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.source import RandomValueSource

from fulgurite.trace.node_meta import example_value

ARITHMETIC = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
     operator.floordiv, operator.mod}
)  # fmt: skip
WIDE = (torch.float64, torch.complex128)


def use_float64(module: fx.GraphModule, inputs: Sequence[Any]) -> Sequence[Any]:
    """Let random floats be what a call passes; return the example inputs of the changed graph."""
    placeholders = module.graph.find_nodes(op="placeholder")
    positions = [k for k, node in enumerate(placeholders) if _is_random_float(node)]
    if not positions:
        return inputs
    inputs = list(inputs)
    numbers: dict[fx.Node, None] = {}  # in the order of the graph
    for position in positions:
        numbers[placeholders[position]] = None
        inputs[position] = inputs[position].to(torch.float64)
    for node in module.graph.nodes:
        sources = node.all_input_nodes
        if node.target in ARITHMETIC and sources and all(source in numbers for source in sources):
            numbers[node] = None
    for node in numbers:
        dtype = example_value(node).dtype
        node.meta["example_value"] = example_value(node).to(torch.float64)
        _narrow(node, [user for user in node.users if user not in numbers], dtype)
    module.recompile()
    return inputs


def _is_random_float(node: fx.Node) -> bool:
    argument, value = node.meta.get("grapharg"), example_value(node)
    is_random = argument is not None and isinstance(argument.source, RandomValueSource)
    return is_random and isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _narrow(number: fx.Node, users: list[fx.Node], dtype: torch.dtype) -> None:
    """Let ops whose results are not of 64 bits take the number in the dtype that it was captured with."""
    others = [user for user in users if user.op != "output" and not _is_wide(user)]
    if not others or dtype == torch.float64:
        return
    with number.graph.inserting_after(number):
        narrow = number.graph.call_method("to", (number, dtype))
    narrow.meta["example_value"] = example_value(number).to(dtype)
    for user in others:
        user.replace_input_with(number, narrow)


def _is_wide(node: fx.Node) -> bool:
    return getattr(example_value(node), "dtype", None) in WIDE
