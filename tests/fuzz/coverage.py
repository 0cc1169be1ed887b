"""Which ops of the fuser's tables the programs contained.

In: a compiled function. Out: how often each op was in its graphs, before and after decompositions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from fulgurite.fuser.frontend.lower_graph import (
    ELEMENTWISE_LOWERINGS,
    STATEMENT_LOWERINGS,
    VIEW_LOWERINGS,
    get_op_name,
)

STAGES = ("functional", "claimed")
# Ops of the tables that no ATen graph of a program contains: prims, and those of other packages
UNREACHABLE = {"iota"}


def all_ops() -> set[str]:
    """The ops that the fuser lowers."""
    return {*ELEMENTWISE_LOWERINGS, *VIEW_LOWERINGS, *STATEMENT_LOWERINGS} - UNREACHABLE


def count_ops(compiled: Any) -> Counter[str]:
    """The ops in the graphs of a compiled function, by name; an op is counted once per stage."""
    found: Counter[str] = Counter()
    for record in compiled.graphs:
        for trace in record.history:
            if trace.stage in STAGES:
                names = (get_op_name(node.target) for node in trace.graph.nodes)
                found.update(name for name in names if name is not None)
    return found
