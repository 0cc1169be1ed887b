"""Long rows that stay in registers as they were read: how much of them, and which reads.

In: a nest whose rows are walked more than once. Out: the reads that several walks have in common, and how many blocks
of them a program keeps. A bfloat16 takes half of the register that its float32 would: 98304 of a row fit where 32768
float32 do with room to spare. The rest of a longer row is read again, by then from the second level cache.
"""

from __future__ import annotations

from ..cost import number
from ..expression import Load
from ..nest import Nest
from .base import Analysis, needed
from .rows import pass_roots
from .traffic import unguarded

KEPT_BLOCK, KEPT_WARPS = 8192, 32
# of 256 KiB of registers: 48 of the 64 that each of 1024 threads has, where a row fits, or all but a block of it
KEPT_BYTES = 192 << 10
# where more is read again: what keeps machine code for an H200 free of spills, with several reads under way
PARTLY_BYTES = 128 << 10
SEVERAL_BYTES = 96 << 10  # of several tensors
SQUARES_BYTES = 64 << 10  # beside squares about a mean, which take three values an element


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


def kept_blocks(nest: Nest, facts: Analysis, passes: int, squares: bool) -> int:
    """How many blocks of a row that is walked so often a program keeps; 0 where none."""
    (body,) = nest.body
    if passes < 2 or not body.size.is_constant or scans(nest):
        return 0
    loads = kept_loads(nest, facts, passes)
    each = KEPT_BLOCK * sum(load.dtype.itemsize for load in loads)
    blocks = -(-number(body.size) // KEPT_BLOCK)
    if not each:
        return 0
    if not squares and blocks <= KEPT_BYTES // each + 1:
        return min(blocks, KEPT_BYTES // each)
    most = SQUARES_BYTES if squares else SEVERAL_BYTES if len(loads) > 1 else PARTLY_BYTES
    return most // each
