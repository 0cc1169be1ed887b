"""What the observing transforms share: adding a call that only looks, or times, or marks.

In: a claimed Trace. Out: the same with extra calls, each an *effect*: kept in place, never merged or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fulgurite.trace import source_of
from fulgurite.trace.cost import op_of
from fulgurite.trace.region import Region

EXECUTOR = "observer"


def add_effect(graph: fx.Graph, function: Callable[..., Any], *arguments: Any) -> fx.Node:
    """A call of `function` at the graph's insertion point."""
    node = graph.call_function(function, arguments)
    node.meta = {"val": None, "effect": True, "executor": EXECUTOR}
    return node


def label(node: fx.Node) -> str:
    """`aten.log.default`, or the name of a fused region."""
    return node.target.name if isinstance(node.target, Region) else str(op_of(node))


def place(node: fx.Node) -> str:
    return str(source_of(node))
