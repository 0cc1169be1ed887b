"""Which nodes may be dropped, merged or reordered.

In: nodes of a functional graph. Out: answers from the op's schema and tags.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.fx.experimental import sym_node

from fulgurite.trace.cost import is_view
from fulgurite.trace.mutations import is_input_mutation, mutated_inputs
from fulgurite.trace.node_meta import aten_op, has_side_effect

# functions of tuples, and of sizes and other numbers
_PURE_FUNCTIONS = {
    *(operator.getitem, operator.not_, torch.sym_int, torch.sym_sum),
    *sym_node.METHOD_TO_OPERATOR.values(),
}


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a random generator, so that its position among draws matters."""
    tags = getattr(aten_op(node), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_pure(node: fx.Node) -> bool:
    """Whether the node has no effect but its value, which depends on its arguments alone."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    target: Any = aten_op(node)
    if target in _PURE_FUNCTIONS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or has_side_effect(node):
        return False
    schema = target._schema
    if schema.is_mutable or not schema.returns or target.namespace.startswith("_c10d"):
        return False
    return not is_random(node)


def is_ordered(node: fx.Node) -> bool:
    """Whether the node must stay in order with other such nodes: random ops, collectives, assertions.

    An input mutation is not ordered in this sense: it must follow every reader of the input
    (`memory_readers`).
    """
    calls = node.op in ("call_function", "call_method", "call_module")
    return calls and not is_pure(node) and not is_input_mutation(node)


def memory_readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that read a value's memory, also through views, and don't write to it."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        above = stack.pop()
        for user in above.users:
            if user in found or user.op == "output":
                continue
            if node not in mutated_inputs(user):
                found.add(user)
                if _may_alias(user):
                    stack.append(user)
    return found


def find_escaping(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory the caller can see: outputs, and what outputs are views of.

    Merging or folding one of them would make two outputs share memory.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user.op == "output" or (user in found and _may_alias(user)) for user in node.users):
            found.add(node)
    return found


def allocates_memory(node: fx.Node) -> bool:
    """Whether the node's value has memory of its own."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_view(node)


def _may_alias(node: fx.Node) -> bool:
    return is_view(node) or not isinstance(node.target, torch._ops.OpOverload)
