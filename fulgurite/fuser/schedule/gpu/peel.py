"""Peeling of rows that do not start at a multiple of 8 bytes.

In: a nest of rows. Out: the peel width: how many elements make up an aligned access of 8 or 16
bytes. A row is then iterated from its first aligned element on, with wide accesses. The few
elements before and after (the edges) are a small block of their own. Peeling needs that all
accesses at every point of a row have the same index.
"""

from __future__ import annotations

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.kernels.tuning import fuser_gpu as tuning


def find_row_index(nest: LoopNest) -> Index | None:
    """The index that all accesses at every point of a row have; None where they differ."""
    (body,) = nest.body
    found = {index for _, index, _ in nest.accesses() if set(nest.axes) <= index.axes()}
    if len(found) != 1:
        return None
    (index,) = found
    stride = index.coefficient(body)
    return index if stride is not None and stride == 1 and not index.indirect_indices() else None


def choose_peel_width(nest: LoopNest, passes: int, blocks: int = 1) -> int:
    """Elements of an aligned access to a row of so many blocks; 0 where peeling doesn't help."""
    (body,) = nest.body
    index = find_row_index(nest)
    reductions = [x.dtype for x in nest.locals.values() if x.reduction is not None]
    is_static = body.size.is_constant and all(d.is_floating_point for d in reductions)
    if index is None or not is_static:
        return 0
    sizes = [t.itemsize for t, i, _ in nest.accesses() if set(nest.axes) <= i.axes()]
    width = tuning.PEEL_ACCESS_BYTES // min(sizes)
    start = index - indices.from_atom(body)
    offsets = [coefficient for _, coefficient in start.terms] + [start.constant]
    is_aligned = all(offset % width == 0 for offset in offsets)
    if width < 2 or is_aligned or size_hint(body.size) < 8 * width:
        return 0
    fits = blocks == 1 or 2 * width <= tuning.MAX_MULTI_BLOCK_PEEL
    return 2 * width if passes <= tuning.MAX_WIDE_PEEL_PASSES and fits else width
