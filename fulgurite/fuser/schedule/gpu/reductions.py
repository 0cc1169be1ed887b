"""GPU kernels that reduce: rows in registers or in walks, columns, sums over rows, and what adds parts up.

In: a nest with a body, and what is known of the device. Out: its schedule.
"""

from __future__ import annotations

from fulgurite.device import Device
from fulgurite.fuser.cost import number
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import Analysis, analyse
from fulgurite.fuser.schedule.cpu.loop_order import arranged
from fulgurite.fuser.schedule.cpu.rows import count_passes
from fulgurite.fuser.schedule.gpu.aligned_rows import granule_of
from fulgurite.fuser.schedule.gpu.base import (
    GpuSchedule,
    joined,
    length,
    power_above,
    power_below,
    vector_axis,
    widest,
)
from fulgurite.fuser.schedule.gpu.register_resident import (
    KEPT_BLOCK,
    KEPT_WARPS,
    all_kept,
    part_kept,
    scans,
    small_blocks,
)
from fulgurite.fuser.schedule.online_reduction import (
    online_sums,
    replaced_waits,
    squares_about,
    with_shares,
)

LEAST_TOGETHER = 2048  # elements of short columns that a program has
MOST_HELD = 1 << 15  # elements of a row that a program's registers hold
# longer ones are kept as memory has them: for rms_norm, softmax and layer_norm of 32768 bfloat16 95.6, 94.9 and 94.5 percent of
# the copy on an H200 against 90.4, 77.1 and 81.7, of float32 98.9, 97.8 and 95.9 against 92.5, 84.9 and 89.0
# (`benchmarks/sweep_rows.py`)
MOST_WIDENED = 1 << 14
MOST_SUMMED = 1 << 14  # the same, where it also holds sums over rows
ROW_BYTES = 4096  # of a row that has a program of its own; shorter ones share one
MOST_VALUES = 160  # that a thread holds
MOST_PARTS = 1 << 13  # single values that one program adds up at the end
CHEAP_FLOPS = 60  # a point, that are computed again rather than kept
SPLIT_POINTS = 1 << 15  # reductions of fewer points are not cut into parts


