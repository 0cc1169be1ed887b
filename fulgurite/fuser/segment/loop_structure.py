"""The loop structure of a kernel: its grid and body loops, and the role of each statement in them.

In: statements, one after the other, with the loop ids of their axes. Out: a `LoopStructure` that
contains them, or the reason why one could not be added. It knows no threads and no target language.
Schedules turn it into loops.

The grid loops run once each. The body loops run inside them, possibly several times ("passes"). A
row is the body at one grid point. Roles of statements:

    body              computed at every point of grid x body
    row               computed once per grid point
    row_reduction     a reduction over the body; ready one pass later, then a row value
    column_reduction  a reduction over the grid; ready after all grid points
    full_reduction    a reduction over both grid and body
    scan              a scan along the body; the kernel then has no reduction and one pass
    finalize          computed at the end, from column and full reductions
    row_step          of a row program (`row_program.py`): computed for a whole row at once
    (an indexed store is a body statement: the kernel has no reduction, and no statement after it)
    inline            has other axes; computed wherever it is used, can't be stored by this kernel
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Role
from fulgurite.fuser.ir.statement import Statement
from fulgurite.fuser.segment.row_program import find_row_grid

LoopIds = Mapping[tuple[str, Axis], int]  # of a statement's axis
LoopSet = frozenset[int]  # of loop ids
NO_LOOPS: LoopSet = frozenset()
MIN_ROW_BYTES = 64  # of float32: one AVX-512 vector
# The longest row, in bytes of float32, that a second pass may read or that column reductions may
# accumulate: a number, or a function of (number of rows, is_column_reduction, is_strided). Rows are
# strided if the grid loops, not the body loops, are contiguous in memory.
RowBytesLimit = int | Callable[[int, bool, bool], int]
AFTER_GRID = ("column_reduction", "full_reduction", "finalize")


@dataclass(frozen=True, slots=True)
class Read:
    """One load of a statement, in terms of loops."""

    name: str
    loops: tuple[int | None, ...]  # of the index of each dimension; None if it is not a single axis
    source_loops: tuple[int, ...]  # of the axes of the loaded statement; empty for inputs

    @property
    def is_aligned(self) -> bool:
        """Whether each point reads the producer's value at the same point."""
        return self.loops == self.source_loops

    def is_grid_aligned(self, grid: LoopSet) -> bool:
        """Whether each point reads values of its own row."""
        pairs = zip(self.loops, self.source_loops, strict=True)
        return all(mine == theirs for mine, theirs in pairs if theirs in grid)


# A kernel recomputes too much if broadcast values cost more than MAX_BROADCAST_FLOPS per point and
# more than MIN_RECOMPUTED_FLOPS in total. Less work than that takes less time than another launch.
MAX_BROADCAST_FLOPS, MIN_RECOMPUTED_FLOPS = 16, 1 << 23
# It does as well if values that are read at several points, as by a pooling window, have more loads and
# FLOPs than MAX_REPEATED_FLOPS, because each of them is text of the kernel. Triton 3.6 compiles an average of
# 49 GELUs (1,470) in a second, a maximum of 64 bicubic interpolations (8,640) in minutes.
MAX_REPEATED_FLOPS = 2048


