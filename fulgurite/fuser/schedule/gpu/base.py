"""What a GPU schedule is, and what the schedules share: sizes, contiguity, loops joined into one.

In: nests. Out: `GpuSchedule`, the nest with at most three grid loops and one body loop, and every decision a code
generator spells.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fulgurite.fuser.cost import number
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import recombine
from fulgurite.fuser.ir.loop_nest import Nest, order_axes, rewrite, substituted
from fulgurite.fuser.schedule.cpu.loop_order import SHORT


@dataclass(frozen=True)
class GpuSchedule:
    """One nest with every decision made."""

    kind: str
    nest: Nest
    blocks: tuple[Axis, ...] = ()  # loops that are dimensions of a block, in order
    sizes: dict[Axis, int] = field(default_factory=dict)  # of each block, a power of two
    looped: bool = False  # the body is walked in blocks
    passes: int = 1
    online: dict[str, str] = field(default_factory=dict)  # sum of exponentials: its maximum
    about: dict[str, str] = field(default_factory=dict)  # squares about a mean: its sum
    programs: int = 0  # that walk the rows, where the grid is reduced
    split: int = 0  # parts of the body, where rows are few
    warps: int = 4
    stages: int = 1  # blocks of a loop whose loads are under way at once
    kept: int = 0  # blocks of the body that stay in registers, as they were read, from walk to walk
    # elements: blocks start at the first multiple of so many in memory, edges are apart
    granule: int = 0
    back: bool = False  # every other walk goes from a row's end, which the cache has longest
    remade: bool = False  # values of a row are made again after each reduction, of what was read
    group: int = 1  # neighbouring elements that one running maximum and sum have in common

    def __str__(self) -> str:
        loops = " ".join(f"{a.name}<{a.size}" for a in self.nest.grid) or "1"
        body = " ".join(f"{a.name}<{a.size}" for a in self.nest.body)
        text = f"{self.kind}: {loops}" + (f" x {body}" if body else "")
        if self.blocks:
            text += ", blocks of " + " x ".join(f"{self.sizes[a]} {a.name}" for a in self.blocks)
        text += f", {self.warps} warps"
        if self.looped:
            times = "walk" if self.passes == 1 else "walks"
            text += f", {self.passes} {times} over {self.nest.body[0].name}"
        if self.kept:
            text += f", {self.kept * self.sizes[self.nest.body[0]]} kept"
        if self.back:
            text += ", to and fro"
        if self.granule:
            text += f", edges of {self.granule} apart"
        if self.online:
            text += ", maximum and exponentials together"
        if self.about:
            text += ", sum and squares together"
        if self.remade:
            text += ", values made again"
        if self.programs:
            text += f", {self.programs} programs walk the rows"
        if self.split:
            text += f", {self.split} parts"
        if self.stages > 1:
            text += f", {self.stages} blocks ahead"
        return text


def power_above(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def power_below(n: int) -> int:
    return 1 << (max(n, 1).bit_length() - 1)


def length(axes: tuple[Axis, ...]) -> int:
    total = 1
    for axis in axes:
        total *= number(axis.size)
    return total


def widest(nest: Nest) -> int:
    """Bytes of the widest element that is read or written at every point."""
    inner = nest.axes[-1] if nest.axes else None
    sizes = [t.itemsize for t, index, _ in nest.accesses() if inner in index.axes()]
    return max(sizes, default=4)


def runs(nest: Nest, axis: Axis) -> int:
    """Bytes that are read and written one after the other along this axis, in the whole kernel."""
    total = 0
    for tensor, index, _ in nest.accesses():
        if index.coefficient(axis) == 1:
            total += tensor.itemsize * length(tuple(index.axes()))
    return total


def vector_axis(nest: Nest, axes: tuple[Axis, ...]) -> Axis | None:
    """The axis along which most bytes are contiguous."""
    if not axes:
        return None
    order = {axis: k for k, axis in enumerate(order_axes(nest, axes))}

    def merit(axis: Axis) -> tuple[bool, int, int, int]:
        return (reach(nest, axis) >= SHORT, runs(nest, axis), order[axis], number(axis.size))

    return max(axes, key=merit)


def reach(nest: Nest, axis: Axis) -> int:
    """Points that lie one after the other from this axis on: its own, times those of an axis that goes on where it ends."""
    size = number(axis.size)
    further = [
        number(other.size)
        for _, index, _ in nest.accesses()
        if index.coefficient(axis) == 1
        for other in index.axes()
        if index.coefficient(other) == size
    ]
    return size * max(further, default=1)


def joined(nest: Nest, axes: tuple[Axis, ...]) -> Nest:
    """The nest with these neighbouring loops as one."""
    if len(axes) < 2:
        return nest
    one = Axis("".join(a.name for a in axes), indices.product([a.size for a in axes]))
    swap: dict[Axis, Index] = {}
    rest = indices.of_atom(one)
    for axis in reversed(axes[1:]):
        swap[axis] = indices.modulo(rest, axis.size)
        rest = indices.floordiv(rest, axis.size)
    swap[axes[0]] = rest
    grid = _replaced(nest.grid, axes, one)
    body = _replaced(nest.body, axes, one)
    changed = substituted(nest, swap, grid, body)

    def plain(expression: Expression) -> Expression:
        return rewrite(expression, lambda _: None, recombine)

    return replace(
        changed,
        locals={n: replace(x, expression=plain(x.expression)) for n, x in changed.locals.items()},
        stores=tuple(
            replace(s, index=recombine(s.index), value=plain(s.value)) for s in changed.stores
        ),
    )


def _replaced(group: tuple[Axis, ...], axes: tuple[Axis, ...], one: Axis) -> tuple[Axis, ...]:
    if not group or axes[0] not in group:
        return group
    return tuple(one if a == axes[0] else a for a in group if a not in axes[1:])
