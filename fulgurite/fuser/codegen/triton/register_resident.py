"""Blocks of a row that are read once and kept in registers, as narrow as memory has them, for every walk over it.

In: a `Writer` whose schedule keeps blocks. Out: lines that read them into a tuple, one element a block, and the walks over
it: loops that Triton unrolls.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.codegen.triton.aligned_rows import block_positions, edge_positions
from fulgurite.fuser.codegen.triton.writer import Writer
from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.schedule.gpu.register_resident import kept_loads


@dataclass(frozen=True)
class Walk:
    """One loop over blocks of the body."""

    steps: str
    filled: bool | None  # are all its blocks? None: each looks
    kept: bool = False  # by an earlier reading


def extent(w: Writer) -> tuple[int, int]:
    """How far blocks reach at most, and up to where they are full in every row."""
    (axis,) = w.nest.body
    size, block, granule = axis.size.constant, w.schedule.sizes[axis], w.schedule.granule or 1
    return size // granule * granule, (size - granule + 1) // granule * granule // block * block


def kept_end(w: Writer) -> int:
    """Where the part of a row ends that is kept."""
    if not w.schedule.kept:
        return 0
    (axis,) = w.nest.body
    return min(w.schedule.kept * w.schedule.sizes[axis], extent(w)[0])


def kept_walks(w: Writer) -> list[Walk]:
    (axis,) = w.nest.body
    end, block = kept_end(w), w.schedule.sizes[axis]
    full = min(extent(w)[1], end)
    found = []
    if full:
        found.append(Walk(f"tl.static_range(0, {full}, {block})", True, True))
    if full < end:
        found.append(Walk(f"tl.static_range({full}, {end}, {block})", False, True))
    return found


def read_kept(w: Writer) -> None:
    """Reads what is kept: all of it is under way before anything waits."""
    b = w.body
    if not w.schedule.kept:
        return
    (axis,) = w.nest.body
    w.kept = {
        load: b.fresh(f"{b.names[load.name]}_kept")
        for load in kept_loads(w.nest, w.facts, w.schedule.passes)
    }
    if w.aligned is not None:
        with b.loop(f"for {b.fresh('edge')} in tl.static_range(1):"):
            edge_positions(w)
            for load, name in w.kept.items():
                w.edges[load] = b.fresh(f"{name}_edges")
                b.line(f"{w.edges[load]} = {b.read_text(load, b.mask_text(b.axes(load)))}")
    for name in w.kept.values():
        b.line(f"{name} = ()")
    for walk in kept_walks(w):
        first = b.fresh(f"{axis.name}0")
        with b.loop(f"for {first} in {walk.steps}:"):
            block_positions(w, first, walk.filled)
            for load, name in w.kept.items():
                b.line(f"{name} += ({b.read_text(load, b.mask_text(b.axes(load)))},)")


def kept_texts(w: Writer, first: str) -> dict[Load, str]:
    """Each kept block that starts at `first`, as text."""
    (axis,) = w.nest.body
    block = w.schedule.sizes[axis]
    return {load: f"{name}[{first} // {block}]" for load, name in w.kept.items()}
