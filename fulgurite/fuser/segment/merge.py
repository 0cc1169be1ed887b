"""Whole segments are merged, pair by pair, while that saves bytes."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import Shape
from fulgurite.fuser.segment.state import Segment, Segmentation


def merge_all(work: Segmentation) -> None:
    """Merges pairs of segments while that saves bytes."""
    work.connect()
    refused: set[tuple[int, int]] = set()
    changed = True
    while changed:
        changed = False
        for a, b in _pairs(work):
            if (a, b) in refused or a not in work.segments or b not in work.segments:
                continue
            if _merge(work, a, b):
                changed = True
                refused = {pair for pair in refused if a not in pair and b not in pair}
            else:
                refused.add((a, b))


def _pairs(work: Segmentation) -> list[tuple[int, int]]:
    """Segments that share a value, most bytes first."""
    shared: dict[tuple[int, int], int] = {}
    readers: dict[str, list[int]] = {}
    for key, segment in work.segments.items():
        members = segment.shape.facts
        names = {r.name for f in members.values() for r in f.readings}
        for name in names - members.keys():
            readers.setdefault(name, []).append(key)
    for name, keys in readers.items():
        home = work.home.get(name)
        group = ([home] if home is not None else []) + keys
        for k, a in enumerate(group[:12]):
            for b in group[k + 1 : 12]:
                pair = (a, b) if a < b else (b, a)
                if a != b:
                    shared[pair] = shared.get(pair, 0) + work.bytes[name]
    return sorted(shared, key=lambda pair: (-shared[pair], pair))


def _merge(work: Segmentation, a: int, b: int) -> bool:
    """Makes one segment of two, where that is legal and saves bytes."""
    parents = work.parents
    for one, other in ((a, b), (b, a)):
        between = {p for p in parents[other] if p != one}
        if between and work.reaches(one, between, skip=other):
            return False
    names = [*work.segments[a].shape.facts, *work.segments[b].shape.facts]
    shape = work.fold(names)
    if isinstance(shape, str):
        later = max(a, b, key=lambda k: work.segments[k].position)
        first = min(work.segments[later].shape.facts, key=work.order.__getitem__)
        work.cuts.setdefault(first, shape)
        return False
    was_dear = any(work.segments[k].shape.is_dear() for k in (a, b))
    if not _saves(work, a, b, shape) or (shape.is_dear() and not was_dear):
        return False
    for name in work.segments[b].shape.facts:
        if work.home.get(name) == b:
            work.home[name] = a
    position = min(work.segments[a].position, work.segments[b].position)
    work.segments[a] = Segment(shape, position=position)
    del work.segments[b]
    if work.copies:
        work.count_copies()
    work.connect()
    return True


def _saves(work: Segmentation, a: int, b: int, shape: Shape) -> bool:
    """Does the merged kernel move fewer bytes, its unstorable results counted again?"""
    before = sum(work.moved(work.segments[k].shape.facts, work.stored(k)) for k in (a, b))
    stored = {*work.stored(a), *work.stored(b)}
    for name in list(stored):
        outside = any(reader not in shape.facts for reader in work.readers.get(name, ()))
        if name not in work.wanted and not outside:
            stored.discard(name)
    kept = [name for name in stored if shape.storable(name)]
    after = work.moved(shape.facts, kept)
    for name in stored - set(kept):
        alone = work.pointwise_closure(name, stored)
        if alone is None:
            return False
        after += work.moved(alone, [name])
    return after < before
