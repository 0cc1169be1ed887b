"""Rows that don't start at multiples of eight bytes: where blocks of them do.

In: a nest of rows. Out: how many elements make up eight bytes, where all that is read and written at every point of a row
is at the same place in memory and rows don't start at multiples of that. Their blocks are then walked from the first
multiple on, with wide accesses; the few elements before and after are a block of their own.
"""

from __future__ import annotations

from .. import index as indices
from ..cost import number
from ..index import Index
from ..nest import Nest

# bytes a thread and access; weights, which begin elsewhere, would spread too far with more
WIDTH = 8


def row_place(nest: Nest) -> Index | None:
    """Where all accesses at every point of a row are in memory; None where they differ."""
    (body,) = nest.body
    places = {index for _, index, _ in nest.accesses() if set(nest.axes) <= index.axes()}
    if len(places) != 1:
        return None
    (place,) = places
    along = place.coefficient(body)
    return place if along is not None and along == 1 and not place.loaded() else None


def granule_of(nest: Nest) -> int:
    """Elements of eight bytes; 0 where rows start at multiples of them, or nothing is gained."""
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
    if granule < 2 or all(n % granule == 0 for n in steps) or number(body.size) < 4 * granule:
        return 0
    return granule
