"""The last decisions about a cut: what each segment stores, the order they run in, why each ends."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import Shape
from fulgurite.fuser.segment.state import Segment, Segmentation


def finish(work: Segmentation) -> list[Segment]:
    """The segments in an order in which they can run."""
    _separate_unstorable(work)
    _store_constants(work)
    _join_single_values(work)
    order = work.run_order()
    assert len(order) == len(work.segments), "segments depend on each other in a circle"
    result = []
    for key in order:
        segment = work.segments[key]
        segment.stored = tuple(work.stored(key))
        _orient(work, segment)
        segment.reason = _reason(work, segment)
        result.append(segment)
    return result


def _separate_unstorable(work: Segmentation) -> None:
    """Values a kernel computes but can't write get a small kernel of their own."""
    for key in list(work.segments):
        for name in work.stored(key):
            if work.segments[key].shape.storable(name):
                continue
            needed = _without_reductions(work, name)
            shape = work.fold(needed)
            assert isinstance(shape, Shape), f"{name} has no kernel of its own: {shape}"
            if not work.facts[name].collects:
                shape.loop_over(work.facts[name].all)  # what it reads one place of may have more
            work.segments[work.next] = Segment(shape, position=work.order[name])
            work.home[name] = work.next
            work.next += 1
            work.count_copies()
            work.prune(key)


def _without_reductions(work: Segmentation, name: str) -> list[str]:
    """The statement and what it needs that no kernel stores; reductions can be, where they are made."""
    stored = {n for k in work.segments for n in work.stored(k)} - {name}
    found: dict[str, None] = {}
    stack = [name]
    while stack:
        top = stack.pop()
        found[top] = None
        read = {r.name for r in work.facts[top].readings} & work.facts.keys()
        stack += [n for n in read - stored - found.keys() if not work.facts[n].collects]
    return list(found)


def _store_constants(work: Segmentation) -> None:
    """A constant that is asked for gets a kernel of its own."""
    for name in work.wanted:
        f = work.facts[name]
        if f.constant and name not in work.home:
            shape = Shape(work.loops)
            shape.extend(f)
            work.segments[work.next] = Segment(shape, position=work.order[name])
            work.home[name] = work.next
            work.copies.setdefault(name, []).append(work.next)
            work.next += 1


def _join_single_values(work: Segmentation) -> None:
    """One kernel for all values without axes that only inputs make: counters of steps, scales."""
    single = [
        key
        for key, segment in work.segments.items()
        if not work.producers(key) and not any(f.all for f in segment.shape.facts.values())
    ]
    while len(single) > 1:
        first, other = single[0], single.pop()
        names = [*work.segments[first].shape.facts, *work.segments[other].shape.facts]
        shape = work.fold(names)
        if isinstance(shape, str):
            continue
        position = min(work.segments[k].position for k in (first, other))
        for name in work.segments.pop(other).shape.facts:
            if work.home.get(name) == other:
                work.home[name] = first
        work.segments[first] = Segment(shape, position=position)
    work.count_copies()


def _orient(work: Segmentation, segment: Segment) -> None:
    """Where rows and columns are both reduced, rows are the ones contiguous in memory."""
    shape = segment.shape
    if not any(role == "colsum" for role in shape.roles.values()):
        return
    weights: dict[int, int] = {}
    for f in shape.facts.values():
        for reading in f.readings:
            tensor = work.tensors[reading.name]
            for stride, key in zip(tensor.strides, reading.classes, strict=True):
                if key is not None and stride == 1:
                    weights[key] = weights.get(key, 0) + work.bytes[reading.name]
    if not weights:
        return
    best = max(weights, key=lambda key: weights[key])
    if best in shape.body:
        return
    for lead in [f for f in shape.facts.values() if best in f.reduced]:
        other = Shape(work.loops, lead.kept, lead.reduced, True)
        ordered = sorted(shape.facts, key=work.order.__getitem__)
        if all(other.extend(work.facts[name]) is None for name in ordered):
            if all(other.storable(name) for name in segment.stored):
                segment.shape = other
                return


def _reason(work: Segmentation, segment: Segment) -> str:
    """Why the segment ends: what refused to join it, or that its results leave the region."""
    for name in segment.stored:
        for reader in work.readers.get(name, ()):
            if reader not in segment.shape.facts:
                return work.cuts.get(reader, f"{reader} needs {name} in memory")
    return "its results leave the region"
