"""Splits reductions of C++ kernels from what runs across them in memory.

A layer norm whose input is contiguous along the pixels, or whose result is stored in another order than its
input: within one kernel, loads or stores are strided, one cache line an element.

- A result across the loads gets a pointwise kernel of its own, which computes it again from the inputs and the
  reduced values.
- A load across the others (`norm(x.transpose(1, 2) + y)`) is moved to a pointwise kernel before the reduction.

Every kernel then has contiguous accesses: pointwise kernels are tiled where they transpose.
"""

from __future__ import annotations

from dataclasses import replace

from fulgurite.fuser.ir import cost
from fulgurite.fuser.segment.loop_structure import LoopStructure, Read, StatementInfo
from fulgurite.fuser.segment.state import Segment, Segmentation
from fulgurite.kernels.tuning import fuser_cpu as tuning

ROW_VALUES = ("row_reduction", "row")
LoopMap = frozenset[tuple[int | None, int | None]]
REASON = "{} runs across what the kernel reads in memory"


def split_transposed_results(state: Segmentation) -> None:
    """Splits every segment of a CPU region whose results run across its loads."""
    if not state.loop_sizes.is_cpu:
        return
    state.index_segments()
    for segment_id in list(state.segments):
        structure = state.segments[segment_id].structure
        if structure.has_reduction and not structure.is_row_program and not structure.has_scan:
            _split_loads(state, segment_id)
            _split_results(state, segment_id)
    state.update_dependencies()


def _split_loads(state: Segmentation, segment_id: int) -> None:
    """Moves values of loads that run across most others to kernels of their own."""
    for read, value in _find_loads_across(state, segment_id):
        members = state.segments[segment_id].structure.statements
        names = state.find_pointwise_closure(value, state.statements.keys() - members.keys())
        is_worth = _saves_time(state, [read], 2 * state.bytes[value])  # stored and loaded
        rest = state.build_structure([name for name in members if name != value])
        if names is None or not is_worth or isinstance(rest, str):
            continue
        if not all(map(rest.can_store, set(state.find_stored(segment_id)) - {value})):
            continue
        if _open_pointwise_segment(state, [value], names):
            state.replace_structure(segment_id, rest)
            state.index_segments()
            state.prune_segment(segment_id)
            state.index_segments()


def _split_results(state: Segmentation, segment_id: int) -> None:
    """Moves the results that run across the loads to a kernel of their own."""
    structure = state.segments[segment_id].structure
    across = _find_results_across(state, segment_id, structure)
    names = _find_pointwise_kernel(state, segment_id, across) if across else None
    if names is None or not _saves_time(state, across, state.count_bytes_moved(names, [])):
        return
    if _open_pointwise_segment(state, across, names):
        state.prune_segment(segment_id)
        state.index_segments()


def _open_pointwise_segment(state: Segmentation, stored: list[str], names: list[str]) -> bool:
    """Opens a segment that computes and stores values; False if there is no such kernel."""
    structure = state.build_structure(names)
    if isinstance(structure, str) or not all(map(structure.can_store, stored)):
        return False
    segment_id, state.next_id = state.next_id, state.next_id + 1
    position = min(state.order[name] for name in stored)
    state.segments[segment_id] = Segment(structure, position=position)
    for name in stored:
        state.owner[name] = segment_id
        state.split_reasons.setdefault(name, REASON.format(name))
    state.index_segments()
    return True


def _find_loads_across(state: Segmentation, segment_id: int) -> list[tuple[str, str]]:
    """Large loads along another loop than most, each with a value computed from it that is not."""
    structure = state.segments[segment_id].structure
    members = structure.statements
    stored = [n for n in state.find_stored(segment_id) if structure.roles[n] == "body"]
    readers: dict[str, list[str]] = {}
    loop_of: dict[str, int | None] = {}
    for read, reader in _list_loads(structure):
        readers.setdefault(read.name, []).append(reader)
        loop_of[read.name] = _contiguous_loop(state, read.name, read.loops)
    large = max((state.bytes[name] for name in readers), default=0) // 2
    weights: dict[int | None, int] = {}
    for name in (*readers, *stored):
        loop = loop_of[name] if name in readers else _result_loop(state, members[name])
        weights[loop] = weights.get(loop, 0) + state.bytes[name]
    main = max(weights, key=lambda loop: weights[loop], default=None)
    found = []
    for name, (first, *others) in readers.items():
        is_across = state.bytes[name] >= large and loop_of[name] not in (main, None)
        value = _find_value_along(state, structure, first, main) if is_across else None
        if value is not None and not others:
            found.append((name, value))
    return found if main is not None else []


