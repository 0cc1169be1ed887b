"""The state of segmentation: which statements are in which segment, and the bytes they move.

In: a region with split axes. Out: a `Segmentation`, which `assign`, `merge`, `recompute` and
`finalize` change in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from fulgurite.fuser.ir import cost
from fulgurite.fuser.ir.expression import collect_loads
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_ids import assign_loop_ids
from fulgurite.fuser.ir.statement import Region, Statement
from fulgurite.fuser.segment.loop_structure import (
    LoopSizes,
    LoopStructure,
    RowBytesLimit,
    StatementInfo,
    collect_reads,
)

NO_READS: frozenset[str] = frozenset()
MAX_STATEMENTS = 160  # per kernel; longer kernels compile slowly and spill registers
MAX_COPY_FLOPS = 48  # per element, of a value without loads that is copied into every reader
# the same for a value of one axis: CPU kernels compute it once, and its formula repeats subterms
MAX_TABLE_FLOPS = 512


@dataclass(eq=False)
class Segment:
    """The statements that one kernel computes."""

    structure: LoopStructure
    reason: str = "the region ends"  # why it ends where it does
    stored: tuple[str, ...] = ()
    position: int = 0  # of its first statement in the program

    @property
    def names(self) -> list[str]:
        return list(self.structure.statements)

    def __str__(self) -> str:
        return f"{', '.join(self.names)} → {', '.join(self.stored)}"


def collect_statement_info(region: Region) -> dict[str, StatementInfo]:
    """Describes every statement in terms of loops, by name."""
    ids = assign_loop_ids(region)
    axes_of = {s.name: s.axes for s in region.statements}
    initial_reads = {s.name: _find_initial_reads(s) for s in region.statements}
    in_memory = frozenset().union(*initial_reads.values())
    found: dict[str, StatementInfo] = {}
    for s in region.statements:
        over = s.reduction.axes if s.reduction else ()
        found[s.name] = StatementInfo(
            s,
            frozenset(ids[(s.name, axis)] for axis in s.loop_axes),
            frozenset(ids[(s.name, axis)] for axis in over),
            frozenset([ids[(s.name, s.scan.axis)]] if s.scan else []),
            collect_reads(s, ids, axes_of),
            cost.count_flops(s),
            cost.tensor_bytes(s.tensor),
            cost.count_elements(
                tuple(axis.size for axis in (s.loop_axes if s.scatter else s.all_axes))
            ),
            not (s.loads or s.reduction or s.scan or s.scatter)
            and s.name not in in_memory
            and cost.count_flops(s) <= (MAX_COPY_FLOPS if len(s.axes) > 1 else MAX_TABLE_FLOPS),
            initial_reads[s.name],
            frozenset(ids[(s.name, axis)] for axis in _rank_axes(s)),
            _count_repeated_reads(s),
            tuple(ids[(s.name, axis)] for axis in s.axes),
        )
    return found


def _find_initial_reads(s: Statement) -> frozenset[str]:
    """Returns what an indexed store copies before it stores."""
    return frozenset(load.name for load in collect_loads(s.expression)) if s.scatter else NO_READS


def _count_repeated_reads(s: Statement) -> tuple[tuple[str, int], ...]:
    """Returns the names that the statement loads at several indices, and at how many."""
    counts = Counter(load.name for load in dict.fromkeys(s.loads))
    return tuple((name, count) for name, count in counts.items() if count > 1)


def _rank_axes(s: Statement) -> set[Axis]:
    """Returns the axes over the ranks of an argsort."""
    rank = s.reduction.rank if s.reduction is not None else None
    return set() if rank is None else rank.axes()


def measure_loops(
    region: Region, statements: dict[str, StatementInfo], row_bytes_limit: RowBytesLimit
) -> LoopSizes:
    """Finds the size of every loop and the bytes that it traverses with stride 1."""
    ids = assign_loop_ids(region)
    sizes = {
        ids[(s.name, axis)]: cost.size_hint(axis.size)
        for s in region.statements
        for axis in s.all_axes
    }
    contiguous: dict[int, int] = {}
    for read in {r for info in statements.values() for r in info.reads}:
        tensor = region.tensors[read.name]
        for loop, stride in zip(read.loops, tensor.strides, strict=True):
            if loop is not None and stride == 1:
                contiguous[loop] = contiguous.get(loop, 0) + cost.tensor_bytes(tensor)
    dynamic = frozenset(
        ids[(s.name, axis)]
        for s in region.statements
        for axis in s.all_axes
        if not axis.size.is_constant
    )
    return LoopSizes(sizes, contiguous, row_bytes_limit, dynamic)


class Segmentation:
    """Segments by id, and the statements of the region by name."""

    def __init__(self, region: Region, row_bytes_limit: RowBytesLimit) -> None:
        self.statements = collect_statement_info(region)
        self.order = {name: k for k, name in enumerate(self.statements)}
        self.loop_sizes = measure_loops(region, self.statements, row_bytes_limit)
        self.tensors = region.tensors
        computed = {s.name for s in region.statements if not s.tensor.is_empty}
        self.results = region.results & computed
        self.bytes = {t.name: cost.tensor_bytes(t) for t in region.tensors.values()}
        self.readers: dict[str, list[str]] = {}
        for f in self.statements.values():
            for name in dict.fromkeys(r.name for r in f.reads):
                self.readers.setdefault(name, []).append(f.name)
        self.segments: dict[int, Segment] = {}
        # the segment that stores a statement's value
        self.owner: dict[str, int] = {}
        # every segment that computes a statement; filled by `index_segments`
        self.computing_segments: dict[str, list[int]] = {}
        # the segments that a segment reads from
        self.dependencies: dict[int, set[int]] = {}
        # the position in the program of a segment's last statement
        self.last_position: dict[int, int] = {}
        # why a statement is not in the segment of its producer
        self.split_reasons: dict[str, str] = {}
        self.next_id = 0

    def find_dependencies(self, segment_id: int) -> set[int]:
        """Returns the segments that this one reads from."""
        members = self.segments[segment_id].structure.statements
        found: set[int] = set()
        for f in members.values():
            for read in f.reads:
                if read.name not in members and read.name in self.owner:
                    found.add(self.owner[read.name])
        return found

    def reaches(self, start: int, targets: set[int], skip: int | None = None) -> bool:
        """Whether some target depends on `start`, not counting paths through `skip`."""
        seen: set[int] = set()
        stack = [t for t in targets if t != start]
        if start in targets:
            return True
        low = self.segments[start].position
        while stack:
            segment_id = stack.pop()
            if segment_id in seen or segment_id == skip:
                continue
            seen.add(segment_id)
            for before in self.dependencies[segment_id]:
                if before == start:
                    return True
                if self.last_position[before] >= low:
                    stack.append(before)
        return False

    def build_structure(self, names: Iterable[str]) -> LoopStructure | str:
        """Builds one kernel of these statements. Returns the reason if there is none."""
        ordered = sorted(set(names), key=self.order.__getitem__)
        if len(ordered) > MAX_STATEMENTS:
            return f"a kernel has at most {MAX_STATEMENTS} statements"
        reason = "nothing to compute"
        # The first reduction decides grid and body. If that fails, try the next ones.
        reductions: list[str | None] = [n for n in ordered if self.statements[n].reduced_loops]
        is_row_program = any(self.statements[n].is_argsort for n in ordered)
        firsts = [None] if is_row_program else reductions[:4] or [None]
        for first in firsts:
            structure = LoopStructure(self.loop_sizes, is_row_program=is_row_program)
            if first is not None:
                lead = self.statements[first]
                structure.grid, structure.body, structure.has_reduction = (
                    lead.parallel_loops,
                    lead.reduced_loops,
                    True,
                )
            problem: str | None = None
            for name in ordered:
                problem = structure.try_add(self.statements[name])
                if problem:
                    break
            if problem is None:
                return structure
            reason = problem
        return reason

    def find_stored(self, segment_id: int) -> list[str]:
        """Returns what the segment must store: results, and values that other segments read."""
        result = []
        for name in self.segments[segment_id].structure.statements:
            if self.owner.get(name) != segment_id:
                continue
            outside = any(
                name not in self.segments[k].structure.statements
                for reader in self.readers.get(name, ())
                for k in self.find_computing_segments(reader)
            )
            if name in self.results or outside:
                result.append(name)
        return result

    def find_computing_segments(self, name: str) -> list[int]:
        """Returns the segments that compute a statement: its owner, or all that recompute it."""
        if name not in self.computing_segments:
            return [self.owner[name]] if name in self.owner else []
        return self.computing_segments[name]

    def count_bytes_moved(self, names: Iterable[str], stored: Iterable[str]) -> int:
        """Returns the bytes that a kernel reads and writes."""
        members = set(names)
        loaded = {
            r.name for n in members for r in self.statements[n].reads if r.name not in members
        }
        total = sum(self.bytes[name] for name in loaded)
        return total + sum(self.bytes[name] for name in stored)

    def update_dependencies(self) -> None:
        """Recomputes `dependencies` and `last_position` of all segments."""
        self.dependencies = {
            segment_id: self.find_dependencies(segment_id) for segment_id in self.segments
        }
        self.last_position = {
            segment_id: max(self.order[n] for n in s.structure.statements)
            for segment_id, s in self.segments.items()
        }

    def replace_structure(self, segment_id: int, structure: LoopStructure | None) -> None:
        """Replaces or (None) deletes a segment, and updates `computing_segments`."""
        old = self.segments[segment_id].structure.statements if segment_id in self.segments else {}
        for name in old:
            if not self.statements[name].is_constant:
                self.computing_segments[name] = [
                    k for k in self.computing_segments[name] if k != segment_id
                ]
        if structure is None:
            del self.segments[segment_id]
            return
        position = min(self.order[name] for name in structure.statements)
        self.segments[segment_id] = Segment(structure, position=position)
        for name in structure.statements:
            if not self.statements[name].is_constant:
                self.computing_segments.setdefault(name, []).append(segment_id)

    def prune_segment(self, segment_id: int) -> None:
        """Drops statements that no stored value of the segment needs any more."""
        needed = set(self.find_stored(segment_id))
        members = self.segments[segment_id].structure.statements
        for name in sorted(members, key=self.order.__getitem__, reverse=True):
            if name in needed:
                needed.update(r.name for r in members[name].reads if r.name in members)
        if not needed:
            self.replace_structure(segment_id, None)
            return
        if len(needed) == len(members):
            return
        structure = self.build_structure(needed)
        if isinstance(structure, LoopStructure):
            self.replace_structure(segment_id, structure)

    def index_segments(self) -> None:
        """Recomputes `computing_segments`."""
        self.computing_segments = {}
        for segment_id, segment in self.segments.items():
            for name in segment.structure.statements:
                if not self.statements[name].is_constant:
                    self.computing_segments.setdefault(name, []).append(segment_id)

    def find_pointwise_closure(self, name: str, stored: set[str]) -> list[str] | None:
        """Returns what a separate kernel of this statement computes; None if it would reduce."""
        found: dict[str, None] = {}
        stack = [name]
        while stack:
            top = stack.pop()
            if top in found:
                continue
            if self.statements[top].is_reduction_or_scan:
                return None
            found[top] = None
            for read in self.statements[top].reads:
                if read.name in self.statements and read.name not in stored:
                    stack.append(read.name)
        return list(found)

    def sort_topologically(self) -> list[int]:
        """Returns the segments in execution order, without those in a dependency cycle."""
        dependencies = {
            segment_id: self.find_dependencies(segment_id) & self.segments.keys()
            for segment_id in self.segments
        }
        done: dict[int, None] = {}
        ready = sorted(self.segments, key=lambda k: self.segments[k].position)
        progress = True
        while progress and len(done) < len(ready):
            progress = False
            for segment_id in ready:
                if segment_id not in done and dependencies[segment_id] <= done.keys():
                    done[segment_id] = None
                    progress = True
        return list(done)
