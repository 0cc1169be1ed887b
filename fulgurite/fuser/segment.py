"""Cuts a region into kernels so that few bytes move.

In: a refined region. Out: segments in the order they run, each with the statements it computes,
those it stores, its shape, and why it ends where it does. Statements join, in order, the segment
they save most bytes with; then whole segments are merged, and cheap producers are recomputed in
their consumers, as long as that lowers the bytes. A merge is legal when a `Shape` accepts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from . import cost
from .ir import Region
from .refine import axis_classes
from .shape import Facts, Loops, RowLimit, Shape, readings

MOST_STATEMENTS = 160  # of one kernel: longer ones compile slowly and spill registers
COPY_FLOPS = 48  # per element: what a value that reads nothing may cost to be copied everywhere
RECOMPUTE_FLOPS = 64  # per element: what a value may cost to be computed again instead of stored


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


def segment(region: Region, row_bytes_limit: RowLimit = 1 << 20) -> list[Segment]:
    """The segments of a refined region, in an order in which they can run."""
    work = Segmentation(region, row_bytes_limit)
    work.join_all()
    work.merge_all()
    work.recompute_all()
    return work.finish()


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
    def __init__(self, region: Region, row_bytes_limit: RowLimit) -> None:
        self.facts = facts_of(region)
        self.order = {name: k for k, name in enumerate(self.facts)}
        self.loops = loops_of(region, self.facts, row_bytes_limit)
        self.tensors = region.tensors
        self.wanted = region.results & self.facts.keys()
        self.bytes = {t.name: cost.tensor_bytes(t) for t in region.tensors.values()}
        self.readers: dict[str, list[str]] = {}
        for f in self.facts.values():
            for name in dict.fromkeys(r.name for r in f.readings):
                self.readers.setdefault(name, []).append(f.name)
        self.segments: dict[int, Segment] = {}
        self.home: dict[str, int] = {}
        self.cuts: dict[str, str] = {}
        self.next = 0

    # dependencies between segments

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

    # joining statements one by one

    def join_all(self) -> None:
        self.parents: dict[int, set[int]] = {}
        self.last: dict[int, int] = {}
        by_input: dict[str, list[int]] = {}
        for f in self.facts.values():
            if f.constant:
                continue
            key = self._join(f, by_input)
            for reading in f.readings:
                if reading.name not in self.home:
                    known = by_input.setdefault(reading.name, [])
                    if key not in known:
                        known.append(key)

    def _join(self, f: Facts, by_input: dict[str, list[int]]) -> int:
        gains: dict[int, int] = {}
        for name in dict.fromkeys(r.name for r in f.readings):
            if name in self.home:
                key = self.home[name]
                gains[key] = gains.get(key, 0) + 2 * self.bytes[name]
            elif name in self.bytes:
                for key in by_input.get(name, ())[-4:]:
                    gains[key] = gains.get(key, 0) + self.bytes[name]
        sources = {self.home[r.name] for r in f.readings if r.name in self.home}
        for key in sorted(gains, key=lambda k: (-gains[k], -k)):
            reason = self._try_join(key, f, sources)
            if reason is None:
                self._settle(key, f, sources)
                return key
            if key in sources:
                self.cuts.setdefault(f.name, reason)
        key = self.next
        self.next += 1
        shape = Shape(self.loops)
        self.segments[key] = Segment(shape, position=self.order[f.name])
        self.parents[key], self.last[key] = set(), self.order[f.name]
        for constant in self._constants(f, shape):
            shape.extend(constant)
        reason = shape.extend(f)
        assert reason is None, f"a kernel of one statement was refused: {reason}"
        self._settle(key, f, sources)
        return key

    def _settle(self, key: int, f: Facts, sources: set[int]) -> None:
        self.home[f.name] = key
        self.parents[key] |= sources - {key}
        self.last[key] = self.order[f.name]

    def _constants(self, f: Facts, shape: Shape) -> list[Facts]:
        names = dict.fromkeys(r.name for r in f.readings)
        return [
            self.facts[n]
            for n in names
            if n in self.facts and self.facts[n].constant and n not in shape.facts
        ]

    def _try_join(self, key: int, f: Facts, sources: set[int]) -> str | None:
        shape = self.segments[key].shape
        if len(shape.facts) >= MOST_STATEMENTS:
            return f"a kernel has at most {MOST_STATEMENTS} statements"
        others = sources - {key}
        if others and self.reaches(key, others):
            return "another kernel's result is needed in between"
        constants = self._constants(f, shape)
        fits = f.all <= shape.grid | shape.body
        if fits and not constants and not f.collects:
            reason = shape.extend(f)
            if reason is None and shape.roles[f.name] == "free":
                reason = self._remove_last(shape, f)
            return reason
        trial = shape.copy()
        for extra in (*constants, f):
            reason = trial.extend(extra)
            if reason:
                return reason
        for name, role in trial.roles.items():
            if role == "free" and not self.facts[name].constant:
                readers = self.readers.get(name, ())
                if name in self.wanted or any(r not in trial.facts for r in readers):
                    return f"{f.name} has other axes than {name}"
        self.segments[key].shape = trial
        return None

    def _remove_last(self, shape: Shape, f: Facts) -> str:
        for table in (shape.roles, shape.waits, shape.facts):
            del table[f.name]  # type: ignore[attr-defined]
        return f"{f.name} has other axes than the kernel it reads from"

    # whole segments

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
        if name not in self.copies:
            return [self.home[name]] if name in self.home else []
        return self.copies[name]

    copies: dict[str, list[int]]

    def moved(self, names: Iterable[str], stored: Iterable[str]) -> int:
        """Bytes in and out of a kernel."""
        members = set(names)
        inside = {r.name for n in members for r in self.facts[n].readings if r.name not in members}
        total = sum(self.bytes[name] for name in inside)
        return total + sum(self.bytes[name] for name in stored)

    def merge_all(self) -> None:
        """Merges pairs of segments while that saves bytes."""
        self.copies = {}
        self._connect()
        refused: set[tuple[int, int]] = set()
        changed = True
        while changed:
            changed = False
            for a, b in self._pairs():
                if (a, b) in refused or a not in self.segments or b not in self.segments:
                    continue
                if self._merge(a, b):
                    changed = True
                    refused = {pair for pair in refused if a not in pair and b not in pair}
                else:
                    refused.add((a, b))

    def _join_single_values(self) -> None:
        """One kernel for all values without axes that only inputs make: counters of steps, scales."""
        single = [
            key
            for key, segment in self.segments.items()
            if not self.producers(key) and not any(f.all for f in segment.shape.facts.values())
        ]
        while len(single) > 1:
            first, other = single[0], single.pop()
            names = [*self.segments[first].shape.facts, *self.segments[other].shape.facts]
            shape = self.fold(names)
            if isinstance(shape, str):
                continue
            position = min(self.segments[k].position for k in (first, other))
            for name in self.segments.pop(other).shape.facts:
                if self.home.get(name) == other:
                    self.home[name] = first
            self.segments[first] = Segment(shape, position=position)
        self._count_copies()

    def _pairs(self) -> list[tuple[int, int]]:
        """Segments that share a value, most bytes first."""
        shared: dict[tuple[int, int], int] = {}
        readers: dict[str, list[int]] = {}
        for key, segment in self.segments.items():
            members = segment.shape.facts
            names = {r.name for f in members.values() for r in f.readings}
            for name in names - members.keys():
                readers.setdefault(name, []).append(key)
        for name, keys in readers.items():
            home = self.home.get(name)
            group = ([home] if home is not None else []) + keys
            for k, a in enumerate(group[:12]):
                for b in group[k + 1 : 12]:
                    pair = (a, b) if a < b else (b, a)
                    if a != b:
                        shared[pair] = shared.get(pair, 0) + self.bytes[name]
        return sorted(shared, key=lambda pair: (-shared[pair], pair))

    def _merge(self, a: int, b: int) -> bool:
        parents = self.parents
        for one, other in ((a, b), (b, a)):
            between = {p for p in parents[other] if p != one}
            if between and self.reaches(one, between, skip=other):
                return False
        names = [*self.segments[a].shape.facts, *self.segments[b].shape.facts]
        shape = self.fold(names)
        if isinstance(shape, str):
            later = max(a, b, key=lambda k: self.segments[k].position)
            first = min(self.segments[later].shape.facts, key=self.order.__getitem__)
            self.cuts.setdefault(first, shape)
            return False
        if not self._saves(a, b, shape):
            return False
        for name in self.segments[b].shape.facts:
            if self.home.get(name) == b:
                self.home[name] = a
        position = min(self.segments[a].position, self.segments[b].position)
        self.segments[a] = Segment(shape, position=position)
        del self.segments[b]
        self._connect()
        return True

    def _connect(self) -> None:
        """Which segment reads from which, and where in the program each ends."""
        self.parents = {key: self.producers(key) for key in self.segments}
        self.last = {
            key: max(self.order[n] for n in s.shape.facts) for key, s in self.segments.items()
        }

    def _saves(self, a: int, b: int, shape: Shape) -> bool:
        """Does the merged kernel move fewer bytes, its unstorable results counted again?"""
        before = sum(self.moved(self.segments[k].shape.facts, self.stored(k)) for k in (a, b))
        stored = {*self.stored(a), *self.stored(b)}
        for name in list(stored):
            outside = any(reader not in shape.facts for reader in self.readers.get(name, ()))
            if name not in self.wanted and not outside:
                stored.discard(name)
        kept = [name for name in stored if shape.storable(name)]
        after = self.moved(shape.facts, kept)
        for name in stored - set(kept):
            alone = self._pointwise_closure(name, stored)
            if alone is None:
                return False
            after += self.moved(alone, [name])
        return after < before

    def _pointwise_closure(self, name: str, stored: set[str]) -> list[str] | None:
        """What a kernel of its own for this statement computes; None where a reduction is in it."""
        found: dict[str, None] = {}
        stack = [name]
        while stack:
            top = stack.pop()
            if self.facts[top].collects:
                return None
            found[top] = None
            for reading in self.facts[top].readings:
                if reading.name in self.facts and reading.name not in stored:
                    stack.append(reading.name)
        return list(found)

    # recomputing instead of storing

    def recompute_all(self) -> None:
        crossing = [
            name
            for key in self.segments
            for name in self.stored(key)
            if name not in self.wanted and not self.facts[name].collects
        ]
        stored = {n for key in self.segments for n in self.stored(key)}
        self._count_copies()
        for name in sorted(crossing, key=lambda n: (-self.bytes[n], n)):
            if name in stored and self._recompute(name, stored):
                stored = {n for key in self.segments for n in self.stored(key)}

    def closure(self, name: str, stored: set[str]) -> list[str] | None:
        """The statement and what it needs that no kernel stores; None where that is too dear."""
        found: dict[str, None] = {}
        stack, total = [name], 0
        while stack:
            top = stack.pop()
            if top in found:
                continue
            f = self.facts[top]
            if f.collects:
                return None
            found[top] = None
            total += f.flops
            for reading in f.readings:
                if reading.name in self.facts and reading.name not in stored:
                    stack.append(reading.name)
        return None if total > RECOMPUTE_FLOPS else list(found)

    def _recompute(self, name: str, stored: set[str]) -> bool:
        home = self.home[name]
        needed = self.closure(name, stored)
        if needed is None:
            return False
        users = {
            k
            for reader in self.readers.get(name, ())
            for k in self.computed_in(reader)
            if name not in self.segments[k].shape.facts
        }
        shapes: dict[int, Shape] = {}
        for key in users:
            shape = self.fold([*self.segments[key].shape.facts, *needed])
            if isinstance(shape, str):
                return False
            if not all(shape.storable(n) for n in self.stored(key)):
                return False
            shapes[key] = shape
        touched = {home, *users}
        before = self._total(touched)
        old = {key: self.segments[key] for key in touched}
        for key, shape in shapes.items():
            self._replace(key, shape)
        self._prune(home)
        if self._total(touched) < before and not self._cyclic():
            return True
        for key, segment in old.items():
            self._replace(key, segment.shape)
            self.segments[key] = segment
        return False

    def _replace(self, key: int, shape: Shape | None) -> None:
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

    def _count_copies(self) -> None:
        self.copies = {}
        for key, segment in self.segments.items():
            for name in segment.shape.facts:
                if not self.facts[name].constant:
                    self.copies.setdefault(name, []).append(key)

    def _prune(self, key: int) -> None:
        """Drops statements that nothing stored by the segment needs any more."""
        needed = set(self.stored(key))
        members = self.segments[key].shape.facts
        for name in sorted(members, key=self.order.__getitem__, reverse=True):
            if name in needed:
                needed.update(r.name for r in members[name].readings if r.name in members)
        if not needed:
            self._replace(key, None)
            return
        if len(needed) == len(members):
            return
        shape = self.fold(needed)
        if isinstance(shape, Shape):
            self._replace(key, shape)

    def _total(self, keys: set[int]) -> int:
        return sum(
            self.moved(self.segments[k].shape.facts, self.stored(k))
            for k in keys
            if k in self.segments
        )

    def _cyclic(self) -> bool:
        return len(self._run_order()) < len(self.segments)

    # the result

    def _run_order(self) -> list[int]:
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

    def finish(self) -> list[Segment]:
        self._separate_unstorable()
        self._store_constants()
        self._join_single_values()
        order = self._run_order()
        assert len(order) == len(self.segments), "segments depend on each other in a circle"
        result = []
        for key in order:
            segment = self.segments[key]
            segment.stored = tuple(self.stored(key))
            self._orient(segment)
            segment.reason = self._reason(segment)
            result.append(segment)
        return result

    def _orient(self, segment: Segment) -> None:
        """Where rows and columns are both reduced, rows are the ones contiguous in memory."""
        shape = segment.shape
        if not any(role == "colsum" for role in shape.roles.values()):
            return
        weights: dict[int, int] = {}
        for f in shape.facts.values():
            for reading in f.readings:
                tensor = self.tensors[reading.name]
                for stride, key in zip(tensor.strides, reading.classes, strict=True):
                    if key is not None and stride == 1:
                        weights[key] = weights.get(key, 0) + self.bytes[reading.name]
        if not weights:
            return
        best = max(weights, key=lambda key: weights[key])
        if best in shape.body:
            return
        for lead in [f for f in shape.facts.values() if best in f.reduced]:
            other = Shape(self.loops, lead.kept, lead.reduced, True)
            ordered = sorted(shape.facts, key=self.order.__getitem__)
            if all(other.extend(self.facts[name]) is None for name in ordered):
                if all(other.storable(name) for name in segment.stored):
                    segment.shape = other
                    return

    def _separate_unstorable(self) -> None:
        """Values a kernel computes but can't write get a small kernel of their own."""
        for key in list(self.segments):
            for name in self.stored(key):
                if self.segments[key].shape.storable(name):
                    continue
                stored = {n for k in self.segments for n in self.stored(k)} - {name}
                needed = self._pointwise_closure(name, stored)
                assert needed is not None, f"{name} can't be written by any kernel"
                shape = self.fold(needed)
                assert isinstance(shape, Shape), f"{name} has no kernel of its own: {shape}"
                self.segments[self.next] = Segment(shape, position=self.order[name])
                self.home[name] = self.next
                self.next += 1
                self._count_copies()

    def _store_constants(self) -> None:
        for name in self.wanted:
            f = self.facts[name]
            if f.constant and name not in self.home:
                shape = Shape(self.loops)
                shape.extend(f)
                self.segments[self.next] = Segment(shape, position=self.order[name])
                self.home[name] = self.next
                self.copies.setdefault(name, []).append(self.next)
                self.next += 1

    def _reason(self, segment: Segment) -> str:
        """Why the segment ends: what refused to join it, or that its results leave the region."""
        for name in segment.stored:
            for reader in self.readers.get(name, ()):
                if reader not in segment.shape.facts:
                    return self.cuts.get(reader, f"{reader} needs {name} in memory")
        return "its results leave the region"
