"""Column kernels: reductions over the body where memory is contiguous along the grid.

Sums over leading or middle dimensions, norms along them: a block of neighbouring grid points is done
together, each with its own accumulator, so that every read is a run of contiguous elements. One pass
takes whole rows and threads share them; several passes keep what they read in a buffer, because the
lines of a narrow block of a matrix fall on few sets of the cache.
"""

from __future__ import annotations

from fulgurite.device import Device
from fulgurite.fuser.cost import elements, number, tensor_bytes
from fulgurite.fuser.ir.expression import Expression, Load
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import Schedule, analyse, store_axes
from fulgurite.fuser.schedule.cpu.loop_order import arranged, vector_axis
from fulgurite.fuser.schedule.cpu.memory_traffic import contiguous_loads, loads_of, streamed
from fulgurite.fuser.schedule.cpu.rows import count_passes, kept_locals, may_split, pass_roots

WIDEST = 512  # neighbouring grid points done together: a few pages of each row
# where nothing but sums is made: their accumulators stay in the first level cache
WIDEST_SUM = 4096
NARROWEST = 16
MOST_KEPT = 1 << 20  # bytes of a thread's stack


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
    width = number(nest.grid[-1].size)
    outer = elements(tuple(axis.size for axis in nest.grid[:-1]))
    stores = any(store_axes(nest, store) for store in nest.stores)
    block, packed = WIDEST, False
    kept: tuple[str, ...] = ()
    if passes == 1 and not stores:
        tasks = outer * -(-width // WIDEST_SUM)
        if may_split(nest, tasks, device):
            return Schedule(
                "columns", nest, nest.grid[-1], block=min(WIDEST_SUM, _round(width)), split=True
            )
    if passes > 1:
        # several passes: the block of all rows should stay in the second level cache
        body = max(elements(tuple(axis.size for axis in nest.body)), 1)
        room = device.second_level_cache // 2
        roots = [pass_roots(nest, facts, k) for k in range(passes)]
        kept = kept_locals(nest, facts, passes, limit=None)
        row = sum(nest.locals[name].dtype.itemsize for name in kept)
        row += sum(load.dtype.itemsize for load in kept_loads(nest, roots, kept))
        packed = _worth_packing(nest, device) and body * row * NARROWEST <= min(room, MOST_KEPT)
        kept = kept if packed else ()
        room = min(room, MOST_KEPT) // row if packed else room // 4
        block = max(NARROWEST, min(WIDEST, room // body // NARROWEST * NARROWEST))
    while block >= 2 * NARROWEST and outer * width < block * device.threads * 2:
        block //= 2
    return Schedule(
        "columns",
        nest,
        nest.grid[-1],
        passes=passes,
        block=block,
        kept=kept,
        packed=packed,
        streamed=streamed(nest, nest.grid[-1]),
    )


def kept_loads(nest: Nest, roots: list[list[Expression]], kept: tuple[str, ...]) -> list[Load]:
    """Loads along the lanes that more than one pass makes."""
    candidates = contiguous_loads(nest, nest.grid[-1], nest.body[-1])
    uses: dict[Load, int] = {}
    before: set[str] = set()
    for part in roots:
        values = _computed(nest, part, before)
        for load in loads_of([*part, *(nest.locals[name].expression for name in values)]):
            uses[load] = uses.get(load, 0) + 1
        before |= {name for name in values if name in kept}
    return [load for load in candidates if uses.get(load, 0) > 1]


def _computed(nest: Nest, roots: list[Expression], known: set[str]) -> set[str]:
    """The locals a pass computes where some are known already."""
    found: set[str] = set()
    stack = list(roots)
    while stack:
        for local in nest.references(stack.pop()):
            if local.name not in known | found and local.reduction is None:
                found.add(local.name)
                stack.append(local.expression)
    return found


def _worth_packing(nest: Nest, device: Device) -> bool:
    """Is what the kernel reads more than the second level cache holds anyway?"""
    tensors = {tensor.name: tensor for tensor, _, is_store in nest.accesses() if not is_store}
    static = all(axis.size.is_constant for axis in nest.body)
    return static and sum(map(tensor_bytes, tensors.values())) > device.second_level_cache


def _round(width: int) -> int:
    return -(-width // NARROWEST) * NARROWEST
