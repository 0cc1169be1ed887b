"""Register-resident rows: loads that stay in registers from pass to pass, in their storage dtype.

In: a nest whose rows take several passes. Out: the loads that several passes share, and how many
blocks of them a program holds. A bfloat16 takes half the register that its float32 would: 98304
elements of a row fit where 32768 float32 do with room to spare. The rest of a longer row is read
again, by then from L2.
"""

from __future__ import annotations

from dataclasses import dataclass

from fulgurite.fuser.ir.cost import size_hint
from fulgurite.fuser.ir.expression import Expression, Load
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import (
    Analysis,
    find_pass_roots,
    find_required_locals,
    has_scan,
    iter_unmasked,
)
from fulgurite.kernels.tuning import fuser_gpu as tuning


@dataclass(frozen=True)
class ResidentBlocks:
    """Blocks of a row that stay in registers."""

    block: int  # elements
    num_warps: int
    peel_width: int
    count: int


def find_resident_loads(nest: LoopNest, analysis: Analysis, passes: int) -> tuple[Load, ...]:
    """Loads of two or four bytes at every point of a row that more than one pass makes."""
    uses: dict[Load, int] = {}
    for step in range(passes):
        roots = find_pass_roots(nest, analysis, step)
        locals_ = find_required_locals(nest, roots)
        roots = roots + [x.expression for x in locals_ if x.reduction is None]
        parts = (part for root in roots for part in iter_unmasked(root))
        for load in dict.fromkeys(p for p in parts if isinstance(p, Load)):
            if _is_point_load(load, nest):
                uses[load] = uses.get(load, 0) + 1
    return tuple(load for load, count in uses.items() if count > 1)


def _is_point_load(part: Expression, nest: LoopNest) -> bool:
    if not isinstance(part, Load) or not part.index or part.dtype.itemsize not in (2, 4):
        return False
    return not part.index[0].indirect_indices() and set(nest.axes) <= part.index[0].axes()


def count_resident_blocks(nest: LoopNest, analysis: Analysis, passes: int) -> int:
    """Blocks that make up a full row, or all but one block of it; 0 where registers hold fewer."""
    block_bytes, _ = _measure_block(nest, analysis, passes)
    blocks = -(-size_hint(nest.body[0].size) // tuning.RESIDENT_BLOCK)
    if not block_bytes or blocks > tuning.RESIDENT_BYTES // block_bytes + 1:
        return 0
    return min(blocks, tuning.RESIDENT_BYTES // block_bytes)


def choose_small_blocks(nest: LoopNest, analysis: Analysis, passes: int) -> ResidentBlocks:
    """Blocks of one aligned access a thread, for an unaligned row."""
    loads = find_resident_loads(nest, analysis, passes)
    element_bytes = sum(load.dtype.itemsize for load in loads)
    widest = max(t.itemsize for t, index, _ in nest.accesses() if set(nest.axes) <= index.axes())
    peel_width = tuning.ACCESS_BYTES // widest
    block = peel_width * tuning.SMALL_RESIDENT_WARPS * tuning.WARP_SIZE
    blocks = -(-size_hint(nest.body[0].size) // block)
    count = min(blocks, tuning.SMALL_RESIDENT_BYTES // (block * element_bytes))
    return ResidentBlocks(block, tuning.SMALL_RESIDENT_WARPS, peel_width, count)


def count_partly_resident_blocks(
    nest: LoopNest, analysis: Analysis, passes: int, online: bool, welford: bool
) -> int:
    """Blocks of a longer row that fit beside the state of an online softmax or of Welford."""
    block_bytes, tensors = _measure_block(nest, analysis, passes)
    room = tuning.ONLINE_RESIDENT_BYTES if online else tuning.PARTLY_RESIDENT_BYTES
    if tensors > 1:
        room = tuning.MULTI_TENSOR_RESIDENT_BYTES
    if welford:
        is_short = size_hint(nest.body[0].size) <= tuning.MAX_WELFORD_RESIDENT_ROW
        room = tuning.WELFORD_RESIDENT_BYTES if is_short else 0
    return room // block_bytes if block_bytes else 0


def _measure_block(nest: LoopNest, analysis: Analysis, passes: int) -> tuple[int, int]:
    """Register bytes of a block, and the number of its tensors; 0 where none can be resident."""
    if passes < 2 or not nest.body[0].size.is_constant or has_scan(nest):
        return 0, 0
    loads = find_resident_loads(nest, analysis, passes)
    return tuning.RESIDENT_BLOCK * sum(load.dtype.itemsize for load in loads), len(loads)
