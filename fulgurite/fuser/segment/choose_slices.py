"""Decides which statements are split into pieces that are stored in slices of one buffer.

In: a region as lowered. Out: the region, split or not, with its segments. A cat, stack or pad whose
parts are computed in other kernels is a candidate (`ir/split_statements.py`). Both forms are cut
into segments, and the one with the lower predicted time stays.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir import cost
from fulgurite.fuser.ir.expression import Load, Masked, collect_loads, walk
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.split_statements import find_split_candidates, split_statements
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.fuser.segment import Segment, segment_region
from fulgurite.fuser.segment.loop_structure import RowBytesLimit

MIN_GAIN = 0.02  # of the predicted time; less is below the model's accuracy
MAX_SEPARATE_TRIALS = 6  # candidates that are tried one by one
STRIDED_STORE_FACTOR = 2  # of the bytes of a store that is not contiguous: sectors are half full


@dataclass(frozen=True)
class SegmentedRegion:
    """A region with split axes, its segments and their predicted time."""

    region: Region
    segments: list[Segment]
    seconds: float


def segment_with_slices(
    region: Region, row_bytes_limit: RowBytesLimit, device: DeviceInfo
) -> tuple[Region, list[Segment]]:
    """Splits the axes of a region and cuts it into segments, with or without slices."""

    def segment(roots: set[str]) -> SegmentedRegion:
        split = split_axes(split_statements(region, roots) if roots else region)
        segments = segment_region(split, row_bytes_limit)
        return SegmentedRegion(split, segments, predict_segments(split, segments, device))

    best = segment(set())
    candidates = [
        name for name in find_split_candidates(region) if _selects_stored(name, best.segments)
    ]
    if not candidates:
        return best.region, best.segments
    chosen: set[str] = set()
    trials = [set(candidates)]
    if 1 < len(candidates) <= MAX_SEPARATE_TRIALS:
        trials += [{name} for name in candidates]
    for trial in trials:
        if trial <= chosen:
            continue
        attempt = segment(chosen | trial)
        if attempt.seconds < best.seconds * (1 - MIN_GAIN):
            best, chosen = attempt, chosen | trial
    return best.region, best.segments


def _selects_stored(name: str, segments: list[Segment]) -> bool:
    """Whether the kernel of a statement selects between values that other kernels compute."""
    computed = {n for segment in segments for n in segment.structure.statements}
    for segment in segments:
        info = segment.structure.statements.get(name)
        if info is None:
            continue
        for part in walk(info.statement.expression):
            sides = (part.inside, part.outside) if isinstance(part, Masked) else ()
            loaded = {load.name for side in sides for load in collect_loads(side)}
            if loaded & computed - segment.structure.statements.keys():
                return True
    return False


def predict_segments(region: Region, segments: list[Segment], device: DeviceInfo) -> float:
    """Returns the predicted time of all kernels."""
    total = 0.0
    for segment in segments:
        members = segment.structure.statements
        flops = sum(info.flops * info.elements for info in members.values())
        moved = sum(_stored_bytes(region.tensors[name]) for name in segment.stored)
        reads: dict[str, set[Load]] = {}
        for info in members.values():
            for load in info.statement.loads:
                if load.name not in members:
                    reads.setdefault(load.name, set()).add(load)
        moved += sum(_loaded_bytes(region.tensors[name], reads[name]) for name in reads)
        total += cost.predict_seconds(device, moved, flops)
    return total


def _loaded_bytes(tensor: Tensor, loads: set[Load]) -> int:
    """Returns the bytes that loads touch: at most the tensor."""
    points = sum(cost.count_elements(tuple(axis.size for axis in load.axes())) for load in loads)
    return min(cost.tensor_bytes(tensor), points * tensor.itemsize)


def _stored_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a store, more for one that fills sectors only in part."""
    strides = [
        abs(cost.size_hint(stride))
        for size, stride in zip(tensor.sizes, tensor.strides, strict=True)
        if size != 1
    ]
    is_strided = min(strides, default=1) > 1
    size = cost.tensor_bytes(tensor)
    return size * STRIDED_STORE_FACTOR if is_strided else size
