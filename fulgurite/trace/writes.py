"""Writes to a graph's inputs: the one effect that functional traces have.

In: a node. Out: the inputs that it writes to. AOTAutograd ends a graph whose program writes to its inputs (the
running statistics of a batch norm, a cache) with one line each, which regions may take in and which the
final trace gathers:

    running_mean.copy_(new_mean)
"""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.trace.cost import op_of
from fulgurite.trace.region import Region


def written(node: fx.Node) -> list[fx.Node]:
    """The inputs of its graph that the node writes to."""
    if node.op != "call_function":
        return []
    if isinstance(node.target, Region):
        places = [n for n in node.target.module.graph.nodes if n.op == "placeholder"]
        inside = {n for inner in node.target.module.graph.nodes for n in written(inner)}
        return [
            given
            for given, place in zip(node.args, places, strict=True)
            if place in inside and isinstance(given, fx.Node)
        ]
    if op_of(node) is torch.ops.aten.copy_.default:
        targets = [node.args[0]]
    elif op_of(node) is torch.ops.aten._foreach_copy_.default:
        targets = list(node.args[0])  # type: ignore[arg-type]
    else:
        return []
    return [n for n in targets if isinstance(n, fx.Node) and n.op == "placeholder"]


def writes_only_inputs(node: fx.Node) -> bool:
    """Whether writing to inputs is all that the node does."""
    return bool(written(node)) and not isinstance(node.target, Region)
