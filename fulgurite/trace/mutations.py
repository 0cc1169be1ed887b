"""Input mutations: the only side effect that functional traces have.

In: a node. Out: the graph inputs that it writes to. If a program writes to its inputs (batch-norm running
statistics, a KV cache), AOTAutograd ends the graph with one line per input:

    running_mean.copy_(new_mean)

Regions may include these lines, and the final trace merges the remaining ones.
"""

from __future__ import annotations

import torch
from torch import fx

from fulgurite.trace.node_meta import aten_op
from fulgurite.trace.region import Region


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """The graph inputs that the node writes to."""
    if node.op != "call_function":
        return []
    if isinstance(node.target, Region):
        nodes = node.target.module.graph.nodes
        placeholders = [n for n in nodes if n.op == "placeholder"]
        mutated = {n for inner in nodes for n in mutated_inputs(inner)}
        return [
            argument
            for argument, placeholder in zip(node.args, placeholders, strict=True)
            if placeholder in mutated and isinstance(argument, fx.Node)
        ]
    if aten_op(node) is torch.ops.aten.copy_.default:
        targets = [node.args[0]]
    elif aten_op(node) is torch.ops.aten._foreach_copy_.default:
        targets = list(node.args[0])  # type: ignore[arg-type]
    else:
        return []
    return [n for n in targets if isinstance(n, fx.Node) and n.op == "placeholder"]


def is_input_mutation(node: fx.Node) -> bool:
    """Whether the node does nothing but write to inputs."""
    return bool(mutated_inputs(node)) and not isinstance(node.target, Region)