@dataclass(frozen=True, slots=True)
class StatementInfo:
    """A statement, with what segmentation needs to know of it."""

    statement: Statement
    parallel_loops: LoopSet
    reduced_loops: LoopSet
    scanned_loops: LoopSet
    reads: tuple[Read, ...]
    flops: int
    bytes: int  # of its result, if stored
    elements: int  # points of its loops
    is_constant: bool  # reads nothing and is cheap: copied into every segment that uses it
    # of an indexed store: the statements of its initial value, which must be in memory
    initial_reads: frozenset[str] = frozenset()
    rank_loops: LoopSet = NO_LOOPS  # of an argsort: the loops over ranks
    # names that it reads at several points, and how many
    repeated_reads: tuple[tuple[str, int], ...] = ()
    result_loops: tuple[int | None, ...] = ()  # of each dimension of its result

    @property
    def name(self) -> str:
        return self.statement.name

    @property
    def loops(self) -> LoopSet:
        return self.parallel_loops | self.reduced_loops

    @property
    def is_reduction_or_scan(self) -> bool:
        """Whether one value combines many points."""
        return bool(self.reduced_loops or self.scanned_loops or self.is_scatter)

    @property
    def is_table(self) -> bool:
        """Whether it is a constant of one axis, which CPU kernels compute once for all points."""
        return self.is_constant and len(self.loops) <= 1

    @property
    def is_argsort(self) -> bool:
        """Whether it sorts. Its kernel is a row program."""
        return self.statement.reduction is not None and self.statement.reduction.rank is not None

    @property
    def is_scatter(self) -> bool:
        """Whether it stores at computed indices: any element may be written at any point."""
        return self.statement.scatter is not None


@dataclass(frozen=True)
class LoopSizes:
    """Sizes of a region's loops, by loop id, and the limit of a row."""

    sizes: dict[int, int]
    contiguous_bytes: dict[int, int]  # bytes of all loads for which the loop has stride 1
    row_bytes_limit: RowBytesLimit
    dynamic_loops: LoopSet = NO_LOOPS  # whose size is not known

    @property
    def is_cpu(self) -> bool:
        """Whether kernels are C++. The limit of GPU kernels is a function."""
        return isinstance(self.row_bytes_limit, int)

    def max_row_bytes(self, rows: int) -> int:
        """Returns the longest row, of float32, that a kernel may read twice."""
        limit = self.row_bytes_limit
        return limit if isinstance(limit, int) else limit(rows, False, False)

    def count_points(self, loops: LoopSet) -> int:
        total = 1
        for loop in loops:
            total *= self.sizes[loop]
        return total

    def count_contiguous_bytes(self, loops: LoopSet) -> int:
        return sum(self.contiguous_bytes.get(loop, 0) for loop in loops)


