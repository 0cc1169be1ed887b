"""Cheap values are computed again where they are read, instead of stored, while that saves bytes."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import Shape
from fulgurite.fuser.segment.state import Segment, Segmentation

RECOMPUTE_FLOPS = 64  # per element: what a value may cost to be computed again instead of stored
MOST_ROUNDS = 3  # what one value leaves stored, another may make cheap


def recompute_all(work: Segmentation) -> None:
    """Tries every value that crosses segments, the largest first, again while some are left out."""
    work.count_copies()
    for _ in range(MOST_ROUNDS):
        if not _round(work):
            return


def _round(work: Segmentation) -> bool:
    stored = {n for key in work.segments for n in work.stored(key)}
    crossing = [n for n in stored - work.wanted if not work.facts[n].collects]
    changed = False
    for name in sorted(crossing, key=lambda n: (-work.bytes[n], n)):
        if name in stored and _recompute(work, name, stored):
            stored = {n for key in work.segments for n in work.stored(key)}
            changed = True
    return changed


def closure(work: Segmentation, name: str, stored: set[str]) -> list[str] | None:
    """The statement and what it needs that no kernel stores; None where that is too dear."""
    found: dict[str, None] = {}
    stack, total = [name], 0
    while stack:
        top = stack.pop()
        if top in found:
            continue
        f = work.facts[top]
        if f.collects:
            return None
        found[top] = None
        total += f.flops
        for reading in f.readings:
            if reading.name in work.facts and reading.name not in stored:
                stack.append(reading.name)
    return None if total > RECOMPUTE_FLOPS else list(found)


def _recompute(work: Segmentation, name: str, stored: set[str]) -> bool:
    """Computes the value in all its readers, in the way that moves fewest bytes, if that is fewer than now.

    From what is stored anyway, or from a narrower value on the way, which then is stored in its place: the
    bfloat16 numbers that it widens.
    """
    ways = [closure(work, name, stored)]
    ways += [closure(work, name, stored | {cut}) for cut in _narrower(work, name)]
    best: tuple[int, dict[int, Shape]] | None = None
    for needed in ways:
        shapes = _with_value(work, name, needed) if needed is not None else None
        if shapes is None:
            continue
        saved, old = _tried(work, work.home[name], shapes)
        _restored(work, old)
        if saved > (best[0] if best else 0):
            best = saved, shapes
    if best is None:
        return False
    _tried(work, work.home[name], best[1])
    return True


def _narrower(work: Segmentation, name: str) -> list[str]:
    """What the value is made of at the same points, with fewer bytes, where its kernel could store that."""
    shape = work.segments[work.home[name]].shape
    found: list[str] = []
    top = work.facts[name]
    while len(inside := [r for r in top.readings if r.name in shape.facts]) == 1:
        top = work.facts[inside[0].name]
        if top.collects or top.all != work.facts[name].all or top.constant:
            break
        if work.bytes[top.name] < work.bytes[name] and shape.storable(top.name):
            found.append(top.name)
    return found


def _tried(
    work: Segmentation, home: int, shapes: dict[int, Shape]
) -> tuple[int, dict[int, Segment]]:
    """Gives segments these shapes: bytes that it saves (none where segments wait for each other), and what was."""
    touched = {home, *shapes}
    before = _total(work, touched)
    old = {key: work.segments[key] for key in touched}
    for key, shape in shapes.items():
        work.replace(key, shape)
    work.prune(home)
    saved = before - _total(work, touched)
    return (0 if saved > 0 and _cyclic(work) else saved), old


def _restored(work: Segmentation, old: dict[int, Segment]) -> None:
    for key, segment in old.items():
        work.replace(key, segment.shape)
        work.segments[key] = segment


def _with_value(work: Segmentation, name: str, needed: list[str]) -> dict[int, Shape] | None:
    """The segments that read the value, with what it needs inside; None where one can't have that."""
    users = {
        k
        for reader in work.readers.get(name, ())
        for k in work.computed_in(reader)
        if name not in work.segments[k].shape.facts
    }
    shapes: dict[int, Shape] = {}
    for key in users:
        shape = work.fold([*work.segments[key].shape.facts, *needed])
        if isinstance(shape, str) or not all(shape.storable(n) for n in work.stored(key)):
            return None
        if shape.is_dear() and not work.segments[key].shape.is_dear():
            return None
        shapes[key] = shape
    return shapes


def _total(work: Segmentation, keys: set[int]) -> int:
    return sum(
        work.moved(work.segments[k].shape.facts, work.stored(k)) for k in keys if k in work.segments
    )


def _cyclic(work: Segmentation) -> bool:
    return len(work.run_order()) < len(work.segments)
