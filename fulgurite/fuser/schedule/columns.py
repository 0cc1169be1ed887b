"""Column kernels: reductions over the body where memory is contiguous along the grid.

Sums over leading or middle dimensions, norms along them: a block of neighbouring grid points is done
together, each with its own accumulator, so that every read is a run of contiguous elements.
"""

from __future__ import annotations

from fulgurite.device import Device

from ..cost import elements, number
from ..nest import Nest
from .base import Schedule, analyse
from .choose import arranged, vector_axis
from .rows import count_passes, may_split

WIDEST = 512  # neighbouring grid points done together: a few pages of each row
NARROWEST = 16


def accepts(nest: Nest) -> str | None:
    if not nest.body:
        return "it does not reduce"
    if not nest.grid:
        return "nothing is kept"
    if any(local.role in ("colsum", "scalar", "post") for local in nest.locals.values()):
        return "it reduces over the grid too"
    return None


def schedule(nest: Nest, device: Device) -> Schedule:
    nest = arranged(nest, vector_axis(nest, nest.grid))
    facts = analyse(nest)
    passes = count_passes(nest, facts)
    block = WIDEST
    if passes > 1:
        # several passes: the block of all rows should stay in the second level cache
        body = max(elements(tuple(axis.size for axis in nest.body)), 1)
        room = device.second_level_cache // 2 // (4 * body)
        block = max(NARROWEST, min(WIDEST, room // NARROWEST * NARROWEST))
    width = number(nest.grid[-1].size)
    outer = elements(tuple(axis.size for axis in nest.grid[:-1]))
    while block >= 2 * NARROWEST and outer * width < block * device.threads * 2:
        block //= 2
    tasks = outer * -(-width // block)
    return Schedule(
        "columns",
        nest,
        nest.grid[-1],
        passes=passes,
        block=block,
        split=may_split(nest, facts, tasks, device),
    )
