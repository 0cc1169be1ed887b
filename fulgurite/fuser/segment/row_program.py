"""Row programs: kernels that compute one statement of a row after the other.

They have a sort, or *nested* reductions: of a row, and of blocks of its columns.

In: statements, with the loop ids of their axes. Out: the grid of a row program, or the reason why
there is none. Every other loop belongs to a row. A statement's values stay in a row buffer (C++) or
in registers (Triton), so later statements of the row may read them at any position, also at a
computed one. A kernel may sort, reduce and gather along different axes.

    softmax → topk → renormalize    the grid is the tokens; experts and ranks are loops of the row
    rms_norm → amax of 32 → cast    the grid is the tokens; blocks and their columns are loops of the row
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fulgurite.fuser.segment.loop_structure import LoopSet, LoopSizes, StatementInfo

# A sort's own rows are not merged into fewer than MIN_ROWS longer rows, which few threads would
# compute, unless all of them have at most MAX_SERIAL_POINTS points.
MIN_ROWS, MAX_SERIAL_POINTS = 64, 4096
MAX_GPU_POINTS = 8192  # of one value in a row, which a program holds in registers
MAX_BLOCK_POINTS = 256  # of a nested reduction: the blocks of all quantized formats are smaller


def find_row_grid(statements: Sequence[StatementInfo], loops: LoopSizes) -> LoopSet | str:
    """Returns the loops that no statement reduces, sorts, or reads at other rows; or a reason."""
    leads = [info for info in statements if info.is_argsort]
    is_nested = not leads
    if is_nested:
        leads = [info for info in statements if info.reduced_loops]
        if not has_nested_reductions(leads, loops):
            return f"{leads[-1].name} reduces over other axes than {leads[0].name}"
    grid = frozenset().union(*(info.parallel_loops - info.rank_loops for info in leads))
    for info in statements:
        if info.scanned_loops or info.is_scatter:
            return f"a kernel with a sort can't have a scan or an indexed store ({info.name})"
        if info.is_reduction_or_scan:
            grid &= info.parallel_loops - info.rank_loops
    grid = _drop_misaligned_loops(statements, grid)
    if is_nested and not grid:
        return f"{leads[-1].name} needs all rows of {leads[0].name}"
    return _check_rows(statements, leads, grid, loops) or grid


def has_nested_reductions(reductions: Sequence[StatementInfo], loops: LoopSizes) -> bool:
    """Whether some reduce blocks of at most MAX_BLOCK_POINTS inside the rows that others reduce."""
    sets = sorted({info.reduced_loops for info in reductions}, key=len)
    is_chain = all(inner < outer for inner, outer in pairwise(sets))
    return (
        len(sets) > 1
        and is_chain
        and all(loops.count_points(inner) <= MAX_BLOCK_POINTS for inner in sets[:-1])
    )


def _drop_misaligned_loops(statements: Sequence[StatementInfo], grid: LoopSet) -> LoopSet:
    """Drops loops along which a statement reads another one at other points."""
    names = {info.name for info in statements}
    changed = True
    while changed:
        changed = False
        for read in (read for info in statements for read in info.reads if read.name in names):
            pairs = zip(read.loops, read.source_loops, strict=True)
            misaligned = {theirs for mine, theirs in pairs if mine != theirs} & grid
            if misaligned:
                grid, changed = grid - misaligned, True
    return grid


def _count_row_points(info: StatementInfo, grid: LoopSet, loops: LoopSizes) -> int:
    """Returns the points of a row: of an argsort, keys or ranks, whichever are more."""
    keys = loops.count_points(info.loops - info.rank_loops - grid)
    return max(keys, loops.count_points(info.parallel_loops - grid))


def _check_rows(
    statements: Sequence[StatementInfo],
    leads: Sequence[StatementInfo],
    grid: LoopSet,
    loops: LoopSizes,
) -> str | None:
    """Returns why rows of this grid are no kernel: too few, too long, or the same work in each."""
    rows = loops.count_points(grid)
    natural_rows = min(loops.count_points(s.parallel_loops - s.rank_loops) for s in leads)
    points = max(_count_row_points(info, grid, loops) for info in statements)
    names = ", ".join(s.name for s in leads)
    if rows < min(natural_rows, MIN_ROWS) and points > MAX_SERIAL_POINTS:
        return f"the kernel of {names} would have {rows} rows instead of {natural_rows}"
    for info in statements:
        if info.is_reduction_or_scan and not grid <= info.parallel_loops:
            return f"{info.name} is the same for every row of {names}"
    if loops.is_cpu:
        is_too_long = 4 * points > loops.max_row_bytes(rows) and len(statements) > 1
        return f"the rows of {names} are too long for the cache" if is_too_long else None
    if _has_crossed_sorts(
        [info for info in leads if info.is_argsort]
    ):  # gave wrong values on an H200 with Triton 3.6
        return f"{names} sort across each other's rows"
    if points > MAX_GPU_POINTS:
        return f"the rows of {names} are too long for registers"
    if any(info.loops - grid & loops.dynamic_loops for info in statements):
        return f"the rows of {names} have a dynamic size"
    return None


def _has_crossed_sorts(sorts: Sequence[StatementInfo]) -> bool:
    """Whether one sort is along a loop over whose points another one sorts its rows."""
    rows = frozenset().union(*(info.parallel_loops - info.rank_loops for info in sorts))
    return any((info.loops - info.parallel_loops) & rows for info in sorts)
