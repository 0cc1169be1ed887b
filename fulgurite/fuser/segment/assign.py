"""Assigns each statement, in program order, to the segment where it saves the most bytes."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import LoopStructure, StatementInfo
from fulgurite.fuser.segment.state import MAX_STATEMENTS, Segment, Segmentation

RECOMPUTES_TOO_MUCH = "its broadcast values would be recomputed at too many points"


def assign_statements(state: Segmentation) -> None:
    """Assigns all statements that are not constants."""
    by_input: dict[str, list[int]] = {}
    for info in state.statements.values():
        if info.is_constant:
            continue
        segment_id = _assign(state, info, by_input)
        for read in info.reads:
            if read.name not in state.owner:
                known = by_input.setdefault(read.name, [])
                if segment_id not in known:
                    known.append(segment_id)


def _assign(state: Segmentation, info: StatementInfo, by_input: dict[str, list[int]]) -> int:
    """Assigns a statement to a segment of its producers or inputs, or to a new one."""
    saved = _estimate_saved_bytes(state, info, by_input)
    producers = {state.owner[r.name] for r in info.reads if r.name in state.owner}
    for segment_id in sorted(saved, key=lambda k: (-saved[k], -k)):
        reason = _try_assign(state, segment_id, info, producers)
        if reason is None:
            _record_assignment(state, segment_id, info, producers)
            return segment_id
        if segment_id in producers:
            state.split_reasons.setdefault(info.name, reason)
    segment_id = _open_segment(state, info)
    _record_assignment(state, segment_id, info, producers)
    return segment_id


def _estimate_saved_bytes(
    state: Segmentation, info: StatementInfo, by_input: dict[str, list[int]]
) -> dict[int, int]:
    """Returns the bytes that the statement would save in each segment."""
    saved: dict[int, int] = {}
    for name in dict.fromkeys(r.name for r in info.reads):
        if name in state.owner:
            segment_id = state.owner[name]
            saved[segment_id] = saved.get(segment_id, 0) + 2 * state.bytes[name]
        elif name in state.bytes:
            for segment_id in by_input.get(name, ())[-4:]:
                saved[segment_id] = saved.get(segment_id, 0) + state.bytes[name]
    return saved


def _open_segment(state: Segmentation, info: StatementInfo) -> int:
    """Creates a segment of this statement alone."""
    segment_id = state.next_id
    state.next_id += 1
    structure = LoopStructure(state.loop_sizes)
    state.segments[segment_id] = Segment(structure, position=state.order[info.name])
    state.dependencies[segment_id], state.last_position[segment_id] = set(), state.order[info.name]
    for constant in _find_missing_constants(state, info, structure):
        structure.try_add(constant)
    reason = structure.try_add(info)
    assert reason is None, f"a kernel of one statement was rejected: {reason}"
    return segment_id


def _record_assignment(
    state: Segmentation, segment_id: int, info: StatementInfo, producers: set[int]
) -> None:
    state.owner[info.name] = segment_id
    state.dependencies[segment_id] |= producers - {segment_id}
    state.last_position[segment_id] = state.order[info.name]


def _find_missing_constants(
    state: Segmentation, info: StatementInfo, structure: LoopStructure
) -> list[StatementInfo]:
    """Returns the constants that the statement reads and the segment does not have."""
    names = dict.fromkeys(r.name for r in info.reads)
    return [
        state.statements[n]
        for n in names
        if n in state.statements
        and state.statements[n].is_constant
        and n not in structure.statements
    ]


def _try_assign(
    state: Segmentation, segment_id: int, info: StatementInfo, producers: set[int]
) -> str | None:
    """Adds the statement to the segment, or returns why it can't be there."""
    structure = state.segments[segment_id].structure
    if len(structure.statements) >= MAX_STATEMENTS:
        return f"a kernel has at most {MAX_STATEMENTS} statements"
    others = producers - {segment_id}
    if others and state.reaches(segment_id, others):
        return "it needs the result of another kernel in between"
    constants = _find_missing_constants(state, info, structure)
    if (
        info.loops <= structure.grid | structure.body
        and not constants
        and not info.is_reduction_or_scan
        and not structure.is_row_program
    ):
        return _try_add(structure, info)
    trial = structure.copy()
    for extra in (*constants, info):
        reason = trial.try_add(extra)
        if reason:
            return reason
    if trial.recomputes_too_much() and not structure.recomputes_too_much():
        return RECOMPUTES_TOO_MUCH
    for name, role in trial.roles.items():
        is_unstorable = role == "inline" or (info.is_scatter and name != info.name)
        if is_unstorable and not state.statements[name].is_constant:
            readers = state.readers.get(name, ())
            if name in state.results or any(r not in trial.statements for r in readers):
                if info.is_scatter:
                    return f"{info.name} stores at computed indices, and {name} is stored too"
                other = name if name != info.name else "the kernel that it reads from"
                return f"{info.name} has other axes than {other}"
    state.segments[segment_id].structure = trial
    return None


def _try_add(structure: LoopStructure, info: StatementInfo) -> str | None:
    """Adds a statement over existing loops.

    If that fails, restores the structure and returns why.
    """
    recomputed_before = structure.recomputes_too_much()
    reason = structure.try_add(info)
    if reason is not None:
        return reason
    if structure.roles[info.name] == "inline":
        reason = f"{info.name} has other axes than the kernel that it reads from"
    elif structure.recomputes_too_much() and not recomputed_before:
        reason = RECOMPUTES_TOO_MUCH
    if reason is not None:
        for table in (structure.roles, structure.ready_pass, structure.statements):
            del table[info.name]  # type: ignore[attr-defined]
    return reason
