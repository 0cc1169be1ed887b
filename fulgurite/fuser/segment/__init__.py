"""Segmentation: cuts a region into kernels so that few bytes move.

In: a region with split axes. Out: segments in execution order. Each has its statements, the values
it stores, its loop structure, and why it ends. Statements are assigned, in order, to the segment
where they save the most bytes. Then segments are merged, and cheap producers are recomputed in
their consumers, as long as that lowers the bytes. On CPUs, results that run across a reduction in memory are split off. A merge is legal if a `LoopStructure` accepts all
its statements.
"""

from __future__ import annotations

from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.segment.assign import assign_statements
from fulgurite.fuser.segment.finalize import finalize_segments
from fulgurite.fuser.segment.loop_structure import RowBytesLimit
from fulgurite.fuser.segment.merge import merge_segments
from fulgurite.fuser.segment.recompute import recompute_values
from fulgurite.fuser.segment.split_transposed import split_transposed_results
from fulgurite.fuser.segment.state import Segment, Segmentation

__all__ = ["Segment", "Segmentation", "segment_region"]


def segment_region(region: Region, row_bytes_limit: RowBytesLimit = 1 << 20) -> list[Segment]:
    """Cuts a region with split axes into segments, in execution order."""
    state = Segmentation(region, row_bytes_limit)
    assign_statements(state)
    merge_segments(state)
    recompute_values(state)
    merge_segments(state)  # recomputation can make more segments read the same values
    split_transposed_results(state)
    return finalize_segments(state)
