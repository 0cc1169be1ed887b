"""Statements join, in the program's order, the segment they save most bytes with."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import Facts, Shape
from fulgurite.fuser.segment.state import MOST_STATEMENTS, Segment, Segmentation

DEAR = "it would be computed at many more points than there are values of it"


def join_all(work: Segmentation) -> None:
    by_input: dict[str, list[int]] = {}
    for f in work.facts.values():
        if f.constant:
            continue
        key = _join(work, f, by_input)
        for reading in f.readings:
            if reading.name not in work.home:
                known = by_input.setdefault(reading.name, [])
                if key not in known:
                    known.append(key)


def _join(work: Segmentation, f: Facts, by_input: dict[str, list[int]]) -> int:
    """The segment of a statement: one that it reads from or reads the same inputs as, or a new one."""
    gains = _gains(work, f, by_input)
    sources = {work.home[r.name] for r in f.readings if r.name in work.home}
    for key in sorted(gains, key=lambda k: (-gains[k], -k)):
        reason = _try_join(work, key, f, sources)
        if reason is None:
            _settle(work, key, f, sources)
            return key
        if key in sources:
            work.cuts.setdefault(f.name, reason)
    key = _open(work, f)
    _settle(work, key, f, sources)
    return key


def _gains(work: Segmentation, f: Facts, by_input: dict[str, list[int]]) -> dict[int, int]:
    """The bytes that the statement would save in each segment."""
    gains: dict[int, int] = {}
    for name in dict.fromkeys(r.name for r in f.readings):
        if name in work.home:
            key = work.home[name]
            gains[key] = gains.get(key, 0) + 2 * work.bytes[name]
        elif name in work.bytes:
            for key in by_input.get(name, ())[-4:]:
                gains[key] = gains.get(key, 0) + work.bytes[name]
    return gains


def _open(work: Segmentation, f: Facts) -> int:
    """A segment of this statement alone."""
    key = work.next
    work.next += 1
    shape = Shape(work.loops)
    work.segments[key] = Segment(shape, position=work.order[f.name])
    work.parents[key], work.last[key] = set(), work.order[f.name]
    for constant in _constants(work, f, shape):
        shape.extend(constant)
    reason = shape.extend(f)
    assert reason is None, f"a kernel of one statement was refused: {reason}"
    return key


def _settle(work: Segmentation, key: int, f: Facts, sources: set[int]) -> None:
    work.home[f.name] = key
    work.parents[key] |= sources - {key}
    work.last[key] = work.order[f.name]


def _constants(work: Segmentation, f: Facts, shape: Shape) -> list[Facts]:
    """The values without loads that the statement needs and the segment does not have."""
    names = dict.fromkeys(r.name for r in f.readings)
    return [
        work.facts[n]
        for n in names
        if n in work.facts and work.facts[n].constant and n not in shape.facts
    ]


def _try_join(work: Segmentation, key: int, f: Facts, sources: set[int]) -> str | None:
    """Puts the statement into the segment, or says why it can't be there."""
    shape = work.segments[key].shape
    if len(shape.facts) >= MOST_STATEMENTS:
        return f"a kernel has at most {MOST_STATEMENTS} statements"
    others = sources - {key}
    if others and work.reaches(key, others):
        return "another kernel's result is needed in between"
    constants = _constants(work, f, shape)
    if f.all <= shape.grid | shape.body and not constants and not f.collects:
        return _extend(shape, f)
    trial = shape.copy()
    for extra in (*constants, f):
        reason = trial.extend(extra)
        if reason:
            return reason
    if trial.is_dear() and not shape.is_dear():
        return DEAR
    for name, role in trial.roles.items():
        if role == "free" and not work.facts[name].constant:
            readers = work.readers.get(name, ())
            if name in work.wanted or any(r not in trial.facts for r in readers):
                other = name if name != f.name else "the kernel it reads from"
                return f"{f.name} has other axes than {other}"
    work.segments[key].shape = trial
    return None


def _extend(shape: Shape, f: Facts) -> str | None:
    """Adds a statement over loops that the shape has; where it can't stay, the shape is as before, and why is said."""
    was_dear = shape.is_dear()
    reason = shape.extend(f)
    if reason is not None:
        return reason
    if shape.roles[f.name] == "free":
        reason = f"{f.name} has other axes than the kernel it reads from"
    elif shape.is_dear() and not was_dear:
        reason = DEAR
    if reason is not None:
        for table in (shape.roles, shape.waits, shape.facts):
            del table[f.name]  # type: ignore[attr-defined]
    return reason
