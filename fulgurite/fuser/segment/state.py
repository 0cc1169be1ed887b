"""What a cut into kernels is while it is made: which statements are in which segment, and its bytes.

In: a refined region. Out: a `Segmentation` that `join`, `merge`, `recompute` and `finish` change in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fulgurite.fuser import cost
from fulgurite.fuser.ir.split_axes import axis_classes
from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.segment.loop_structure import Facts, Loops, RowLimit, Shape, readings

MOST_STATEMENTS = 160  # of one kernel: longer ones compile slowly and spill registers
COPY_FLOPS = 48  # per element: what a value that reads nothing may cost to be copied everywhere


@dataclass(eq=False)
class Segment:
    """Statements that one kernel computes."""

    shape: Shape
    reason: str = "the region ends"
    stored: tuple[str, ...] = ()
    position: int = 0

    @property
    def names(self) -> list[str]:
        return list(self.shape.facts)

    def __str__(self) -> str:
        return f"{', '.join(self.names)} → {', '.join(self.stored)}"


def facts_of(region: Region) -> dict[str, Facts]:
    classes = axis_classes(region)
    axes_of = {s.name: s.axes for s in region.statements}
    found: dict[str, Facts] = {}
    for s in region.statements:
        over = s.reduction.axes if s.reduction else ()
        found[s.name] = Facts(
            s,
            frozenset(classes[(s.name, axis)] for axis in s.axes),
            frozenset(classes[(s.name, axis)] for axis in over),
            frozenset([classes[(s.name, s.scan.axis)]] if s.scan else []),
            readings(s, classes, axes_of),
            cost.flops(s),
            cost.tensor_bytes(s.tensor),
            cost.elements(tuple(axis.size for axis in s.all_axes)),
            not (s.loads or s.reduction or s.scan) and cost.flops(s) <= COPY_FLOPS,
        )
    return found


def loops_of(region: Region, facts: dict[str, Facts], row_limit: RowLimit) -> Loops:
    classes = axis_classes(region)
    sizes = {
        classes[(s.name, axis)]: cost.number(axis.size)
        for s in region.statements
        for axis in s.all_axes
    }
    runs: dict[int, int] = {}
    for reading in {r for f in facts.values() for r in f.readings}:
        tensor = region.tensors[reading.name]
        for one, stride in zip(reading.classes, tensor.strides, strict=True):
            if one is not None and stride == 1:
                runs[one] = runs.get(one, 0) + cost.tensor_bytes(tensor)
    return Loops(sizes, runs, row_limit)


class Segmentation:
    """Segments by number, and what is known about the statements in them."""

    def __init__(self, region: Region, row_bytes_limit: RowLimit) -> None:
        self.facts = facts_of(region)
        self.order = {name: k for k, name in enumerate(self.facts)}
        self.loops = loops_of(region, self.facts, row_bytes_limit)
        self.tensors = region.tensors
        made = {s.name for s in region.statements if not s.tensor.is_empty}
        self.wanted = region.results & made
        self.bytes = {t.name: cost.tensor_bytes(t) for t in region.tensors.values()}
        self.readers: dict[str, list[str]] = {}
        for f in self.facts.values():
            for name in dict.fromkeys(r.name for r in f.readings):
                self.readers.setdefault(name, []).append(f.name)
        self.segments: dict[int, Segment] = {}
        self.home: dict[str, int] = {}  # the segment that stores a statement's value
        self.copies: dict[
            str, list[int]
        ] = {}  # the segments that compute it, once they are counted
        self.parents: dict[int, set[int]] = {}  # the segments that one reads from
        self.last: dict[int, int] = {}  # the place in the program of a segment's last statement
        self.cuts: dict[str, str] = {}  # why a statement did not join what it reads
        self.next = 0

    def producers(self, key: int) -> set[int]:
        """Segments that this one reads from."""
        members = self.segments[key].shape.facts
        found: set[int] = set()
        for f in members.values():
            for reading in f.readings:
                if reading.name not in members and reading.name in self.home:
                    found.add(self.home[reading.name])
        return found

    def reaches(self, start: int, targets: set[int], skip: int | None = None) -> bool:
        """Does some target depend on `start`, through segments other than `skip`?"""
        seen: set[int] = set()
        stack = [t for t in targets if t != start]
        if start in targets:
            return True
        low = self.segments[start].position
        while stack:
            key = stack.pop()
            if key in seen or key == skip:
                continue
            seen.add(key)
            for before in self.parents[key]:
                if before == start:
                    return True
                if self.last[before] >= low:
                    stack.append(before)
        return False

    def fold(self, names: Iterable[str]) -> Shape | str:
        """The shape of a set of statements, in order, or why there is none."""
        ordered = sorted(set(names), key=self.order.__getitem__)
        if len(ordered) > MOST_STATEMENTS:
            return f"a kernel has at most {MOST_STATEMENTS} statements"
        reason = "nothing to compute"
        # the first reduction decides grid and body; where that fails, another one may decide better
        reductions: list[str | None] = [n for n in ordered if self.facts[n].reduced]
        firsts = reductions[:4] or [None]
        for first in firsts:
            shape = Shape(self.loops)
            if first is not None:
                lead = self.facts[first]
                shape.grid, shape.body, shape.reduces = lead.kept, lead.reduced, True
            problem: str | None = None
            for name in ordered:
                problem = shape.extend(self.facts[name])
                if problem:
                    break
            if problem is None:
                return shape
            reason = problem
        return reason

    def stored(self, key: int) -> list[str]:
        """What the segment must write: outputs, and what other segments read from it."""
        result = []
        for name in self.segments[key].shape.facts:
            if self.home.get(name) != key:
                continue
            outside = any(
                name not in self.segments[k].shape.facts
                for reader in self.readers.get(name, ())
                for k in self.computed_in(reader)
            )
            if name in self.wanted or outside:
                result.append(name)
        return result

    def computed_in(self, name: str) -> list[int]:
        """The segments that compute a statement: its home, or each that has a copy of it."""
        if name not in self.copies:
            return [self.home[name]] if name in self.home else []
        return self.copies[name]

    def moved(self, names: Iterable[str], stored: Iterable[str]) -> int:
        """Bytes in and out of a kernel."""
        members = set(names)
        inside = {r.name for n in members for r in self.facts[n].readings if r.name not in members}
        total = sum(self.bytes[name] for name in inside)
        return total + sum(self.bytes[name] for name in stored)

    def connect(self) -> None:
        """Which segment reads from which, and where in the program each ends."""
        self.parents = {key: self.producers(key) for key in self.segments}
        self.last = {
            key: max(self.order[n] for n in s.shape.facts) for key, s in self.segments.items()
        }

    def replace(self, key: int, shape: Shape | None) -> None:
        """Gives a segment another shape (None: no segment), and counts where statements are."""
        had = self.segments[key].shape.facts if key in self.segments else {}
        for name in had:
            if not self.facts[name].constant:
                self.copies[name] = [k for k in self.copies[name] if k != key]
        if shape is None:
            del self.segments[key]
            return
        position = min(self.order[name] for name in shape.facts)
        self.segments[key] = Segment(shape, position=position)
        for name in shape.facts:
            if not self.facts[name].constant:
                self.copies.setdefault(name, []).append(key)

    def prune(self, key: int) -> None:
        """Drops statements that nothing stored by the segment needs any more."""
        needed = set(self.stored(key))
        members = self.segments[key].shape.facts
        for name in sorted(members, key=self.order.__getitem__, reverse=True):
            if name in needed:
                needed.update(r.name for r in members[name].readings if r.name in members)
        if not needed:
            self.replace(key, None)
            return
        if len(needed) == len(members):
            return
        shape = self.fold(needed)
        if isinstance(shape, Shape):
            self.replace(key, shape)

    def count_copies(self) -> None:
        """Finds again which segments compute what."""
        self.copies = {}
        for key, segment in self.segments.items():
            for name in segment.shape.facts:
                if not self.facts[name].constant:
                    self.copies.setdefault(name, []).append(key)

    def pointwise_closure(self, name: str, stored: set[str]) -> list[str] | None:
        """What a kernel of its own for this statement computes; None where a reduction is in it."""
        found: dict[str, None] = {}
        stack = [name]
        while stack:
            top = stack.pop()
            if top in found:
                continue
            if self.facts[top].collects:
                return None
            found[top] = None
            for reading in self.facts[top].readings:
                if reading.name in self.facts and reading.name not in stored:
                    stack.append(reading.name)
        return list(found)

    def run_order(self) -> list[int]:
        """Segments after those they read from; without the ones that wait for each other."""
        parents = {key: self.producers(key) & self.segments.keys() for key in self.segments}
        done: dict[int, None] = {}
        ready = sorted(self.segments, key=lambda k: self.segments[k].position)
        progress = True
        while progress and len(done) < len(ready):
            progress = False
            for key in ready:
                if key not in done and parents[key] <= done.keys():
                    done[key] = None
                    progress = True
        return list(done)
