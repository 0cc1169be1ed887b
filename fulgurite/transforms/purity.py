"""Which nodes may be dropped, merged or computed early.

In: nodes of a functional graph. Out: yes or no, by the op's schema and tags.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fulgurite.trace.cost import is_view, op_of
from fulgurite.trace.writes import writes_only_inputs, written

_PURE_FUNCTIONS = {
    *(operator.getitem, operator.add, operator.sub, operator.mul, operator.truediv),
    *(operator.floordiv, operator.mod, operator.pow, operator.neg, operator.pos),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
    *(operator.and_, operator.or_, operator.not_),
    *(torch.sym_max, torch.sym_min, torch.sym_float, torch.sym_int, torch.sym_not, torch.sym_ite),
}


def is_random(node: fx.Node) -> bool:
    """Draws from a generator, so its place in the order of draws matters."""
    tags = getattr(op_of(node), "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def is_pure(node: fx.Node) -> bool:
    """Its only effect is its value, which depends on its arguments alone."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function":
        return False
    target: Any = op_of(node)
    if target in _PURE_FUNCTIONS:
        return True
    if not isinstance(target, torch._ops.OpOverload) or node.meta.get("effect"):
        return False
    schema = target._schema
    if schema.is_mutable or not schema.returns or target.namespace.startswith("_c10d"):
        return False
    return not is_random(node)


def is_ordered(node: fx.Node) -> bool:
    """Must keep its place among the other ordered nodes: randomness, collectives, assertions, effects.

    A write to an input has another place to keep: after everything that reads the input (`readers`).
    """
    calls = node.op in ("call_function", "call_method", "call_module")
    return calls and not is_pure(node) and not writes_only_inputs(node)


def readers(node: fx.Node) -> set[fx.Node]:
    """The nodes that read a value's memory, through views of it too, and don't write to it."""
    found: set[fx.Node] = set()
    stack = [node]
    while stack:
        above = stack.pop()
        for user in above.users:
            if user in found or user.op == "output":
                continue
            if node not in written(user):
                found.add(user)
                if _may_alias(user):
                    stack.append(user)
    return found


def escaping(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory the caller may see: outputs, and what outputs are views of.

    Merging or folding one of these would make two results share memory that didn't before.
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user.op == "output" or (user in found and _may_alias(user)) for user in node.users):
            found.add(node)
    return found


def makes_memory(node: fx.Node) -> bool:
    """Its value lies in memory that nothing before it can see."""
    return isinstance(node.target, torch._ops.OpOverload) and not is_view(node)


def _may_alias(node: fx.Node) -> bool:
    return is_view(node) or not isinstance(node.target, torch._ops.OpOverload)
