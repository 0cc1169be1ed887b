"""What a GPU schedule is, and what the schedules share: sizes, contiguity, flattened loops.

In: loop nests. Out: `GpuSchedule`, which `codegen/triton` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.expression import Expression
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.index_rewrites import map_indirect, recombine_div_mod
from fulgurite.fuser.ir.loop_nest import LoopNest, order_axes, substitute_axes
from fulgurite.kernels.tuning import fuser_gpu as tuning


@dataclass(frozen=True)
class GpuSchedule:
    """The loops of one Triton kernel with every decision made."""

    kind: str
    nest: LoopNest
    block_axes: tuple[Axis, ...] = ()  # loops that are dimensions of a block, in order
    block_sizes: dict[Axis, int] = field(default_factory=dict)  # powers of two
    is_looped: bool = False  # the body is iterated in blocks
    passes: int = 1  # over the body
    online_softmax: dict[str, str] = field(default_factory=dict)  # sum of exponentials: its maximum
    welford: dict[str, str] = field(default_factory=dict)  # sum of squares about a mean: the sum
    num_programs: int = 0  # of a persistent kernel, which iterates over all rows
    num_splits: int = 0  # of the body, where rows are too few to fill the device
    num_warps: int = 4
    num_stages: int = 1  # pipeline depth: blocks whose loads are in flight at once
    resident_blocks: int = 0  # blocks of the body that stay in registers, in their storage dtype
    # Elements: blocks start at the first multiple of the peel width in memory, edges are peeled
    # off.
    peel_width: int = 0
    alternates_direction: bool = False  # odd passes run backwards: L2 holds a row's end longest
    rematerializes: bool = False  # after each reduction, row values are recomputed from the loads
    online_group: int = 1  # neighbouring elements that share one running maximum and sum

    def __str__(self) -> str:
        grid = " ".join(f"{a.name}<{a.size}" for a in self.nest.grid) or "1"
        body = " ".join(f"{a.name}<{a.size}" for a in self.nest.body)
        text = f"{self.kind}: {grid}" + (f" x {body}" if body else "")
        if self.block_axes:
            sizes = (f"{self.block_sizes[a]} {a.name}" for a in self.block_axes)
            text += f", blocks of {' x '.join(sizes)}"
        text += f", {self.num_warps} warps"
        if self.is_looped:
            passes = "pass" if self.passes == 1 else "passes"
            text += f", {self.passes} {passes} over {self.nest.body[0].name}"
        if self.resident_blocks:
            elements = self.resident_blocks * self.block_sizes[self.nest.body[0]]
            text += f", {elements} register-resident"
        if self.alternates_direction:
            text += ", alternating direction"
        if self.peel_width:
            text += f", peel width {self.peel_width}"
        if self.online_softmax:
            text += ", online softmax"
        if self.welford:
            text += ", Welford"
        if self.rematerializes:
            text += ", rematerialized"
        if self.num_programs:
            text += f", {self.num_programs} programs"
        if self.num_splits:
            text += f", {self.num_splits} splits"
        if self.num_stages > 1:
            text += f", {self.num_stages} stages"
        return text


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def previous_power_of_two(n: int) -> int:
    """The largest power of two that is not above n."""
    return 1 << (max(n, 1).bit_length() - 1)


def count_points(axes: tuple[Axis, ...]) -> int:
    total = 1
    for axis in axes:
        total *= size_hint(axis.size)
    return total


def max_itemsize(nest: LoopNest) -> int:
    """Bytes of the widest element that is read or written at every point."""
    inner = nest.axes[-1] if nest.axes else None
    sizes = [t.itemsize for t, index, _ in nest.accesses() if inner in index.axes()]
    return max(sizes, default=4)


def contiguous_bytes(nest: LoopNest, axis: Axis) -> int:
    """Bytes that the whole kernel reads and writes contiguously along this axis."""
    total = 0
    for tensor, index, _ in nest.accesses():
        if index.coefficient(axis) == 1:
            total += tensor.itemsize * count_points(tuple(index.axes()))
    return total


def choose_vector_axis(nest: LoopNest, axes: tuple[Axis, ...]) -> Axis | None:
    """The axis along which most bytes are contiguous."""
    if not axes:
        return None
    order = {axis: k for k, axis in enumerate(order_axes(nest, axes))}

    def score(axis: Axis) -> tuple[bool, int, int, int]:
        is_long = contiguous_extent(nest, axis) >= tuning.MIN_VECTOR_LENGTH
        return (is_long, contiguous_bytes(nest, axis), order[axis], size_hint(axis.size))

    return max(axes, key=score)


def contiguous_extent(nest: LoopNest, axis: Axis) -> int:
    """Contiguous points along this axis, times those of an axis that continues where it ends."""
    size = size_hint(axis.size)
    continuing = [
        size_hint(other.size)
        for _, index, _ in nest.accesses()
        if index.coefficient(axis) == 1
        for other in index.axes()
        if index.coefficient(other) == size
    ]
    return size * max(continuing, default=1)


def flatten_loops(nest: LoopNest, axes: tuple[Axis, ...]) -> LoopNest:
    """The nest with these neighbouring loops as one; indices divide it where accesses need that."""
    if len(axes) < 2:
        return nest
    flat = Axis("".join(a.name for a in axes), indices.product([a.size for a in axes]))
    replacements: dict[Axis, Index] = {}
    rest = indices.from_atom(flat)
    for axis in reversed(axes[1:]):
        replacements[axis] = indices.modulo(rest, axis.size)
        rest = indices.floordiv(rest, axis.size)
    replacements[axes[0]] = rest
    grid = _replace_axes(nest.grid, axes, flat)
    body = _replace_axes(nest.body, axes, flat)
    flattened = substitute_axes(nest, replacements, grid, body)

    def simplify(expression: Expression) -> Expression:
        return rewrite_expression(expression, lambda _: None, recombine_div_mod)

    return replace(
        flattened,
        locals={
            name: replace(local, expression=simplify(local.expression))
            for name, local in flattened.locals.items()
        },
        stores=tuple(
            replace(
                s,
                index=map_indirect(recombine_div_mod(s.index), simplify),
                value=simplify(s.value),
            )
            for s in flattened.stores
        ),
    )


def _replace_axes(group: tuple[Axis, ...], axes: tuple[Axis, ...], flat: Axis) -> tuple[Axis, ...]:
    if not group or axes[0] not in group:
        return group
    return tuple(flat if a == axes[0] else a for a in group if a not in axes[1:])
