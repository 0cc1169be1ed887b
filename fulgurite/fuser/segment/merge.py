"""Merges pairs of segments while that saves bytes."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import LoopStructure
from fulgurite.fuser.segment.state import Segment, Segmentation


def merge_segments(state: Segmentation) -> None:
    """Merges pairs of segments while that saves bytes."""
    state.update_dependencies()
    rejected: set[tuple[int, int]] = set()
    changed = True
    while changed:
        changed = False
        for a, b in _rank_pairs(state):
            if (a, b) in rejected or a not in state.segments or b not in state.segments:
                continue
            if _try_merge(state, a, b):
                changed = True
                rejected = {pair for pair in rejected if a not in pair and b not in pair}
            else:
                rejected.add((a, b))


def _rank_pairs(state: Segmentation) -> list[tuple[int, int]]:
    """Returns pairs of segments that share a value, most shared bytes first."""
    shared: dict[tuple[int, int], int] = {}
    readers: dict[str, list[int]] = {}
    for key, segment in state.segments.items():
        members = segment.structure.statements
        names = {r.name for f in members.values() for r in f.reads}
        for name in names - members.keys():
            readers.setdefault(name, []).append(key)
    for name, keys in readers.items():
        owner = state.owner.get(name)
        group = ([owner] if owner is not None else []) + keys
        for k, a in enumerate(group[:12]):
            for b in group[k + 1 : 12]:
                pair = (a, b) if a < b else (b, a)
                if a != b:
                    shared[pair] = shared.get(pair, 0) + state.bytes[name]
    return sorted(shared, key=lambda pair: (-shared[pair], pair))


def _try_merge(state: Segmentation, a: int, b: int) -> bool:
    """Merges two segments if that is legal and saves bytes."""
    for one, other in ((a, b), (b, a)):
        between = {p for p in state.dependencies[other] if p != one}
        if between and state.reaches(one, between, skip=other):
            return False
    names = [*state.segments[a].structure.statements, *state.segments[b].structure.statements]
    structure = state.build_structure(names)
    if isinstance(structure, str):
        later = max(a, b, key=lambda k: state.segments[k].position)
        first = min(state.segments[later].structure.statements, key=state.order.__getitem__)
        state.split_reasons.setdefault(first, structure)
        return False
    recomputed_before = any(state.segments[k].structure.recomputes_too_much() for k in (a, b))
    if not _saves_bytes(state, a, b, structure) or (
        structure.recomputes_too_much() and not recomputed_before
    ):
        return False
    for name in state.segments[b].structure.statements:
        if state.owner.get(name) == b:
            state.owner[name] = a
    position = min(state.segments[a].position, state.segments[b].position)
    state.segments[a] = Segment(structure, position=position)
    del state.segments[b]
    if state.computing_segments:
        state.index_segments()
    state.update_dependencies()
    return True


def _saves_bytes(state: Segmentation, a: int, b: int, structure: LoopStructure) -> bool:
    """Whether the merged kernel moves fewer bytes, including kernels for what it can't store."""
    before = sum(
        state.count_bytes_moved(state.segments[k].structure.statements, state.find_stored(k))
        for k in (a, b)
    )
    stored = {*state.find_stored(a), *state.find_stored(b)}
    for name in list(stored):
        outside = any(reader not in structure.statements for reader in state.readers.get(name, ()))
        if name not in state.results and not outside:
            stored.discard(name)
    storable = [name for name in stored if structure.can_store(name)]
    after = state.count_bytes_moved(structure.statements, storable)
    for name in stored - set(storable):
        separate = state.find_pointwise_closure(name, stored)
        if separate is None:
            return False
        after += state.count_bytes_moved(separate, [name])
    return after < before
