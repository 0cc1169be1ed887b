"""Which ops of the fuser's tables the programs contained.

In: a compiled function. Out: how often each op was in its graphs, before and after decompositions.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from fulgurite.fuser.frontend.lower_graph import (
    ELEMENTWISE_LOWERINGS,
    STATEMENT_LOWERINGS,
    VIEW_LOWERINGS,
    get_op_name,
)

STAGES = ("functional", "claimed")
# Ops of the tables that no ATen graph of a program contains: prims, and what eager calls on a GPU only
UNREACHABLE = {"iota", "fma", "cudnn_grid_sampler"}


def all_ops() -> set[str]:
    """The ops that the fuser lowers, without those that AOTAutograd replaces by others."""
    known = {*ELEMENTWISE_LOWERINGS, *VIEW_LOWERINGS, *STATEMENT_LOWERINGS} - UNREACHABLE
    return {name for name in known if not _is_replaced(name)}


def _is_replaced(name: str) -> bool:
    """Whether every overload of an op is a composition of other ops, such as `square`."""
    packet = getattr(torch.ops.aten, name, None)
    names = [] if packet is None else [o for o in packet.overloads() if "out" not in o]
    ops = [getattr(packet, overload).name() for overload in names]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    ops = [op for op in ops if torch._C._dispatch_has_kernel(op)]
    return bool(ops) and all(has_kernel(op, "CompositeImplicitAutograd") for op in ops)


def count_ops(compiled: Any) -> Counter[str]:
    """The ops in the graphs of a compiled function, by name; an op is counted once per stage."""
    found: Counter[str] = Counter()
    for record in compiled.graphs:
        for trace in record.history:
            if trace.stage in STAGES:
                names = (get_op_name(node.target) for node in trace.graph.nodes)
                found.update(name for name in names if name is not None)
    return found
