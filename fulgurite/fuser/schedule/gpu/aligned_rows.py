"""Rows that don't start at multiples of eight bytes: where blocks of them do.

In: a nest of rows. Out: how many elements make up eight bytes, or sixteen, where all that is read and written at every point
of a row is at the same place in memory and rows don't start at multiples of eight. Their blocks are then walked from the
first multiple on, with wide accesses; the few elements before and after are a block of their own.
"""

from __future__ import annotations

from fulgurite.fuser.cost import number
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.loop_nest import Nest

WIDTH = 8  # bytes a thread and access
# rows that are walked so often at the most have accesses of twice the width. Percent of the copy on an H200, wide against
# narrow (`benchmarks/sweep_rows.py`, bfloat16): two walks, rms_norm of 4097 and 4098, 94.8 and 94.7 against 89.2 and 91.3;
# three walks, softmax and layer_norm of 50257, 66.8 and 65.3 against 68.9 and 74.0
FEW_WALKS = 2
# elements of an access to a row of many blocks: weights are read one by one, and a warp's reads of them are as far apart.
# rms_norm of 50257 bfloat16 got 81.7 percent with 4, 75.0 with 8
MOST_IN_BLOCKS = 4


def row_place(nest: Nest) -> Index | None:
    """Where all accesses at every point of a row are in memory; None where they differ."""
    (body,) = nest.body
    places = {index for _, index, _ in nest.accesses() if set(nest.axes) <= index.axes()}
    if len(places) != 1:
        return None
    (place,) = places
    along = place.coefficient(body)
    return place if along is not None and along == 1 and not place.loaded() else None


def granule_of(nest: Nest, walks: int, blocks: int = 1) -> int:
    """Elements of an access to a row of so many blocks; 0 where it starts at a multiple of eight bytes, or nothing is gained."""
    (body,) = nest.body
    place = row_place(nest)
    sums = [x.dtype for x in nest.locals.values() if x.reduction is not None]
    if place is None or not body.size.is_constant or not all(d.is_floating_point for d in sums):
        return 0
    whole = set(nest.axes)
    sizes = [t.itemsize for t, index, _ in nest.accesses() if whole <= index.axes()]
    granule = WIDTH // min(sizes)
    start = place - indices.of_atom(body)
    steps = [coefficient for _, coefficient in start.terms] + [start.constant]
    if granule < 2 or all(n % granule == 0 for n in steps) or number(body.size) < 8 * granule:
        return 0
    wide = walks <= FEW_WALKS and (blocks == 1 or 2 * granule <= MOST_IN_BLOCKS)
    return 2 * granule if wide else granule
