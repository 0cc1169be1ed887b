"""Finds which axes of different statements are the same loop.

In: a region whose axes are split (`split_axes`). Out: a loop id for every (statement, axis). Two
axes get the same id if some load connects them one to one.
"""

from __future__ import annotations

from fulgurite.fuser.ir.index import Axis, make_axes
from fulgurite.fuser.ir.statement import Region

StatementAxis = tuple[str, Axis]  # the statement's name, and one of its axes
StatementAxes = tuple[str, tuple[Axis, ...]]


class _UnionFind:
    """Union-find over axes. It never makes two axes of one statement the same loop."""

    def __init__(self) -> None:
        self.parent: dict[StatementAxis, StatementAxis] = {}
        self.owners: dict[StatementAxis, set[str]] = {}

    def find(self, member: StatementAxis) -> StatementAxis:
        if member not in self.parent:
            self.parent[member] = member
            self.owners[member] = {member[0]}
        root = member
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[member] != root:
            self.parent[member], member = root, self.parent[member]
        return root

    def union(self, a: StatementAxis, b: StatementAxis) -> None:
        a, b = self.find(a), self.find(b)
        if a == b:
            return
        if len(self.owners[a]) < len(self.owners[b]):
            a, b = b, a
        if not self.owners[a].isdisjoint(self.owners[b]):
            return
        self.parent[b] = a
        self.owners[a] |= self.owners.pop(b)


def assign_loop_ids(region: Region) -> dict[StatementAxis, int]:
    """Returns the id of the loop that iterates over each axis of each statement."""
    if region.loop_ids:
        return region.loop_ids
    loops = _UnionFind()
    axes_of = {t.name: make_axes(t.sizes) for t in region.tensors.values()}
    axes_of.update({s.name: s.axes for s in region.statements})
    inputs = {t.name for t in region.inputs}
    # Statements come before inputs: a computed value should share loops with its readers.
    for through_inputs in (False, True):
        for s in region.statements:
            for load in s.loads:
                if (load.name in inputs) != through_inputs:
                    continue
                for dim, index in enumerate(load.index):
                    axis = index.single_axis
                    source = axes_of[load.name][dim]
                    if axis is not None and axis in s.all_axes and axis.size == source.size:
                        loops.union((s.name, axis), (load.name, source))
    # The loops over real and imaginary parts are one loop. Kernels unroll it.
    parts = [(s.name, s.axes[-1]) for s in region.statements if s.tensor.is_view_as_real]
    for member in parts[1:]:
        loops.union(parts[0], member)
    _unite_slices(region, loops)
    numbers: dict[StatementAxis, int] = {}
    ids: dict[StatementAxis, int] = {}
    for s in region.statements:
        for axis in s.all_axes:
            root = loops.find((s.name, axis))
            ids[(s.name, axis)] = numbers.setdefault(root, len(numbers))
    region.loop_ids.update(ids)
    return ids


def _unite_slices(region: Region, loops: _UnionFind) -> None:
    """Makes the loops of slices of one buffer the same: one kernel can then store several."""
    firsts: dict[tuple[object, ...], StatementAxes] = {}
    for s in region.statements:
        part = region.slices.get(s.name)
        if part is not None:
            key = (part.buffer, s.tensor.sizes, s.tensor.strides)
            name, axes = firsts.setdefault(key, (s.name, s.axes))
            for axis, first in zip(s.axes, axes, strict=True):
                loops.union((name, first), (s.name, axis))
