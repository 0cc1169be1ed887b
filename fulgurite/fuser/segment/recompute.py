"""Recomputes cheap values in their readers, instead of storing them, while that saves bytes."""

from __future__ import annotations

from fulgurite.fuser.segment.loop_structure import LoopStructure
from fulgurite.fuser.segment.state import Segment, Segmentation

MAX_RECOMPUTE_FLOPS = 64  # per element, of a value that is recomputed instead of stored
# Buffers that it is recomputed from. Without a limit, a loop of in-place writes (`x[i] = f(x[:i])`) reads
# every row that was written before from a buffer of its own, and its n-th kernel has n loads to compile.
MAX_RECOMPUTE_INPUTS = 8
MAX_ROUNDS = 3  # a recomputed value can make the recomputation of another one cheap


def recompute_values(state: Segmentation) -> None:
    """Tries every value that crosses segments, largest first, until nothing changes."""
    state.index_segments()
    for _ in range(MAX_ROUNDS):
        if not _recompute_round(state):
            return


def _recompute_round(state: Segmentation) -> bool:
    """Tries every value once. Returns whether any is recomputed now."""
    stored = {n for segment_id in state.segments for n in state.find_stored(segment_id)}
    crossing = [n for n in stored - state.results if not state.statements[n].is_reduction_or_scan]
    changed = False
    for name in sorted(crossing, key=lambda n: (-state.bytes[n], n)):
        if name in stored and _try_recompute(state, name, stored):
            stored = {n for segment_id in state.segments for n in state.find_stored(segment_id)}
            changed = True
    return changed


def find_recomputed_statements(
    state: Segmentation, name: str, stored: set[str]
) -> list[str] | None:
    """Returns the statement and its unstored producers; None if recomputing them costs too much."""
    found = state.find_pointwise_closure(name, stored)
    if found is None or sum(state.statements[n].flops for n in found) > MAX_RECOMPUTE_FLOPS:
        return None
    loaded = {read.name for n in found for read in state.statements[n].reads} - {*found}
    return found if len(loaded) <= MAX_RECOMPUTE_INPUTS else None


def _try_recompute(state: Segmentation, name: str, stored: set[str]) -> bool:
    """Recomputes the value in all its readers if that moves fewer bytes than storing it.

    Candidates start from stored values, or from a narrower intermediate value that is stored
    instead, such as the bfloat16 tensor that this value upcasts. The one with the fewest bytes
    wins.
    """
    candidates = [find_recomputed_statements(state, name, stored)]
    candidates += [
        find_recomputed_statements(state, name, stored | {narrow})
        for narrow in _find_narrower_values(state, name)
    ]
    best: tuple[int, dict[int, LoopStructure]] | None = None
    for needed in candidates:
        structures = _inline_into_readers(state, name, needed) if needed is not None else None
        if structures is None:
            continue
        saved, old = _try_structures(state, state.owner[name], structures)
        _restore_segments(state, old)
        if saved > (best[0] if best else 0):
            best = saved, structures
    if best is None:
        return False
    _try_structures(state, state.owner[name], best[1])
    return True


def _find_narrower_values(state: Segmentation, name: str) -> list[str]:
    """Returns pointwise producers of the value with fewer bytes that its kernel can store.

    What the kernel itself only recomputes is another kernel's to store, which may be gone.
    """
    structure = state.segments[state.owner[name]].structure
    found: list[str] = []
    top = state.statements[name]
    while len(local := [r for r in top.reads if r.name in structure.statements]) == 1:
        top = state.statements[local[0].name]
        if top.is_reduction_or_scan or top.loops != state.statements[name].loops or top.is_constant:
            break
        is_owned = state.owner.get(top.name) == state.owner[name]
        is_narrower = state.bytes[top.name] < state.bytes[name]
        if is_owned and is_narrower and structure.can_store(top.name):
            found.append(top.name)
    return found


def _try_structures(
    state: Segmentation, owner: int, structures: dict[int, LoopStructure]
) -> tuple[int, dict[int, Segment]]:
    """Replaces the structures of segments. Returns the saved bytes and the old segments.

    The saving is 0 if segments then depend on each other in a cycle.
    """
    touched = {owner, *structures}
    before = _count_bytes_moved(state, touched)
    old = {segment_id: state.segments[segment_id] for segment_id in touched}
    for segment_id, structure in structures.items():
        state.replace_structure(segment_id, structure)
    state.prune_segment(owner)
    saved = before - _count_bytes_moved(state, touched)
    return (0 if saved > 0 and _has_cycle(state) else saved), old


def _restore_segments(state: Segmentation, old: dict[int, Segment]) -> None:
    for segment_id, segment in old.items():
        state.replace_structure(segment_id, segment.structure)
        state.segments[segment_id] = segment


def _inline_into_readers(
    state: Segmentation, name: str, needed: list[str]
) -> dict[int, LoopStructure] | None:
    """Adds statements to all segments that read the value; None if one can't have them."""
    readers = {
        k
        for reader in state.readers.get(name, ())
        for k in state.find_computing_segments(reader)
        if name not in state.segments[k].structure.statements
    }
    structures: dict[int, LoopStructure] = {}
    for segment_id in readers:
        structure = state.build_structure(
            [*state.segments[segment_id].structure.statements, *needed]
        )
        if isinstance(structure, str) or not all(
            structure.can_store(n) for n in state.find_stored(segment_id)
        ):
            return None
        if (
            structure.recomputes_too_much()
            and not state.segments[segment_id].structure.recomputes_too_much()
        ):
            return None
        structures[segment_id] = structure
    return structures


def _count_bytes_moved(state: Segmentation, segment_ids: set[int]) -> int:
    return sum(
        state.count_bytes_moved(state.segments[k].structure.statements, state.find_stored(k))
        for k in segment_ids
        if k in state.segments
    )


def _has_cycle(state: Segmentation) -> bool:
    return len(state.sort_topologically()) < len(state.segments)
