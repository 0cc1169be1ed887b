"""Rows that start anywhere in memory, walked in blocks that start at multiples of eight bytes.

In: a `Writer` whose schedule has a granule. Out: lines that say where a row's first multiple is, the positions of a block
from there on, and the block of the few elements before it and after the last. (Without a granule: from the row's start.)
"""

from __future__ import annotations

from fulgurite.fuser.codegen.triton.source_lines import Loop
from fulgurite.fuser.codegen.triton.writer import AlignedRow, Writer
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.schedule.gpu.aligned_rows import row_place


def open_rows(w: Writer) -> None:
    """Where the aligned part of this program's row starts, and how long it is."""
    granule = w.schedule.granule
    if not granule:
        return
    b = w.body
    (axis,) = w.nest.body
    index = row_place(w.nest)
    assert index is not None, "accesses of a row are at different places"
    row, size = b.index(index - indices.of_atom(axis)), axis.size.constant
    before, start, inner = (b.fresh(name) for name in ("before", "start", "inner"))
    b.line(f"{before} = ({granule} - ({row}) % {granule}) % {granule}")
    b.line(f"{start} = tl.multiple_of({row} + {before}, {granule})")
    b.line(f"{inner} = tl.multiple_of(({size} - {before}) // {granule} * {granule}, {granule})")
    w.aligned = AlignedRow(index, before, start, inner)


def block_positions(w: Writer, first: str, filled: bool | None) -> None:
    """The body's axis as the block that starts at `first`."""
    b = w.body
    (axis,) = w.nest.body
    block = w.schedule.sizes[axis]
    text = f"{first} + tl.arange(0, {block})" + (".to(tl.int64)" if w.wide else "")
    if w.aligned is None:
        w.block_axis(axis, text, block, filled)
        return
    along, mask = b.fresh("along"), None if filled else f"{axis.name}_in"
    b.head(f"{along} = {text}")
    b.head(f"{axis.name} = {w.aligned.before} + {along}")
    if mask:
        b.head(f"{mask} = {along} < {w.aligned.inner}")
    b.loops[axis] = Loop(axis, block, b.depth, mask)
    b.places = {w.aligned.index: f"{w.aligned.start} + {along}"}


def edge_positions(w: Writer) -> None:
    """The body's axis as the elements before the aligned part and after it."""
    b, granule, row = w.body, w.schedule.granule, w.aligned
    assert row is not None, "a row without edges"
    (axis,) = w.nest.body
    j, shift = axis.name, axis.size.constant - 2 * granule
    wide = ".to(tl.int64)" if w.wide else ""
    b.head(f"{j} = tl.arange(0, {2 * granule}){wide}")
    b.head(f"{j} = tl.where({j} < {granule}, {j}, {j} + {shift})")
    b.head(f"{j}_in = ({j} < {row.before}) | ({j} >= {row.before} + {row.inner})")
    b.loops[axis] = Loop(axis, 2 * granule, b.depth, f"{j}_in")
    b.places = {}
