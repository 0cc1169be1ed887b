"""Stores statements straight into slices of another buffer (`Region.slices`).

In: the loop nests of a region's kernels. Out: the same nests, with the buffers' names and offsets.
Schedules and code generators see stores and loads of whole buffers only.
"""

from __future__ import annotations

from collections.abc import Sequence

from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.ir.statement import Region
from fulgurite.fuser.segment.scatter_inplace import redirect_loads, redirect_stores


def store_in_slices(region: Region, nests: Sequence[LoopNest]) -> list[LoopNest]:
    """Redirects stores and loads of slices to their buffers."""
    changed = list(nests)
    for name, part in region.slices.items():
        target = region.tensors[part.buffer]
        changed = [
            redirect_loads(
                redirect_stores(nest, name, target, part.offset), name, target, part.offset
            )
            for nest in changed
        ]
    return changed
