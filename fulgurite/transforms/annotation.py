"""Name the work in profiles by module path.

In: a claimed Trace. Out: the same with a range opened wherever the user's module changes: `torch.profiler`
shows it, and on a GPU so does NVTX.

    compiled = fulgurite.compile(model, transforms=[fulgurite.transforms.annotate])
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import fx

from fulgurite.trace import Trace, source_of
from fulgurite.transforms.base import transform
from fulgurite.transforms.observe import add_effect


@transform(phase="after_claim")
def annotate(trace: Trace) -> Trace:
    """Open a range per module path, in the order of execution."""

    def change(graph: fx.Graph) -> None:
        current = ""
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            source = source_of(node)
            path = f"{trace.kind} {source.module or source.place or 'outside modules'}"
            if path != current:
                with graph.inserting_before(node):
                    add_effect(graph, enter_range, path)
                current = path
        if current:
            with graph.inserting_before(graph.output_node()):
                add_effect(graph, leave_range)

    return trace.edited(change)


class _Open(threading.local):
    """The range that is open on this thread."""

    record: Any = None


_open = _Open()


def enter_range(path: str) -> None:
    """Close the open range, if any, and open another."""
    leave_range()
    _open.record = torch.profiler.record_function(path)
    _open.record.__enter__()
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(path)


def leave_range() -> None:
    if _open.record is None:
        return
    record, _open.record = _open.record, None
    record.__exit__(None, None, None)
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()
