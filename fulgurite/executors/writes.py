"""Writes to inputs that no region took in, as one call.

In: a graph with lines `input.copy_(value)`. Out: the same graph with one `torch._foreach_copy_` for all that are
alike, at its end: on a GPU a launch or two in the place of one each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fulgurite.executors.torch import TORCH
from fulgurite.trace.cost import is_view
from fulgurite.trace.writes import written

aten = torch.ops.aten
FEWEST = 2  # a single one reads better as it is


def gather_writes(module: fx.GraphModule) -> None:
    """Join the writes of a graph, those of one device and dtype each."""
    alike: dict[Any, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.target is aten.copy_.default and written(node) and _is_fresh(node.args[1]):
            target, value = node.args[0].meta["val"], node.args[1].meta["val"]
            alike.setdefault((target.device, target.dtype, value.device, value.dtype), []).append(
                node
            )
    output = module.graph.output_node()
    for nodes in alike.values():
        if len(nodes) < FEWEST:
            continue
        with module.graph.inserting_before(output):
            pairs = ([n.args[0] for n in nodes], [n.args[1] for n in nodes])
            joined = module.graph.call_function(aten._foreach_copy_.default, pairs)
        joined.meta = {"val": None, "executor": TORCH.name}
        for node in nodes:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _is_fresh(value: Any) -> bool:
    """Not an input, nor a view of one, that another write of the same call may change."""
    while isinstance(value, fx.Node) and value.op == "call_function" and is_view(value):
        value = value.all_input_nodes[0]
    return isinstance(value, fx.Node) and value.op == "call_function"
