"""Decides which statements are split into pieces that are stored in slices of one buffer.

In: a region as lowered. Out: the region, split or not, with its segments. A cat, stack or pad whose
kernel shares values in memory with other kernels is a candidate (`ir/split_statements.py`). Both
forms are cut into segments, and the one with the lower predicted time stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.split_statements import find_split_candidates, split_statements
from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.segment import Segment, segment_region
from fulgurite.fuser.segment.build_loop_nest import build_loop_nest
from fulgurite.fuser.segment.loop_structure import RowBytesLimit
from fulgurite.fuser.segment.predict_nests import predict_nests

# Of the predicted time. The rows of a slice can't be collapsed into one loop: each has a scalar
# remainder in C++.
MIN_GAIN, MIN_GAIN_CPU = 0.02, 0.3
MAX_SEPARATE_TRIALS = 6  # candidates that are tried one by one


@dataclass(frozen=True)
class SegmentedRegion:
    """A region with split axes, its segments and their loop nests."""

    region: Region
    segments: list[Segment]
    nests: list[LoopNest]


def segment_with_slices(
    region: Region, row_bytes_limit: RowBytesLimit, device: DeviceInfo
) -> SegmentedRegion:
    """Splits the axes of a region and cuts it into segments, with or without slices."""

    def segment(roots: set[str]) -> SegmentedRegion:
        split = split_axes(split_statements(region, roots) if roots else region)
        segments = segment_region(split, row_bytes_limit)
        return SegmentedRegion(split, segments, [build_loop_nest(split, s) for s in segments])

    is_cpu = isinstance(row_bytes_limit, int)
    best, chosen = segment(set()), set[str]()
    candidates = [
        name
        for name in find_split_candidates(region)
        if region.writes or _shares_memory(name, best.segments)
    ]
    if not candidates:
        return best
    trials = [set(candidates)]
    if 1 < len(candidates) <= MAX_SEPARATE_TRIALS:
        trials += [{name} for name in candidates]
    limit = predict_nests(best.nests, device, is_cpu)
    for trial in trials:
        if trial <= chosen:
            continue
        attempt = segment(chosen | trial)
        seconds = predict_nests(attempt.nests, device, is_cpu)
        if seconds < limit * (1 - (MIN_GAIN_CPU if is_cpu else MIN_GAIN)):
            best, chosen, limit = attempt, chosen | trial, seconds
    return best


def _shares_memory(name: str, segments: list[Segment]) -> bool:
    """Whether the kernel of a statement reads what other kernels read or store."""
    touched = [_find_reads(segment) | {*segment.stored} for segment in segments]
    return any(
        _find_reads(segment) & touched[k]
        for segment in segments
        if name in segment.structure.statements
        for k, other in enumerate(segments)
        if other is not segment
    )


def _find_reads(segment: Segment) -> set[str]:
    """Returns what the kernel loads from memory."""
    members = segment.structure.statements
    return {read.name for info in members.values() for read in info.reads} - members.keys()
