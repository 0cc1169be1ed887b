"""The shape of a segment: which loops are its grid, which its body, and what each statement is there.

In: statements with the classes of their axes, one after the other. Out: a `Shape` that accepted them,
or the reason one was refused. Shapes know no threads and no language; schedules turn them into loops.

Grid loops run once each; body loops run inside, possibly several times (passes). Statements are

    body      computed at every point of grid x body
    row       computed once a grid point
    rowsum    a reduction over the body: its result is a row value, ready one pass later
    colsum    a reduction over the grid: its result is ready when all grid points are done
    scalar    a reduction over grid and body both
    scan      a scan along the body; then nothing else is reduced, and the body is walked once
    post      computed from colsums and scalars, at the end
    free      has other axes: computed wherever it is used, can't be stored here
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.statement import Statement

Classes = frozenset[int]
NONE: Classes = frozenset()
SHORTEST_ROW = 64  # bytes of float32: one vector
# the longest row, in bytes of float32, that is walked again, or that is added up over rows (`summed`): one
# for all, or by the number of rows and whether rows lie across memory, neighbours side by side
RowLimit = int | Callable[[int, bool, bool], int]
AFTER = ("colsum", "scalar", "post")


@dataclass(frozen=True, slots=True)
class Reading:
    """One load of a statement: of what, and which classes its indices are plain axes of."""

    name: str
    classes: tuple[
        int | None, ...
    ]  # of the index at each dimension, None where it is no plain axis
    source: tuple[int, ...]  # of the loaded statement's own axes; empty for inputs

    @property
    def aligned(self) -> bool:
        return self.classes == self.source

    def grid_aligned(self, grid: Classes) -> bool:
        pairs = zip(self.classes, self.source, strict=True)
        return all(mine == theirs for mine, theirs in pairs if theirs in grid)


# of values that other points have, too: a point; and in all, which another kernel would take longer to start than
BROADCAST_FLOPS, FEW_FLOPS = 16, 1 << 23


@dataclass(frozen=True, slots=True)
class Facts:
    """What segmentation knows of a statement."""

    statement: Statement
    kept: Classes
    reduced: Classes
    scanned: Classes
    readings: tuple[Reading, ...]
    flops: int
    bytes: int  # of its result, if stored
    elements: int  # points of its loops
    constant: bool  # reads nothing: copied into whatever uses it

    @property
    def name(self) -> str:
        return self.statement.name

    @property
    def all(self) -> Classes:
        return self.kept | self.reduced

    @property
    def collects(self) -> bool:
        """Is one of its values made of many points?"""
        return bool(self.reduced or self.scanned)


@dataclass(frozen=True)
class Loops:
    """What shapes know of a region's loops: classes of axes, and how long rows may be."""

    sizes: dict[int, int]
    runs: dict[int, int]  # bytes that lie one after the other along a class
    row_limit: RowLimit

    def length(self, classes: Classes) -> int:
        total = 1
        for one in classes:
            total *= self.sizes[one]
        return total

    def contiguous(self, classes: Classes) -> int:
        return sum(self.runs.get(one, 0) for one in classes)


