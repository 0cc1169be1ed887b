"""Long rows that stay in registers as they were read: how much of them, and which reads.

In: a nest whose rows are walked more than once. Out: the reads that several walks have in common, and how many blocks
of them a program keeps. A bfloat16 takes half of the register that its float32 would: 98304 of a row fit where 32768
float32 do with room to spare. The rest of a longer row is read again, by then from the second level cache.
"""

from __future__ import annotations

from fulgurite.fuser.cost import number
from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import Analysis, needed
from fulgurite.fuser.schedule.cpu.memory_traffic import unguarded
from fulgurite.fuser.schedule.cpu.rows import pass_roots

KEPT_BLOCK, KEPT_WARPS = 8192, 32
# of a row that starts anywhere, with nothing read beside it: one access of 16 bytes a thread and block, so that the last one is
# less empty. softmax of 50257 float32 got 92.9 percent of the copy on an H200 instead of 81.0, of bfloat16 75.1 instead of
# 74.0; norms, whose weights are read one by one, less (`benchmarks/sweep_rows.py`)
SMALL_ACCESS, SMALL_WARPS, SMALL_BYTES = 16, 16, 200 << 10
# of 256 KiB of registers: 48 of the 64 that each of 1024 threads has, where a row fits, or all but a block of it
KEPT_BYTES = 192 << 10
# where more is read again: what keeps machine code for an H200 free of spills, with several reads under way.
# With 128 KiB rms_norm of 65536 float32 got 77.3 percent of the copy instead of 82.5 (`benchmarks/sweep_rows.py`)
PARTLY_BYTES = 160 << 10
# beside running maxima and sums: with 160 KiB softmax of 131072 float32 got 60.2 instead of 65.6
ONLINE_BYTES = 128 << 10
SEVERAL_BYTES = 96 << 10  # of several tensors
# beside squares about a mean, which take three values an element, and only of rows up to a length: layer_norm of 73728
# float32 got 67.7 instead of 61.8, of 131072 40.7 instead of 64.1 (bfloat16: 49.9 instead of 61.5)
SQUARES_BYTES, SQUARES_LENGTH = 64 << 10, 96 << 10


def kept_loads(nest: Nest, facts: Analysis, passes: int) -> tuple[Load, ...]:
    """Reads of two or four bytes at every point of a row that more than one walk makes."""
    seen: dict[Load, int] = {}
    for k in range(passes):
        roots = pass_roots(nest, facts, k)
        roots = roots + [x.expression for x in needed(nest, roots) if x.reduction is None]
        for load in dict.fromkeys(p for root in roots for p in unguarded(root) if _kept(p, nest)):
            seen[load] = seen.get(load, 0) + 1
    return tuple(load for load, count in seen.items() if count > 1)


def scans(nest: Nest) -> bool:
    """Must the body be walked in order?"""
    return any(local.role == "scan" for local in nest.locals.values())


def _kept(part: object, nest: Nest) -> bool:
    if not isinstance(part, Load) or not part.index or part.dtype.itemsize not in (2, 4):
        return False
    axes = part.index[0].axes()
    return not part.index[0].loaded() and set(nest.axes) <= axes


def all_kept(nest: Nest, facts: Analysis, passes: int) -> int:
    """How many blocks of a row make up all of it, or all but one; 0 where registers hold fewer."""
    each, _ = _block_bytes(nest, facts, passes)
    blocks = -(-number(nest.body[0].size) // KEPT_BLOCK)
    return min(blocks, KEPT_BYTES // each) if each and blocks <= KEPT_BYTES // each + 1 else 0


def small_blocks(nest: Nest, facts: Analysis, passes: int) -> tuple[int, int, int, int]:
    """Elements of a block, warps, elements of an access, blocks that are kept: of a row that starts anywhere."""
    each = sum(load.dtype.itemsize for load in kept_loads(nest, facts, passes))
    wide = max(t.itemsize for t, index, _ in nest.accesses() if set(nest.axes) <= index.axes())
    granule = SMALL_ACCESS // wide
    block = granule * SMALL_WARPS * 32
    blocks = -(-number(nest.body[0].size) // block)
    return block, SMALL_WARPS, granule, min(blocks, SMALL_BYTES // (block * each))


def part_kept(nest: Nest, facts: Analysis, passes: int, online: bool, squares: bool) -> int:
    """How many blocks of a longer row a program keeps, beside running maxima or squares about a mean."""
    each, reads = _block_bytes(nest, facts, passes)
    most = SEVERAL_BYTES if reads > 1 else ONLINE_BYTES if online else PARTLY_BYTES
    if squares:
        most = SQUARES_BYTES if number(nest.body[0].size) <= SQUARES_LENGTH else 0
    return most // each if each else 0


def _block_bytes(nest: Nest, facts: Analysis, passes: int) -> tuple[int, int]:
    """Bytes that a block takes in registers, and of how many tensors; 0 where none is kept."""
    if passes < 2 or not nest.body[0].size.is_constant or scans(nest):
        return 0, 0
    loads = kept_loads(nest, facts, passes)
    return KEPT_BLOCK * sum(load.dtype.itemsize for load in loads), len(loads)
