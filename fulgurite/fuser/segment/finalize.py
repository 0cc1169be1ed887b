"""Finalizes segments: what each stores, the execution order, and why each ends."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import LoopStructure, StatementInfo
from fulgurite.fuser.segment.state import Segment, Segmentation

OUTPUT_LEAVES_REGION = "its outputs leave the region"  # the reason of a region's last segments


def finalize_segments(state: Segmentation) -> list[Segment]:
    """Returns the segments in execution order."""
    _split_off_unstorable_values(state)
    _store_constants(state)
    _merge_scalar_segments(state)
    order = state.sort_topologically()
    assert len(order) == len(state.segments), "segments depend on each other in a cycle"
    result = []
    for key in order:
        segment = state.segments[key]
        segment.stored = tuple(state.find_stored(key))
        _orient_rows(state, segment)
        segment.reason = _find_end_reason(state, segment)
        result.append(segment)
    _check_loads(state, result)
    return result


def _check_loads(state: Segmentation, segments: list[Segment]) -> None:
    """Every value that a kernel loads is an input of the region or stored by a kernel."""
    in_memory = {name for segment in segments for name in segment.stored}
    for segment in segments:
        members = segment.structure.statements
        loads = {read.name for info in members.values() for read in info.reads} - members.keys()
        missing = (loads & state.statements.keys()) - in_memory
        assert not missing, f"a kernel loads {sorted(missing)}, which no kernel stores"


def _split_off_unstorable_values(state: Segmentation) -> None:
    """Gives each value that its kernel computes but can't store a small kernel of its own."""
    for key in list(state.segments):
        for name in state.find_stored(key):
            if state.segments[key].structure.can_store(name):
                continue
            needed = _collect_unstored_producers(state, name)
            structure = state.build_structure(needed)
            assert isinstance(structure, LoopStructure), (
                f"no kernel can compute {name}: {structure}"
            )
            if not state.statements[name].is_reduction_or_scan:
                structure.set_grid(
                    state.statements[name].loops
                )  # its producers may have more loops
            state.segments[state.next_id] = Segment(structure, position=state.order[name])
            state.owner[name] = state.next_id
            state.next_id += 1
            state.index_segments()
            state.prune_segment(key)


def _collect_unstored_producers(state: Segmentation, name: str) -> list[str]:
    """Returns the statement and its unstored producers.

    Reductions are left to their own kernels.
    """
    stored = {n for k in state.segments for n in state.find_stored(k)} - {name}
    found: dict[str, None] = {}
    stack = [name]
    while stack:
        top = stack.pop()
        found[top] = None
        read = {r.name for r in state.statements[top].reads} & state.statements.keys()
        stack += [
            n for n in read - stored - found.keys() if not state.statements[n].is_reduction_or_scan
        ]
    return list(found)


def _store_constants(state: Segmentation) -> None:
    """Adds each constant that the region returns to a kernel with its loops, or to a new one."""
    for name in sorted(state.results, key=state.order.__getitem__):
        f = state.statements[name]
        if f.is_constant and name not in state.owner:
            key = _find_segment_with_loops(state, f)
            if key is not None:
                state.owner[name] = key
                state.computing_segments.setdefault(name, []).append(key)
                continue
            structure = LoopStructure(state.loop_sizes)
            structure.try_add(f)
            state.segments[state.next_id] = Segment(structure, position=state.order[name])
            state.owner[name] = state.next_id
            state.computing_segments.setdefault(name, []).append(state.next_id)
            state.next_id += 1


def _find_segment_with_loops(state: Segmentation, constant: StatementInfo) -> int | None:
    """Adds a constant to a segment that already has all its loops. Returns the segment's id."""
    for key, segment in state.segments.items():
        old = segment.structure
        if not constant.loops or old.grid | old.body != constant.loops or old.has_scatter:
            continue
        structure = old.copy()
        reason = None
        if constant.name not in structure.statements:
            reason = structure.try_add(constant)
        if reason is None and (structure.grid, structure.body) == (old.grid, old.body):
            if structure.can_store(constant.name):
                segment.structure = structure
                return key
    return None


def _merge_scalar_segments(state: Segmentation) -> None:
    """Merges all scalars that depend only on inputs into one kernel: step counters, scales."""
    scalars = [
        key
        for key, segment in state.segments.items()
        if not state.find_dependencies(key)
        and not any(f.loops for f in segment.structure.statements.values())
        and not segment.structure.has_scatter
    ]
    while len(scalars) > 1:
        first, other = scalars[0], scalars.pop()
        names = [
            *state.segments[first].structure.statements,
            *state.segments[other].structure.statements,
        ]
        structure = state.build_structure(names)
        if isinstance(structure, str):
            continue
        position = min(state.segments[k].position for k in (first, other))
        for name in state.segments.pop(other).structure.statements:
            if state.owner.get(name) == other:
                state.owner[name] = first
        state.segments[first] = Segment(structure, position=position)
    state.index_segments()


def _orient_rows(state: Segmentation, segment: Segment) -> None:
    """Makes the contiguous axis the row if the segment reduces both rows and columns."""
    structure = segment.structure
    if not any(role == "column_reduction" for role in structure.roles.values()):
        return
    weights: dict[int, int] = {}
    for info in structure.statements.values():
        for read in info.reads:
            tensor = state.tensors[read.name]
            for stride, loop in zip(tensor.strides, read.loops, strict=True):
                if loop is not None and stride == 1:
                    weights[loop] = weights.get(loop, 0) + state.bytes[read.name]
    if not weights:
        return
    best = max(weights, key=lambda loop: weights[loop])
    if best in structure.body:
        return
    for lead in [f for f in structure.statements.values() if best in f.reduced_loops]:
        other = LoopStructure(state.loop_sizes, lead.parallel_loops, lead.reduced_loops, True)
        ordered = sorted(structure.statements, key=state.order.__getitem__)
        if all(other.try_add(state.statements[name]) is None for name in ordered):
            if all(other.can_store(name) for name in segment.stored):
                segment.structure = other
                return


def _find_end_reason(state: Segmentation, segment: Segment) -> str:
    """Returns why a reader is not in the segment, or that its outputs leave the region."""
    for name in segment.stored:
        for reader in state.readers.get(name, ()):
            if reader not in segment.structure.statements:
                return state.split_reasons.get(reader, f"{reader} needs {name} in memory")
    return OUTPUT_LEAVES_REGION
