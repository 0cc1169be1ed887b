"""Profiler ranges by module path.

In: a claimed Trace. Out: the same with a profiler range for each of the user's modules. `torch.profiler`
shows the ranges, and so does NVTX on a GPU.

    compiled = fulgurite.compile(model, transforms=[fulgurite.transforms.annotate])
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import fx

from fulgurite.trace import Trace, source_of
from fulgurite.transforms.base import transform
from fulgurite.transforms.instrument import add_effect


@transform(phase="after_claim")
def annotate(trace: Trace) -> Trace:
    """Open a profiler range per module path, in the order of execution."""

    def change(graph: fx.Graph) -> None:
        current = ""
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            source = source_of(node)
            path = f"{trace.kind} {source.module or source.location or 'no module'}"
            if path != current:
                with graph.inserting_before(node):
                    add_effect(graph, enter_range, path)
                current = path
        if current:
            with graph.inserting_before(graph.output_node()):
                add_effect(graph, leave_range)

    return trace.edit(change)


class _OpenRange(threading.local):
    """The open range of this thread."""

    record: Any = None


_open_range = _OpenRange()


def enter_range(path: str) -> None:
    """Close the open range, if any, and open a new one."""
    leave_range()
    _open_range.record = torch.profiler.record_function(path)
    _open_range.record.__enter__()
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(path)


def leave_range() -> None:
    if _open_range.record is None:
        return
    record, _open_range.record = _open_range.record, None
    record.__exit__(None, None, None)
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()
