"""Fuse writes to inputs that no region stores into one call.

In: a graph with nodes `input.copy_(value)`. Out: the same graph with one `torch._foreach_copy_` at its
end for all copies of the same dtypes and devices. On a GPU that is a launch or two instead of one each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fulgurite.executors.torch import TORCH
from fulgurite.trace.cost import is_view
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import fake_value, set_executor, set_fake_value

aten = torch.ops.aten
MIN_WRITES = 2  # a single write reads better as it is


def fuse_input_writes(module: fx.GraphModule) -> None:
    """Fuse the writes of a graph, one call for each pair of device and dtype."""
    writes: dict[Any, list[fx.Node]] = {}  # by device and dtype
    for node in module.graph.nodes:
        if node.target is not aten.copy_.default or not mutated_inputs(node):
            continue
        if _is_computed_value(node.args[1]):
            target, value = fake_value(node.args[0]), fake_value(node.args[1])
            key = (target.device, target.dtype, value.device, value.dtype)
            writes.setdefault(key, []).append(node)
    output = module.graph.output_node()
    for nodes in writes.values():
        if len(nodes) < MIN_WRITES:
            continue
        with module.graph.inserting_before(output):
            pairs = ([n.args[0] for n in nodes], [n.args[1] for n in nodes])
            fused = module.graph.call_function(aten._foreach_copy_.default, pairs)
        set_fake_value(fused, None)
        set_executor(fused, TORCH.name)
        for node in nodes:
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)


def _is_computed_value(value: Any) -> bool:
    """Whether the value is no input and no view of one: another write could change that first."""
    while isinstance(value, fx.Node) and value.op == "call_function" and is_view(value):
        value = value.all_input_nodes[0]
    return isinstance(value, fx.Node) and value.op == "call_function"
