"""Frames of a row program: the blocks over which its steps are computed.

In: steps of a row program with their loops. Out: for each set of loops a `Frame`: the rows of the
program as the first dimension of a block, then one dimension a loop, padded to a power of two. A
value of one frame is read in another one with extra dimensions of size 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.loop_nest import Local, LoopNest


@dataclass(frozen=True)
class Frame:
    """A block of a row program. `axes` have names of their own: the first is the row."""

    loops: tuple[Axis, ...]  # of the nest, in the order of its body
    axes: tuple[Axis, ...]
    blocks: tuple[int, ...]

    @property
    def shape(self) -> str:
        return f"[{', '.join(map(str, self.blocks))}]"

    @property
    def row_points(self) -> int:
        total = 1
        for block in self.blocks[1:]:
            total *= block
        return total

    def rename(self, row: Axis) -> dict[Axis, Index]:
        """Returns the frame's own axes, by those of the nest."""
        pairs = zip((row, *self.loops), self.axes, strict=True)
        return {old: indices.from_atom(new) for old, new in pairs}


def make_frames(nest: LoopNest, sizes: Mapping[Axis, int]) -> dict[tuple[Axis, ...], Frame]:
    """Returns a frame for every set of loops over which a step has values, by these loops."""
    (row,) = nest.grid
    found: dict[tuple[Axis, ...], Frame] = {}
    for step in nest.locals.values():
        for loops in (order_loops(nest, value_loops(step)), order_loops(nest, step_loops(step))):
            if loops not in found:
                suffix = str(len(found)) if found else ""
                axes = tuple(Axis(f"{axis.name}{suffix}", axis.size) for axis in (row, *loops))
                blocks = tuple(sizes[axis] for axis in (row, *loops))
                found[loops] = Frame(loops, axes, blocks)
    return found


def order_loops(nest: LoopNest, loops: set[Axis]) -> tuple[Axis, ...]:
    return tuple(axis for axis in nest.body if axis in loops)


def value_loops(step: Local) -> set[Axis]:
    """The loops of a step's values."""
    return set(step.axes)


def step_loops(step: Local) -> set[Axis]:
    """The loops of what a step computes: with those that it reduces over, without ranks."""
    ranked = step.rank.axes() if step.rank is not None else set()
    return (set(step.axes) | set(step.reduced_axes)) - ranked