def rows(nest: Nest, device: Device) -> GpuSchedule:
    nest = arranged(nest, vector_axis(nest, nest.body))
    nest = with_shares(joined(joined(nest, nest.grid), nest.body))
    facts = analyse(nest)
    (body,) = nest.body
    width = number(body.size)
    count = length(nest.grid)
    static = body.size.is_constant
    online, about = online_sums(nest), squares_about(nest)
    parts = split_parts(nest, replaced_waits(nest, facts, about), count, width, device)
    if parts:
        block = min(4096 if about else 8192, power_above(-(-width // parts)))
        sizes, warps = {body: block}, max(1, block // 256)
        return GpuSchedule(
            "rows", nest, (body,), sizes, True, about=about, split=parts, warps=warps
        )
    held = power_above(width) if static else 0
    if not static or held > MOST_HELD or (not waits(nest, facts) and held > 8192):
        return walked_rows(nest, facts, online, about)
    if held > MOST_WIDENED and cheap(nest):
        kept = kept_row(nest, facts)
        if kept is not None:
            return kept
    together = 1
    if nest.grid:
        together = max(1, ROW_BYTES // (held * widest(nest)))
        while together > 1 and count < together * device.threads * 2:
            together //= 2
    if together == 1:
        if misaligned(nest):
            return aligned_row(nest, facts)
        warps = row_warps(nest, width, held)
        return GpuSchedule("rows", nest, (body,), {body: held}, warps=warps)
    (grid,) = nest.grid
    sizes = {grid: together, body: held}
    warps = row_warps(nest, held * together, held * together)
    return GpuSchedule("rows", nest, (grid, body), sizes, warps=warps)


def walked_rows(
    nest: Nest, facts: Analysis, online: dict[str, str], about: dict[str, str]
) -> GpuSchedule:
    """Rows in blocks: kept in registers where all of one fits, as narrow as they are, else as much as does."""
    (body,) = nest.body
    together = replaced_waits(nest, facts, online | about)
    passes = count_passes(nest, together)
    whole = kept_row(nest, facts) if passes > 1 else None
    if whole is not None:
        return whole
    kept = part_kept(nest, together, passes, bool(online), bool(about))
    # a second walk is soon after the first: all threads on few rows, so that the cache has them, and from the end, which it has
    # longest: softmax of 65536 float32 got 82 percent of the copy on an H200 instead of 74, of 131072 bfloat16 76 instead of
    # 70; norms between 1 and 8 percent more (`benchmarks/sweep_rows.py`)
    block, warps = (KEPT_BLOCK, KEPT_WARPS) if passes > 1 else (4096, 8)
    return GpuSchedule(
        "rows",
        nest,
        (body,),
        {body: block},
        True,
        passes,
        online,
        about,
        warps=warps,
        kept=kept,
        back=passes > 1 and body.size.is_constant and not scans(nest),
        group=max(16 // widest(nest), 1) if online else 1,
    )


def kept_row(nest: Nest, facts: Analysis) -> GpuSchedule | None:
    """A row that is read once, but for a block of it at the most, and stays in registers as it was read."""
    (body,) = nest.body
    walks = count_passes(nest, facts)
    kept = all_kept(nest, facts, walks)
    if not kept:
        return None
    block, warps, granule = KEPT_BLOCK, KEPT_WARPS, granule_of(nest, walks, kept)
    if granule and not read_by_rows(nest):
        block, warps, granule, kept = small_blocks(nest, facts, walks)
    return GpuSchedule(
        "rows", nest, (body,), {body: block}, True, walks, warps=warps, kept=kept, granule=granule
    )


def read_by_rows(nest: Nest) -> bool:
    """Is anything read along a row that all rows have in common, such as weights?"""
    (body,) = nest.body
    return any(
        body in index.axes() and not set(nest.axes) <= index.axes()
        for _, index, _ in nest.accesses()
    )


def misaligned(nest: Nest) -> bool:
    """Do 16-bit numbers of a row that is in registers start anywhere, and cost little to compute in every walk?"""
    sizes = [t.itemsize for t, index, _ in nest.accesses() if set(nest.axes) <= index.axes()]
    return min(sizes, default=4) == 2 and cheap(nest) and granule_of(nest, 1) > 0


def cheap(nest: Nest) -> bool:
    """May values of a row be computed once more? Not where they change on the way, or must come in order."""
    written = {t.name for t, _, stores in nest.accesses() if stores}
    changes = any(t.name in written for t, _, stores in nest.accesses() if not stores)
    work = sum(x.flops for x in nest.locals.values())
    return work <= CHEAP_FLOPS and not changes and not scans(nest)


def aligned_row(nest: Nest, facts: Analysis) -> GpuSchedule:
    """A row in one block that starts at a multiple of eight or sixteen bytes, and its edges in another."""
    (body,) = nest.body
    walks, width = count_passes(nest, facts), number(body.size)
    granule = granule_of(nest, walks)
    block = power_above(width // granule * granule)
    return GpuSchedule(
        "rows",
        nest,
        (body,),
        {body: block},
        True,
        walks,
        warps=row_warps(nest, width, block),
        kept=1,
        granule=granule,
    )


def row_warps(nest: Nest, elements: int, block: int) -> int:
    """Thirty-two elements of a row a thread, or some more, as far as its registers hold what is read."""
    inner = set(nest.body)
    reads = {(t.name, i) for t, i, stores in nest.accesses() if not stores and inner & i.axes()}
    warps = max(1, min(16, power_below(elements // 1024)))
    while warps < 32 and block // (32 * warps) * len(reads) > MOST_VALUES:
        warps *= 2
    return warps


def waits(nest: Nest, facts: Analysis) -> bool:
    """Does anything need a second walk over the row?"""
    return count_passes(nest, facts) > 1


def divisible(nest: Nest, facts: Analysis) -> bool:
    """Can parts of the body be done apart? Not where it is walked again, and not scans."""
    return not scans(nest) and not waits(nest, facts)


def split_parts(nest: Nest, facts: Analysis, tasks: int, width: int, device: Device) -> int:
    """Parts of the body, so that few rows still fill the device; 0 where that can't be or needn't."""
    if tasks * 2 > device.threads or tasks * width < SPLIT_POINTS or not divisible(nest, facts):
        return 0
    wanted = min(device.threads * 4 // tasks, width // 2048)
    return power_below(wanted) if wanted >= 2 else 0


def columns(nest: Nest, device: Device) -> GpuSchedule:
    """Neighbouring grid points side by side, the body from top to bottom."""
    nest = arranged(nest, vector_axis(nest, nest.grid))
    nest = with_shares(joined(joined(nest, nest.grid[:-1]), nest.body))
    facts, about = analyse(nest), squares_about(nest)
    once = replaced_waits(nest, facts, about)
    (body,) = nest.body
    vector = nest.grid[-1]
    width, height = number(vector.size), number(body.size)
    outer = length(nest.grid[:-1])
    across = min(max(128 // widest(nest), 16), power_above(width))
    while waits(nest, once) and across * widest(nest) > 32 and few(outer, width, across, device):
        # nothing else can be shared among programs; a sector of 32 bytes is still whole
        across //= 2
    deep = max(1, min(power_above(height), 4096 // across))
    while deep * across < LEAST_TOGETHER and not few(outer, width, 4 * across, device):
        across *= 2  # short columns: more of them, or a program has next to nothing to do
    across = min(across, power_above(width))
    tasks = outer * -(-width // across)
    online = online_sums(nest)
    sizes = {body: deep, vector: across}
    looped = not body.size.is_constant or deep < height
    if looped and waits(nest, facts) and body.size.is_constant:
        if across * power_above(height) <= MOST_HELD:
            sizes[body] = power_above(height)
            looped = False
    parts = column_parts(nest, once, tasks, height, sizes[body], device) if looped else 0
    passes = count_passes(nest, replaced_waits(nest, facts, online | about))
    each = 512 if about and looped else 1024  # elements a warp; squares hold four values of each
    warps = max(1, min(16, sizes[body] * across // each))
    return GpuSchedule(
        "columns",
        nest,
        (body, vector),
        sizes,
        looped,
        passes if looped else 1,
        online if looped else {},
        about if looped else {},
        split=parts,
        warps=warps,
        stages=3 if looped and passes == 1 else 1,
    )


def few(outer: int, width: int, across: int, device: Device) -> bool:
    """Do blocks of so many columns leave multiprocessors without work?"""
    return outer * -(-width // across) < 2 * device.threads


def column_parts(
    nest: Nest, facts: Analysis, tasks: int, height: int, deep: int, device: Device
) -> int:
    if not divisible(nest, facts):
        return 0
    wanted = min(device.threads * 4 // max(tasks, 1), height // (2 * deep))
    return power_below(wanted) if wanted >= 2 else 0


def walking(nest: Nest, device: Device) -> GpuSchedule:
    """A fixed number of programs, each with sums of its own over many rows."""
    last = vector_axis(nest, nest.body) if nest.body else None
    nest = arranged(nest, last)
    nest = with_shares(joined(joined(nest, nest.grid), nest.body))
    facts = analyse(nest)
    count = length(nest.grid)
    (grid,) = nest.grid
    if not nest.body:
        block = 1024
        programs = max(1, min(device.threads * 4, -(-count // block)))
        sizes = {grid: block}
        return GpuSchedule("walking", nest, (grid,), sizes, programs=power_below(programs))
    (body,) = nest.body
    width = number(body.size)
    colsums = any(x.role == "colsum" for x in nest.locals.values())
    held = power_above(width) if body.size.is_constant else 0
    online, about = online_sums(nest), squares_about(nest)
    if not held or held > (MOST_SUMMED if colsums else MOST_HELD):
        passes = count_passes(nest, replaced_waits(nest, facts, online | about))
        sizes = {body: 4096}
        programs = shared_rows(count, device.threads * 4 if colsums else MOST_PARTS)
        group = max(16 // widest(nest), 1) if online else 1
        return GpuSchedule(
            "walking",
            nest,
            (body,),
            sizes,
            True,
            passes,
            online,
            about,
            programs,
            warps=8,
            group=group,
        )
    together = max(1, min(ROW_BYTES // (held * widest(nest)), power_above(count)))
    blocks_of_rows = -(-count // together)
    if colsums:
        programs, stages = walkers(nest, device, together)
        programs = min(programs, blocks_of_rows)
    else:
        programs, stages = shared_rows(blocks_of_rows, MOST_PARTS), 1
    warps = max(1, min(8 if held <= 8192 else 16, held * together // 512))
    narrow = any(t.itemsize == 2 for t, _, _ in nest.accesses())
    remade = colsums and held > 8192 and narrow and cheap(nest)
    if together == 1:
        blocks: tuple[Axis, ...] = (body,)
        sizes = {body: held}
    else:
        blocks, sizes = (grid, body), {grid: together, body: held}
    return GpuSchedule(
        "walking",
        nest,
        blocks,
        sizes,
        passes=count_passes(nest, facts) if remade else 1,
        programs=programs,
        warps=warps,
        stages=max(stages, 3) if remade else stages,
        remade=remade,
    )


def walkers(nest: Nest, device: Device, together: int) -> tuple[int, int]:
    """Programs that walk the rows, and how many rows of each are under way.

    Two programs a multiprocessor for short rows, one for longer ones; as much as was fastest on an H200
    (`benchmarks/sweep_triton.py sizes`).
    """
    reads = {(t.name, i): t.itemsize for t, i, stores in nest.accesses() if not stores}
    ahead = [n for (_, i), n in reads.items() if set(nest.axes) <= i.axes()]
    row = max(sum(ahead) * together * length(nest.body), 1)
    if row <= 16 << 10:
        return power_below(2 * device.threads), 4 if row <= 8 << 10 else 3
    return device.threads, 4 if row <= 24 << 10 else 3 if row <= 40 << 10 else 1


def shared_rows(count: int, most: int) -> int:
    """Programs, at most so many, that have the same number of rows but for the last."""
    each = -(-count // most)
    return max(1, -(-count // max(each, 1)))


def finishing(nest: Nest, rows_of_parts: Axis, device: Device) -> GpuSchedule:
    """The small kernel that adds up what others left: the parts from top to bottom."""
    count = number(rows_of_parts.size)
    if not nest.grid:
        block = min(power_above(count), 1024)
        return GpuSchedule(
            "finish", nest, (rows_of_parts,), {rows_of_parts: block}, block < count, warps=4
        )
    (grid,) = nest.grid
    # few programs, so that each is one wait for memory after the other: many parts at once
    across = min(16, power_above(number(grid.size)))
    deep = min(power_above(count), 256)
    sizes = {rows_of_parts: deep, grid: across}
    warps = 8 if across * deep >= 2048 else 4
    return GpuSchedule("finish", nest, (rows_of_parts, grid), sizes, deep < count, warps=warps)