@dataclass
class LoopStructure:
    """Loops and statements of one kernel. `try_add` adds a statement or returns why it can't."""

    loop_sizes: LoopSizes
    grid: LoopSet = NO_LOOPS
    body: LoopSet = NO_LOOPS
    has_reduction: bool = False
    has_scan: bool = False
    has_scatter: bool = False  # an indexed store, which ends the kernel
    is_row_program: bool = False  # has a sort or nested reductions: `row_program.py`
    is_nested: bool = False  # a row program because of nested reductions
    roles: dict[str, Role] = field(default_factory=dict)
    ready_pass: dict[str, int] = field(default_factory=dict)  # passes that must run before
    statements: dict[str, StatementInfo] = field(default_factory=dict)

    def copy(self) -> LoopStructure:
        return replace(
            self,
            roles=dict(self.roles),
            ready_pass=dict(self.ready_pass),
            statements=dict(self.statements),
        )

    def recomputes_too_much(self) -> bool:
        """Whether broadcast values cost much at every point, as RoPE's sine for each head would."""
        points = 0 if self.has_reduction else self.loop_sizes.count_points(self.grid)
        broadcast = (f for f in self.statements.values() if 2 * f.elements <= points)
        flops = sum(f.flops for f in broadcast if not f.is_table)
        if flops > MAX_BROADCAST_FLOPS and flops * points > MIN_RECOMPUTED_FLOPS:
            return True
        return self._count_repeated_flops() > MAX_REPEATED_FLOPS

    def _count_repeated_flops(self) -> int:
        """Loads and FLOPs of the values that are computed at several points for one point of a reader."""
        copies: dict[str, int] = {}
        total = 0
        for name, info in reversed(self.statements.items()):
            own = copies.get(name, 1)
            if own > 1 and not info.is_table:
                total += own * (info.flops + len(info.statement.loads))
            counts = dict(info.repeated_reads)
            if own > 1 or counts:
                for read in info.reads:
                    points = own * counts.get(read.name, 1)
                    copies[read.name] = max(copies.get(read.name, 1), points)
        return total

    def try_add(self, new: StatementInfo) -> str | None:
        """Adds a statement after its producers. Returns the reason if it can't be added."""
        if self.has_scatter:
            return f"{new.name} is not needed by the indexed store of the kernel"
        if new.is_scatter:
            return self._try_add_scatter(new)
        if self.is_row_program or new.is_argsort:
            return self._try_add_row_step(new)
        if self.has_scan or new.scanned_loops:
            return self._try_add_scan(new)
        if not self.has_reduction:
            return self._try_add_pointwise(new)
        role, reason = self._find_role(new)
        if reason:
            return self._try_nest(new) if new.reduced_loops else reason
        self._record(new, role)
        return None

    def _record(self, new: StatementInfo, role: Role) -> None:
        self.roles[new.name] = role
        self.statements[new.name] = new
        ready = 0
        for read in new.reads:
            if read.name in self.ready_pass:
                ready = max(ready, self.ready_pass[read.name])
        welford_sum = self._find_welford_sum(new)
        if welford_sum is not None:
            ready = self.ready_pass[welford_sum] - 1
        self.ready_pass[new.name] = ready + 1 if role == "row_reduction" else ready

    def _try_add_pointwise(self, new: StatementInfo) -> str | None:
        if not new.reduced_loops:
            if not new.loops <= self.grid:
                self.set_grid(new.loops)
            self._record(new, "body")
            return None
        # The first reduction decides which loops are grid and which are body.
        rebuilt = LoopStructure(self.loop_sizes, new.parallel_loops, new.reduced_loops, True)
        for info in (*self.statements.values(), new):
            role, reason = rebuilt._find_role(info)
            if reason:
                return reason
            rebuilt._record(info, role)
        self.grid, self.body, self.has_reduction = rebuilt.grid, rebuilt.body, True
        self.roles, self.ready_pass, self.statements = (
            rebuilt.roles,
            rebuilt.ready_pass,
            rebuilt.statements,
        )
        return None

    def set_grid(self, grid: LoopSet) -> None:
        """Sets the loops of a pointwise kernel. Statements with more loops become inline."""
        self.grid = grid
        for name, info in self.statements.items():
            self.roles[name] = "body" if info.loops <= grid else "inline"

    def _try_nest(self, new: StatementInfo) -> str | None:
        """Adds a reduction over other axes: the kernel becomes a row program if they are nested."""
        trial = replace(self.copy(), is_nested=True)
        reason = trial._try_add_row_step(new)
        if reason is None:
            vars(self).update(vars(trial))
        return reason

    def _try_add_row_step(self, new: StatementInfo) -> str | None:
        """Adds to a row program. A value that is the same for every row can't be stored."""
        statements = [*self.statements.values(), new]
        if not self.is_nested and not any(info.is_argsort for info in statements):
            statements = []  # of a structure that gets its sort later
        grid = find_row_grid(statements, self.loop_sizes) if statements else NO_LOOPS
        if isinstance(grid, str):
            return grid
        self.statements[new.name] = new
        self.grid, self.has_reduction, self.is_row_program = grid, True, True
        self.body = frozenset().union(*(info.loops for info in self.statements.values())) - grid
        for name, info in self.statements.items():
            self.roles[name] = "row_step" if grid <= info.parallel_loops else "inline"
            self.ready_pass[name] = 0
        return None

    def _try_add_scatter(self, new: StatementInfo) -> str | None:
        """Adds the indexed store that ends a pointwise kernel."""
        if self.has_reduction or self.has_scan:
            return f"a kernel that stores at computed indices has no reductions ({new.name})"
        in_kernel = new.initial_reads & self.statements.keys()
        if in_kernel:
            return f"{new.name} stores on top of {min(in_kernel)}, which must be in memory first"
        self.set_grid(new.loops)
        self._record(new, "body")
        self.has_scatter = True
        return None

    def _try_add_scan(self, new: StatementInfo) -> str | None:
        """Adds to a kernel with one pass along the scanned axis.

        Readers of a scan must be aligned.
        """
        if self.has_reduction or new.reduced_loops:
            return f"a kernel with a scan can't have a reduction ({new.name})"
        rebuilt = self
        if not self.has_scan:
            grid = new.parallel_loops - new.scanned_loops
            rebuilt = LoopStructure(self.loop_sizes, grid, new.scanned_loops, has_scan=True)
            for earlier in self.statements.values():
                rebuilt._record(
                    earlier, "body" if earlier.loops <= new.parallel_loops else "inline"
                )
        points = rebuilt.grid | rebuilt.body
        if new.scanned_loops and (
            new.scanned_loops != rebuilt.body or new.parallel_loops != points
        ):
            return f"{new.name} scans along another axis"
        for read in new.reads:
            if rebuilt.ready_pass.get(read.name) and not read.is_aligned:
                return f"{new.name} reads the scan {read.name} at other points"
        late = any(rebuilt.ready_pass.get(read.name) for read in new.reads)
        if late and new.loops != points:
            return f"{new.name} has other axes than the scan that it reads"
        rebuilt._record(
            new, "scan" if new.scanned_loops else "body" if new.loops <= points else "inline"
        )
        rebuilt.ready_pass[new.name] = int(late or bool(new.scanned_loops))
        self.grid, self.body, self.has_scan = rebuilt.grid, rebuilt.body, True
        self.roles, self.ready_pass, self.statements = (
            rebuilt.roles,
            rebuilt.ready_pass,
            rebuilt.statements,
        )
        return None

    def _find_role(self, new: StatementInfo) -> tuple[Role, str | None]:
        """Returns the role of a statement and, if it can't be in this kernel, the reason."""
        producers = [(r, self.roles[r.name]) for r in new.reads if r.name in self.roles]
        if any(role in AFTER_GRID for _, role in producers):
            return self._find_finalize_role(new, producers)
        for read, role in producers:
            if read.source_loops == () and read.loops == ():
                continue  # a scalar is the same everywhere
            is_row_value = self.ready_pass[read.name] > 0 or role in ("row_reduction", "row")
            if role == "row_reduction" and not read.is_aligned:
                return "inline", f"{new.name} reads {read.name} of other rows"
            if is_row_value and not read.is_grid_aligned(self.grid):
                return "inline", f"{new.name} reads {read.name} of other rows"
        if not new.reduced_loops:
            return self._find_pointwise_role(new, producers)
        if new.parallel_loops == self.grid and new.reduced_loops == self.body:
            in_one_pass = self._find_welford_sum(new) is not None
            return "row_reduction", None if in_one_pass else self._check_row_fits(producers)
        other_axes = f"{new.name} reduces over other axes than {self._first_reduction()}"
        if not self.grid:
            return "inline", other_axes
        if new.reduced_loops == self.grid and new.parallel_loops == self.body:
            if self._row_bytes() > self._max_row_bytes(is_column_reduction=True):
                return "inline", f"the rows that {new.name} reduces over are too long for the cache"
            if self._row_bytes() < MIN_ROW_BYTES:
                return "inline", f"the rows that {new.name} reduces over are too short for SIMD"
            return "column_reduction", self._check_row_fits(producers)
        if not new.parallel_loops and new.reduced_loops in (self.grid, self.grid | self.body):
            return "full_reduction", self._check_row_fits(producers)
        return "inline", other_axes

    def _find_pointwise_role(
        self, new: StatementInfo, producers: list[tuple[Read, Role]]
    ) -> tuple[Role, str | None]:
        if not new.loops <= self.grid | self.body:
            return "inline", self._check_row_fits(producers)
        if new.loops & self.body and (new.loops & self.grid or not self.grid):
            return "body", self._check_row_fits(producers)
        if new.loops & self.grid or not new.loops:
            needs_reduction = any(self.ready_pass[r.name] for r, _ in producers)
            return ("row" if new.loops == self.grid or needs_reduction else "inline"), None
        if any(self.ready_pass[r.name] for r, _ in producers):
            return "body", self._check_row_fits(producers)
        return "inline", None

    def _find_finalize_role(
        self, new: StatementInfo, producers: list[tuple[Read, Role]]
    ) -> tuple[Role, str | None]:
        if new.reduced_loops or not new.loops <= self.body:
            return "inline", f"{new.name} needs all rows of {producers[0][0].name} first"
        for read, role in producers:
            if role in AFTER_GRID and not read.is_aligned:
                return "inline", f"{new.name} reads {read.name} at other points"
            if role not in AFTER_GRID and role != "inline":
                return "inline", f"{new.name} needs both all rows and each row"
        return "finalize", None

    def _check_row_fits(self, producers: list[tuple[Read, Role]]) -> str | None:
        """Returns a reason if another pass is needed and the row exceeds the cache."""
        if not any(self.ready_pass[read.name] for read, _ in producers):
            return None
        if self._row_bytes() > self._max_row_bytes(is_column_reduction=False):
            return "the row is too long for the cache and needs a second pass"
        return None

    def _find_welford_sum(self, new: StatementInfo) -> str | None:
        """Returns the sum with which these squared deviations share a Welford pass, or None.

        Only GPU code generation can do that; its limit is a function.
        """
        reduction = new.statement.reduction
        name = reduction.welford_sum if reduction is not None else None
        if isinstance(self.loop_sizes.row_bytes_limit, int) or name is None:
            return None
        return name if self.roles.get(name) == "row_reduction" else None

    def _max_row_bytes(self, is_column_reduction: bool) -> int:
        limit, loops = self.loop_sizes.row_bytes_limit, self.loop_sizes
        if isinstance(limit, int):
            return limit
        grid_bytes = loops.count_contiguous_bytes(self.grid)
        is_strided = grid_bytes > loops.count_contiguous_bytes(self.body)
        return limit(loops.count_points(self.grid), is_column_reduction, is_strided)

    def _row_bytes(self) -> int:
        """Returns the bytes of a row of float32."""
        return 4 * self.loop_sizes.count_points(self.body)

    def _first_reduction(self) -> str:
        return next(
            (name for name, f in self.statements.items() if f.reduced_loops), "another reduction"
        )

    def can_store(self, name: str) -> bool:
        """Whether this kernel can write the statement's result to memory."""
        role, info = self.roles[name], self.statements[name]
        if self.has_scatter:
            return info.is_scatter
        if self.is_row_program:
            return role == "row_step"
        if self.has_scan:
            return info.loops == self.grid | self.body and role != "inline"
        if not self.has_reduction:
            return info.loops == self.grid and role == "body"
        if role == "body":
            return info.loops == self.grid | self.body
        if role == "row":
            return info.loops == self.grid
        return role != "inline"


def collect_reads(
    s: Statement, loop_ids: LoopIds, axes_of: Mapping[str, tuple[Axis, ...]]
) -> tuple[Read, ...]:
    """Returns the distinct loads of a statement. `axes_of` has the axes of statements only."""
    return tuple(dict.fromkeys(_make_read(s, load, loop_ids, axes_of) for load in s.loads))


def _make_read(
    s: Statement, load: Load, loop_ids: LoopIds, axes_of: Mapping[str, tuple[Axis, ...]]
) -> Read:
    axes = [index.single_axis for index in load.index]
    loops = tuple(None if axis is None else loop_ids.get((s.name, axis)) for axis in axes)
    source = tuple(loop_ids[(load.name, axis)] for axis in axes_of.get(load.name, ()))
    return Read(load.name, loops, source)
