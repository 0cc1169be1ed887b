"""Register-resident blocks of a row: loaded once, in their storage dtype, and used by every pass.

In: a `KernelWriter` whose schedule has resident blocks. Out: lines that load them into a tuple, one
element a block, and the loops over it, which Triton unrolls.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.codegen.triton.peel import emit_block_positions, emit_edge_positions
from fulgurite.fuser.codegen.triton.writer import KernelWriter
from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.schedule.gpu.register_resident import find_resident_loads


@dataclass(frozen=True)
class BlockLoop:
    """One loop over blocks of the body."""

    range: str
    is_full: bool | None  # are all its blocks? None: each needs a mask if the size says so
    is_resident: bool = False


def block_extent(w: KernelWriter) -> tuple[int, int]:
    """How far blocks reach at most, and up to where they are full in every row."""
    (axis,) = w.nest.body
    size, block = axis.size.constant, w.schedule.block_sizes[axis]
    width = w.schedule.peel_width or 1
    return size // width * width, (size - width + 1) // width * width // block * block


def resident_end(w: KernelWriter) -> int:
    """Where the resident part of a row ends."""
    if not w.schedule.resident_blocks:
        return 0
    (axis,) = w.nest.body
    return min(w.schedule.resident_blocks * w.schedule.block_sizes[axis], block_extent(w)[0])


def resident_loops(w: KernelWriter) -> list[BlockLoop]:
    (axis,) = w.nest.body
    end, block = resident_end(w), w.schedule.block_sizes[axis]
    full = min(block_extent(w)[1], end)
    loops = []
    if full:
        loops.append(BlockLoop(f"tl.static_range(0, {full}, {block})", True, True))
    if full < end:
        loops.append(BlockLoop(f"tl.static_range({full}, {end}, {block})", False, True))
    return loops


def emit_resident_loads(w: KernelWriter) -> None:
    """Loads all resident blocks: all loads are in flight before anything waits."""
    b = w.body
    if not w.schedule.resident_blocks:
        return
    (axis,) = w.nest.body
    w.resident = {
        load: b.unique_name(f"{b.names[load.name]}_regs")
        for load in find_resident_loads(w.nest, w.analysis, w.schedule.passes)
    }
    if w.peeled_row is not None:
        with b.indented(f"for {b.unique_name('edge')} in tl.static_range(1):"):
            emit_edge_positions(w)
            for load, name in w.resident.items():
                w.resident_edges[load] = b.unique_name(f"{name}_edges")
                b.emit(f"{w.resident_edges[load]} = {_print_load(w, load)}")
    for name in w.resident.values():
        b.emit(f"{name} = ()")
    for loop in resident_loops(w):
        first = b.unique_name(f"{axis.name}0")
        with b.indented(f"for {first} in {loop.range}:"):
            emit_block_positions(w, first, loop.is_full)
            for load, name in w.resident.items():
                b.emit(f"{name} += ({_print_load(w, load)},)")


def _print_load(w: KernelWriter, load: Load) -> str:
    return w.body.print_load_call(load, w.body.print_mask(w.body.find_axes(load)))


def resident_block_texts(w: KernelWriter, first: str) -> dict[Load, str]:
    """Each resident block that starts at `first`, as text."""
    (axis,) = w.nest.body
    block = w.schedule.block_sizes[axis]
    return {load: f"{name}[{first} // {block}]" for load, name in w.resident.items()}
