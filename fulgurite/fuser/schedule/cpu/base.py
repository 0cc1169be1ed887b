"""What a CPU schedule is, and how its SIMD axis is chosen.

In: a loop nest. Out: `CpuSchedule`, which `codegen/cpp` prints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fulgurite.fuser.ir.cost import count_elements, size_hint
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import LoopNest, order_axes
from fulgurite.fuser.schedule.cpu.row_pieces import RowPiece
from fulgurite.fuser.schedule.cpu.tiles import NO_TILES, Tiles
from fulgurite.kernels.tuning import fuser_cpu as tuning


@dataclass(frozen=True)
class CpuSchedule:
    """The loops of one C++ kernel with every decision made."""

    kind: str  # pointwise, rows, columns, scan, scatter, transpose or row_program
    nest: LoopNest  # loops from the outside in, `simd_axis` the last of its group
    simd_axis: Axis | None
    passes: int = 1  # over the body
    block: int = 0  # columns, scan, scatter and transpose: elements of the SIMD axis in a block
    splits_body: bool = False  # threads split the body, and their partial results are combined
    buffered_locals: tuple[str, ...] = ()  # kept in a row buffer from one pass to the next
    parallel_simd_loop: bool = False  # threads split the SIMD loop itself
    packed: bool = False  # columns: loads of several passes are packed into a buffer
    tiles: Tiles = NO_TILES  # columns: accesses along the body, through transposed buffers
    nontemporal_stores: tuple[str, ...] = ()  # results that bypass the caches
    prefetch_pass: int | None = None  # the pass that prefetches the next row
    pieces: tuple[RowPiece, ...] = ()  # of a pointwise row, if masks split it
    pads_tail: bool = False  # pointwise: the end of a row is a whole vector

    def __str__(self) -> str:
        grid = " ".join(f"{a.name}<{a.size}" for a in self.nest.grid) or "1"
        body = " ".join(f"{a.name}<{a.size}" for a in self.nest.body) or "1"
        text = f"{self.kind}: {grid} x {body}"
        if self.simd_axis is not None:
            text += f", SIMD over {self.simd_axis.name}"
        if self.passes > 1:
            text += f", {self.passes} passes"
        if self.block:
            text += f", blocks of {self.block}"
        if self.splits_body:
            text += ", body split among threads"
        if self.buffered_locals:
            text += f", buffers {', '.join(self.buffered_locals)}"
        if self.packed:
            text += ", packed loads"
        if self.tiles != NO_TILES:
            text += ", transposed tiles"
        if self.nontemporal_stores:
            text += ", non-temporal stores"
        if self.pads_tail:
            text += ", padded tail"
        if self.pieces:
            text += f", {len(self.pieces)} pieces of a row"
        return text


def contiguous_bytes_per_iteration(nest: LoopNest, axis: Axis) -> float:
    """Bytes that an iteration reads and writes contiguously along this axis; stores count twice.

    An access that is made once a row counts for one in as many iterations as the row has.
    """
    total = 0.0
    row = max(count_elements(tuple(axis.size for axis in nest.body)), 1)
    tables = {table.tensor.name for table in nest.tables}  # they stay in the L1 cache
    for tensor, index, is_store in nest.accesses():
        if tensor.name in tables:
            continue
        stride = index.coefficient(axis)
        weight = float(tensor.itemsize * (2 if is_store else 1))
        if all(index.coefficient(a) == 0 for a in nest.body):
            weight /= row
        if stride is not None and stride == 1:
            total += weight
        elif stride is not None and stride == 0:
            total += tuning.BROADCAST_WEIGHT * weight
    return total


def choose_simd_axis(nest: LoopNest, axes: Sequence[Axis]) -> Axis | None:
    """The axis along which most accesses are contiguous."""
    if not axes:
        return None
    order = {axis: k for k, axis in enumerate(order_axes(nest, tuple(axes)))}

    def score(axis: Axis) -> tuple[bool, float, int, int]:
        size = size_hint(axis.size)
        contiguous = contiguous_bytes_per_iteration(nest, axis)
        return (size >= tuning.MIN_SIMD_LENGTH, contiguous, order[axis], size)

    return max(axes, key=score)