def _find_value_along(
    state: Segmentation, structure: LoopStructure, name: str, loop: int | None
) -> str | None:
    """The first value that is contiguous along a loop, of a pointwise one and its only readers."""
    while structure.roles[name] == "body" and not structure.ready_pass[name]:
        if _result_loop(state, structure.statements[name]) == loop:
            return name
        readers = state.readers.get(name, [])
        if len(readers) != 1 or readers[0] not in structure.statements or name in state.results:
            return None
        name = readers[0]
    return None


def _find_results_across(
    state: Segmentation, segment_id: int, structure: LoopStructure
) -> list[str]:
    """Results at all points that are contiguous along another loop than what the kernel loads."""
    members = structure.statements
    results = [n for n in state.find_stored(segment_id) if structure.roles[n] == "body"]
    if not results:
        return []
    large = (
        min(state.bytes[name] for name in results) // 2
    )  # what is smaller is read again and again
    loads = {
        _contiguous_loop(state, read.name, read.loops)
        for read, _ in _list_loads(structure)
        if state.bytes[read.name] >= large
    }
    if len(loads) != 1 or None in loads:
        return []
    return [name for name in results if _result_loop(state, members[name]) not in loads]


def _list_loads(structure: LoopStructure) -> list[tuple[Read, str]]:
    """Reads of memory over the loops that run, each with its reader.

    An inlined value, such as a part of a cat, has axes of its own: it is read over the loops of its readers.
    """
    members = structure.statements
    found: list[tuple[Read, str]] = []
    uses: dict[str, set[LoopMap]] = {}  # of inlined values: their loops -> those of a reader
    for name, info in reversed(members.items()):
        is_inlined = structure.roles[name] == "inline"
        for use in uses.get(name, set()) if is_inlined else {LoopMap()}:
            loop_of = dict(use)
            for read in info.reads:
                loops = tuple(loop_of.get(loop, loop) for loop in read.loops)
                if read.name not in members:
                    found.append((replace(read, loops=loops), name))
                elif structure.roles[read.name] == "inline":
                    pairs = zip(members[read.name].result_loops, loops, strict=True)
                    uses.setdefault(read.name, set()).add(frozenset(pairs))
    return found


def _result_loop(state: Segmentation, info: StatementInfo) -> int | None:
    return _contiguous_loop(state, info.name, info.result_loops)


def _contiguous_loop(state: Segmentation, name: str, loops: tuple[int | None, ...]) -> int | None:
    """The loop along which an access to a value in memory is contiguous; None: no single one."""
    strides = state.tensors[name].strides
    for loop, stride in zip(loops, strides, strict=True):
        if loop is not None and stride == 1 and state.loop_sizes.sizes[loop] > 1:
            return loop
    return None


def _find_pointwise_kernel(
    state: Segmentation, segment_id: int, results: list[str]
) -> list[str] | None:
    """The statements that compute results from memory and the values of rows; None: it can't be.

    Constants and values that the segment recomputes have no kernel that stores them: they are computed again.
    """
    structure = state.segments[segment_id].structure
    owned = [name for name in structure.statements if state.owner.get(name) == segment_id]
    rows = {name for name in owned if structure.roles[name] in ROW_VALUES}
    others = state.statements.keys() - structure.statements.keys()  # in memory
    found: dict[str, None] = {}
    for name in results:
        closure = state.find_pointwise_closure(name, rows | others)
        if closure is None:
            return None
        found |= dict.fromkeys(closure)
    read = {read.name for name in found for read in state.statements[name].reads}
    is_storable = all(structure.can_store(name) for name in (read & rows) - found.keys())
    return list(found) if is_storable else None


def _saves_time(state: Segmentation, across: list[str], again: int) -> bool:
    """Whether strided accesses to values cost more than the bytes that another kernel moves again."""
    strided = sum(state.bytes[name] for name in across)
    elements = max(cost.count_elements(state.tensors[name].sizes) for name in across)
    return (
        elements >= tuning.MIN_TRANSPOSE_POINTS
        and (tuning.STRIDED_ACCESS_COST - 1) * strided > again
    )
