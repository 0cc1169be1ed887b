"""Time per op, as a table.

In: a claimed Trace. Out: the same with every call timed. The times are collected in the `TimeOps` object,
which prints as a table.

    times = fulgurite.TimeOps()
    compiled = fulgurite.compile(model, transforms=[times.transform])
    compiled(x); print(times)
"""

from __future__ import annotations

import itertools
import time
import weakref
from dataclasses import dataclass

import torch
from torch import fx

from fulgurite.trace import Trace, source_of
from fulgurite.trace.cost import format_seconds
from fulgurite.trace.node_meta import has_side_effect
from fulgurite.transforms.base import Transform
from fulgurite.transforms.instrument import add_effect, op_label

_tables: weakref.WeakValueDictionary[int, TimeOps] = weakref.WeakValueDictionary()
_serial = itertools.count()


@dataclass
class Row:
    """One call of a trace: its number of runs and total time."""

    graph: str
    op: str
    where: str
    calls: int = 0
    seconds: float = 0.0


class TimeOps:
    """Collects the time of every call in functions compiled with `.transform`.

    Pass `times.transform` to `compile(transforms=[...])`, call the function, then `print(times)`.
    """

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.handle = next(_serial)
        self._started = 0.0
        _tables[self.handle] = self

    @property
    def transform(self) -> Transform:
        """The transform that adds the timers."""
        return Transform("time_ops", "after_claim", self._instrument)

    def _instrument(self, trace: Trace) -> Trace:
        def change(graph: fx.Graph) -> None:
            for node in list(graph.nodes):
                if node.op != "call_function" or has_side_effect(node):
                    continue
                source = source_of(node)
                where = " ".join(part for part in (source.module, source.location) if part)
                row = len(self.rows)
                self.rows.append(Row(f"{trace.kind} {trace.index}", op_label(node), where))
                with graph.inserting_before(node):
                    add_effect(graph, start_clock, self.handle)
                with graph.inserting_after(node):
                    add_effect(graph, stop_clock, self.handle, row)

        return trace.edit(change)

    def clear(self) -> None:
        """Reset all times, for example after a warm-up."""
        for row in self.rows:
            row.calls, row.seconds = 0, 0.0

    def __str__(self) -> str:
        rows = sorted((row for row in self.rows if row.calls), key=lambda row: -row.seconds)
        total = sum(row.seconds for row in rows) or 1.0
        lines = [f"{'time':>10}  {'share':>5}  {'calls':>5}  {'graph':<12}  {'op':<36}  where"]
        for row in rows:
            share = f"{100 * row.seconds / total:4.0f}%"
            lines.append(
                f"{format_seconds(row.seconds):>10}  {share:>5}  {row.calls:>5}  {row.graph:<12}  "
                f"{row.op:<36}  {row.where}"
            )
        return "\n".join(lines)


def start_clock(handle: int) -> None:
    table = _tables.get(handle)
    if table is not None:
        table._started = _now()


def stop_clock(handle: int, row: int) -> None:
    table = _tables.get(handle)
    if table is not None:
        table.rows[row].seconds += _now() - table._started
        table.rows[row].calls += 1


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
