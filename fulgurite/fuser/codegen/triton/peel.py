"""Peeled rows: rows that start anywhere in memory, iterated in aligned blocks.

In: a `KernelWriter` whose schedule has a peel width. Out: lines for the first aligned element of a
row, for the positions of a block from there on, and for the block of edges: the few elements before
and after. Without a peel width, blocks start at the row's start.
"""

from __future__ import annotations

from fulgurite.fuser.codegen.triton.source_lines import AxisBinding
from fulgurite.fuser.codegen.triton.writer import KernelWriter, PeeledRow
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.schedule.gpu.peel import find_row_index


def emit_peel_prologue(w: KernelWriter) -> None:
    """Where the aligned part of this program's row starts, and how long it is."""
    width = w.schedule.peel_width
    if not width:
        return
    b = w.body
    (axis,) = w.nest.body
    index = find_row_index(w.nest)
    assert index is not None, "accesses of a peeled row have different indices"
    row, size = b.print_index(index - indices.from_atom(axis)), axis.size.constant
    peeled = b.unique_name("peeled")
    start = b.unique_name("aligned_start")
    length = b.unique_name("aligned_length")
    b.emit(f"{peeled} = ({width} - ({row}) % {width}) % {width}")
    b.emit(f"{start} = tl.multiple_of({row} + {peeled}, {width})")
    b.emit(f"{length} = tl.multiple_of(({size} - {peeled}) // {width} * {width}, {width})")
    w.peeled_row = PeeledRow(index, peeled, start, length)


def emit_block_positions(w: KernelWriter, first: str, is_full: bool | None) -> None:
    """Binds the body's axis to the block that starts at `first`."""
    b = w.body
    (axis,) = w.nest.body
    block = w.schedule.block_sizes[axis]
    text = f"{first} + tl.arange(0, {block}){w.print_int64()}"
    if w.peeled_row is None:
        w.bind_block_axis(axis, text, block, is_full)
        return
    offset, mask = b.unique_name("offset"), None if is_full else f"{axis.name}_mask"
    b.emit_header(f"{offset} = {text}")
    b.emit_header(f"{axis.name} = {w.peeled_row.peeled} + {offset}")
    if mask:
        b.emit_header(f"{mask} = {offset} < {w.peeled_row.length}")
    b.bindings[axis] = AxisBinding(axis, block, b.depth, mask)
    b.index_texts = {w.peeled_row.index: f"{w.peeled_row.start} + {offset}"}


def emit_edge_positions(w: KernelWriter) -> None:
    """Binds the body's axis to the elements before and after the aligned part."""
    b, width, row = w.body, w.schedule.peel_width, w.peeled_row
    assert row is not None, "only a peeled row has edges"
    (axis,) = w.nest.body
    j, shift = axis.name, axis.size.constant - 2 * width
    b.emit_header(f"{j} = tl.arange(0, {2 * width}){w.print_int64()}")
    b.emit_header(f"{j} = tl.where({j} < {width}, {j}, {j} + {shift})")
    b.emit_header(f"{j}_mask = ({j} < {row.peeled}) | ({j} >= {row.peeled} + {row.length})")
    b.bindings[axis] = AxisBinding(axis, 2 * width, b.depth, f"{j}_mask")
    b.index_texts = {}
