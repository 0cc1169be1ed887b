"""Which values of a trace leave its host program, and which views of them autograd must know as views.

In: the steps of a trace. Out: sets of nodes. A view that is tracked shares its base's version counter; it is made by a
call of Python. Others are made by torch's C interface in a third of the time.
"""

from __future__ import annotations

import collections
from collections.abc import Set
from typing import Any

import torch
from torch import fx

from fulgurite.host.region import as_fused_region
from fulgurite.trace.cost import is_view
from fulgurite.trace.node_meta import aten_op
from fulgurite.trace.region import Region
from fulgurite.trace.steps import Step, StepList


def find_escaping(steps: StepList) -> set[fx.Node]:
    """Values that leave the program or are written to, and the values that they are views of.

    Autograd must know which of them share memory: a write to one changes the version of all.
    """
    found = {value for value in _as_list(steps.outputs) if isinstance(value, fx.Node)}
    for step in reversed(steps.steps):
        found.update(_sources(step, found))
    return found


def find_sole_views(steps: StepList) -> set[fx.Node]:
    """Views that are all that leaves the program of memory that a library call made.

    Nobody can write to that memory through another tensor: autograd need not know the base.
    """
    roots: dict[fx.Node, fx.Node] = {}
    shared: set[fx.Node] = set()  # memory that is written to, or that several results may use
    for step in steps.steps:
        op = aten_op(step.node)
        is_op = isinstance(op, torch._ops.OpOverload)
        if is_op and is_view(step.node) and len(step.outputs) == 1:
            node, source = step.outputs[0], step.node.all_input_nodes[0]
            if node is not None:
                roots[node] = roots.get(source, source)
        elif is_op and not op._schema.is_mutable and not is_view(step.node):
            roots.update((node, node) for node in step.outputs if node is not None)
        else:
            used = (*step.node.all_input_nodes, *step.outputs)
            shared.update(roots[node] for node in used if node in roots)
    made = {root for root in roots.values() if root in roots} - shared
    returned = {value for value in _as_list(steps.outputs) if isinstance(value, fx.Node)}
    counts = collections.Counter(roots.get(node, node) for node in returned)
    return {node for node, root in roots.items() if root in made and counts[root] == 1}


def _sources(step: Step, escaping: Set[fx.Node]) -> list[fx.Node]:
    """What the step writes to, and what its escaping results may be views of."""
    node, op = step.node, aten_op(step.node)
    if isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable:
        return list(node.all_input_nodes)
    if not any(result in escaping for result in step.outputs):
        return []
    if isinstance(node.target, Region):
        fused = as_fused_region(node.target.call)
        if fused is None or len(step.outputs) != len(fused.region.outputs):
            return list(node.all_input_nodes)
        pairs = zip(fused.region.outputs, step.outputs, strict=True)
        names = {output.name for output, result in pairs if result in escaping}
        arguments = zip(fused.region.arguments, node.args, strict=True)
        return [
            value
            for argument, value in arguments
            if isinstance(value, fx.Node) and getattr(argument, "name", None) in names
        ]
    return list(node.all_input_nodes) if is_view(node) else []


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