@dataclass
class Shape:
    """Statements of one kernel and their roles. `extend` adds one, or says why it can't."""

    loops: Loops
    grid: Classes = NONE
    body: Classes = NONE
    reduces: bool = False
    scans: bool = False
    roles: dict[str, str] = field(default_factory=dict)
    waits: dict[str, int] = field(default_factory=dict)  # passes over the body a value needs first
    facts: dict[str, Facts] = field(default_factory=dict)

    def copy(self) -> Shape:
        return replace(self, roles=dict(self.roles), waits=dict(self.waits), facts=dict(self.facts))

    def is_dear(self) -> bool:
        """Is much computed at many more points than there are values of it, as the sine of an angle for each head?"""
        points = 0 if self.reduces else self.loops.length(self.grid)
        again = sum(f.flops for f in self.facts.values() if 2 * f.elements <= points)
        return again > BROADCAST_FLOPS and again * points > FEW_FLOPS

    def extend(self, new: Facts) -> str | None:
        """Adds a statement whose producers here were added before; the reason where it can't be."""
        if self.scans or new.scanned:
            return self._extend_scan(new)
        if not self.reduces:
            return self._extend_pointwise(new)
        role, reason = self._role(new)
        if reason:
            return reason
        self._add(new, role)
        return None

    def _add(self, new: Facts, role: str) -> None:
        self.roles[new.name] = role
        self.facts[new.name] = new
        wait = 0
        for reading in new.readings:
            if reading.name in self.waits:
                wait = max(wait, self.waits[reading.name])
        together = self._together(new)
        if together is not None:
            wait = self.waits[together] - 1
        self.waits[new.name] = wait + 1 if role == "rowsum" else wait

    def _extend_pointwise(self, new: Facts) -> str | None:
        if not new.reduced:
            if not new.all <= self.grid:
                self.loop_over(new.all)
            self._add(new, "body")
            return None
        # the first reduction decides what is grid and what is body
        whole = Shape(self.loops, new.kept, new.reduced, True)
        for earlier in self.facts.values():
            role, reason = whole._role(earlier)
            if reason:
                return reason
            whole._add(earlier, role)
        role, reason = whole._role(new)
        if reason:
            return reason
        whole._add(new, role)
        self.grid, self.body, self.reduces = whole.grid, whole.body, True
        self.roles, self.waits, self.facts = whole.roles, whole.waits, whole.facts
        return None

    def loop_over(self, grid: Classes) -> None:
        """Other loops, where nothing is reduced: what has more of them is computed where it is used."""
        self.grid = grid
        for name, facts in self.facts.items():
            self.roles[name] = "body" if facts.all <= grid else "free"

    def _extend_scan(self, new: Facts) -> str | None:
        """One walk along the scanned axis: what reads a scan does so at the very same point."""
        if self.reduces or new.reduced:
            return f"{new.name} needs another walk than a scan"
        whole = self
        if not self.scans:
            grid = new.kept - new.scanned
            whole = Shape(self.loops, grid, new.scanned, scans=True)
            for earlier in self.facts.values():
                whole._add(earlier, "body" if earlier.all <= new.kept else "free")
        points = whole.grid | whole.body
        if new.scanned and (new.scanned != whole.body or new.kept != points):
            return f"{new.name} scans along another axis"
        for reading in new.readings:
            if whole.waits.get(reading.name) and not reading.aligned:
                return f"{new.name} reads {reading.name} at other places than it is scanned"
        late = any(whole.waits.get(reading.name) for reading in new.readings)
        if late and new.all != points:
            return f"{new.name} has other axes than the scan it reads"
        whole._add(new, "scan" if new.scanned else "body" if new.all <= points else "free")
        whole.waits[new.name] = int(late or bool(new.scanned))
        self.grid, self.body, self.scans = whole.grid, whole.body, True
        self.roles, self.waits, self.facts = whole.roles, whole.waits, whole.facts
        return None

    def _role(self, new: Facts) -> tuple[str, str | None]:
        here = [(r, self.roles[r.name]) for r in new.readings if r.name in self.roles]
        if any(role in AFTER for _, role in here):
            return self._role_after(new, here)
        for reading, role in here:
            if reading.source == () and reading.classes == ():
                continue  # a single value, the same everywhere
            waiting = self.waits[reading.name] > 0 or role in ("rowsum", "row")
            if role == "rowsum" and not reading.aligned:
                return "", f"{new.name} reads {reading.name} of other rows"
            if waiting and not reading.grid_aligned(self.grid):
                return "", f"{new.name} reads {reading.name} of other rows"
        if not new.reduced:
            return self._role_pointwise(new, here)
        if new.kept == self.grid and new.reduced == self.body:
            return "rowsum", None if self._together(new) is not None else self._fits(here)
        if not self.grid:
            return "", f"{new.name} reduces over other axes than {self._first_reduction()}"
        if new.reduced == self.grid and new.kept == self.body:
            if self._row_bytes() > self._limit(summed=True):
                return "", f"the rows that {new.name} adds up are too long for the cache"
            if self._row_bytes() < SHORTEST_ROW:
                return "", f"the rows that {new.name} adds up are too short for SIMD"
            return "colsum", self._fits(here)
        if not new.kept and new.reduced in (self.grid, self.grid | self.body):
            return "scalar", self._fits(here)
        return "", f"{new.name} reduces over other axes than {self._first_reduction()}"

    def _role_pointwise(
        self, new: Facts, here: list[tuple[Reading, str]]
    ) -> tuple[str, str | None]:
        if not new.all <= self.grid | self.body:
            return "free", self._fits(here)
        if new.all & self.body and (new.all & self.grid or not self.grid):
            return "body", self._fits(here)
        if new.all & self.grid or not new.all:
            tainted = any(self.waits[r.name] for r, _ in here)
            return ("row" if new.all == self.grid or tainted else "free"), None
        if any(self.waits[r.name] for r, _ in here):
            return "body", self._fits(here)
        return "free", None

    def _role_after(self, new: Facts, here: list[tuple[Reading, str]]) -> tuple[str, str | None]:
        if new.reduced or not new.all <= self.body:
            return "", f"{new.name} needs all rows of {here[0][0].name} first"
        for reading, role in here:
            if role in AFTER and not reading.aligned:
                return "", f"{new.name} reads {reading.name} at other places"
            if role not in AFTER and role != "free":
                return "", f"{new.name} needs all rows and each row"
        return "post", None

    def _fits(self, here: list[tuple[Reading, str]]) -> str | None:
        """A second pass over the body is made only where the row stays in cache."""
        if not any(self.waits[reading.name] for reading, _ in here):
            return None
        if self._row_bytes() > self._limit(summed=False):
            return "the row is too long for the cache, and is read again"
        return None

    def _together(self, new: Facts) -> str | None:
        """The sum in whose walk these squares about its mean are made, where the generator can."""
        reduction = new.statement.reduction
        about = reduction.about if reduction is not None else None
        rows = about is not None and self.roles.get(about) == "rowsum"
        return about if rows and not isinstance(self.loops.row_limit, int) else None

    def _limit(self, summed: bool) -> int:
        limit, loops = self.loops.row_limit, self.loops
        if isinstance(limit, int):
            return limit
        across = loops.contiguous(self.grid) > loops.contiguous(self.body)
        return limit(loops.length(self.grid), summed, across)

    def _row_bytes(self) -> int:
        """Bytes of a row of float32."""
        return 4 * self.loops.length(self.body)

    def _first_reduction(self) -> str:
        return next((name for name, f in self.facts.items() if f.reduced), "another reduction")

    def storable(self, name: str) -> bool:
        """Can this kernel write the statement's result to memory?"""
        role, facts = self.roles[name], self.facts[name]
        if self.scans:
            return facts.all == self.grid | self.body and role != "free"
        if not self.reduces:
            return facts.all == self.grid and role == "body"
        if role == "body":
            return facts.all == self.grid | self.body
        if role == "row":
            return facts.all == self.grid
        return role != "free"


def readings(s: Statement, classes: dict, axes_of: dict) -> tuple[Reading, ...]:  # type: ignore[type-arg]
    """The loads of a statement, in terms of classes; `axes_of` knows statements only."""
    found: dict[Reading, None] = {}
    for load in s.loads:
        found[_reading(s, load, classes, axes_of)] = None
    return tuple(found)


def _reading(s: Statement, load: Load, classes: dict, axes_of: dict) -> Reading:  # type: ignore[type-arg]
    mine: list[int | None] = []
    for index in load.index:
        axis = index.plain
        mine.append(classes.get((s.name, axis)) if axis is not None else None)
    source = tuple(classes[(load.name, axis)] for axis in axes_of.get(load.name, ()))
    return Reading(load.name, tuple(mine), source)
