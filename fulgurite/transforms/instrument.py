"""Instrumentation calls: shared by the transforms that check, time or annotate a trace.

In: the graph of a claimed Trace. Out: the same with extra calls. Each has a side effect, so that it stays
in place and is never merged or dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from fulgurite.trace import source_of
from fulgurite.trace.node_meta import aten_op, mark_side_effect, set_executor, set_fake_value
from fulgurite.trace.region import Region

INSTRUMENT_EXECUTOR = "instrument"


def add_effect(graph: fx.Graph, function: Callable[..., Any], *arguments: Any) -> fx.Node:
    """Add a call of `function` at the graph's insertion point."""
    node = graph.call_function(function, arguments)
    set_fake_value(node, None)
    mark_side_effect(node)
    set_executor(node, INSTRUMENT_EXECUTOR)
    return node


def op_label(node: fx.Node) -> str:
    """`aten.log.default`, or the name of a fused region."""
    return node.target.name if isinstance(node.target, Region) else str(aten_op(node))


def source_label(node: fx.Node) -> str:
    """The user's line of a node."""
    return str(source_of(node))
