"""Cuts a region into kernels so that few bytes move.

In: a refined region. Out: segments in the order they run, each with the statements it computes,
those it stores, its shape, and why it ends where it does. Statements join, in order, the segment
they save most bytes with; then whole segments are merged, and cheap producers are recomputed in
their consumers, as long as that lowers the bytes. A merge is legal when a `Shape` accepts it.
"""

from __future__ import annotations

from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.segment.finish import finish
from fulgurite.fuser.segment.join import join_all
from fulgurite.fuser.segment.loop_structure import RowLimit
from fulgurite.fuser.segment.merge import merge_all
from fulgurite.fuser.segment.recompute import recompute_all
from fulgurite.fuser.segment.state import Segment, Segmentation

__all__ = ["Segment", "Segmentation", "segment"]


def segment(region: Region, row_bytes_limit: RowLimit = 1 << 20) -> list[Segment]:
    """The segments of a refined region, in an order in which they can run."""
    work = Segmentation(region, row_bytes_limit)
    join_all(work)
    merge_all(work)
    recompute_all(work)
    merge_all(work)  # those that now read the same
    return finish(work)
