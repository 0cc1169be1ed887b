"""CPU kernels of indexed stores: `out[index[i], j] += value[i, j]`.

Loops whose iterations write different elements (`Store.disjoint`) are split among threads. The
others run in program order inside a thread. The result is therefore the same for every number of
threads, and of several values for one element the last one wins.

The innermost loop is SIMD where its iterations write neighbouring elements. If it is also the only
loop that threads can split, they split it into blocks. Blocks also keep the part of the result
that is written in random order in the cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir import cost
from fulgurite.fuser.ir.cost import count_elements, size_hint
from fulgurite.fuser.ir.expression import IndexValue
from fulgurite.fuser.ir.index import Axis, Index, IndirectIndex
from fulgurite.fuser.ir.loop_nest import LoopNest, Store, collapse_loops, rename_loops
from fulgurite.fuser.schedule.analysis import find_required_locals
from fulgurite.fuser.schedule.cpu.base import CpuSchedule
from fulgurite.kernels.tuning import fuser_cpu as tuning


def why_not(nest: LoopNest) -> str | None:
    if not any(store.combine is not None for store in nest.stores):
        return "it does not store at computed indices"
    return None


def make_schedule(nest: LoopNest, device: DeviceInfo) -> CpuSchedule:
    """Orders the loops: those that threads split (grid), then the others, SIMD innermost."""
    (store,) = nest.stores
    simd_axis = _choose_simd_axis(nest, store)
    outer = tuple(a for a in nest.grid if a in store.disjoint and a != simd_axis)
    inner = tuple(a for a in nest.grid if a not in store.disjoint and a != simd_axis)
    simd = (simd_axis,) if simd_axis is not None else ()
    # Loops that collide stay in order; those that do not may run anywhere.
    nest = rename_loops(collapse_loops(replace(nest, grid=outer, body=(*inner, *simd))))
    (store,) = nest.stores
    is_simd = bool(simd) and nest.body[-1] in store.disjoint
    block = _choose_block(nest, device) if is_simd else 0
    return CpuSchedule("scatter", nest, nest.body[-1] if is_simd else None, block=block)


def _choose_simd_axis(nest: LoopNest, store: Store) -> Axis | None:
    """The loop that writes neighbouring elements; None if no loop does."""
    direct = _without_lookups(store.index)
    found = [a for a in nest.grid if a in store.disjoint and direct.coefficient(a) == 1]
    return max(found, key=lambda a: size_hint(a.size), default=None)


def _without_lookups(index: Index) -> Index:
    """The part of an address that does not come from a tensor."""
    terms = [
        (atoms, factor)
        for atoms, factor in index.terms
        if not any(isinstance(atom, IndirectIndex) for atom in atoms)
    ]
    return Index(index.constant, tuple(terms))


def _choose_block(nest: LoopNest, device: DeviceInfo) -> int:
    """Elements of the SIMD loop that run at once; 0 for all.

    Threads split the blocks if there are too few rows for them. If every element has an index of
    its own, a block's columns of the result should fit in the cache, because they are written in
    random order.
    """
    if len(nest.body) < 2:
        return 0
    length, line = size_hint(nest.body[-1].size), tuning.MIN_SCATTER_BLOCK
    block = length
    rows = count_elements(tuple(axis.size for axis in nest.grid))
    if rows < tuning.MIN_TASKS_PER_THREAD * device.num_cores:
        block = -(-length // device.num_cores)
    (store,) = nest.stores
    if _depends_on(nest, IndexValue(store.index, torch.int64), nest.body[-1]):
        column = cost.tensor_bytes(store.tensor) // max(length, 1)
        block = min(block, device.l2_cache_bytes // 2 // max(column, 1))
    block = max(-(-block // line) * line, line)
    return block if block < length else 0


def _depends_on(nest: LoopNest, position: IndexValue, axis: Axis) -> bool:
    """Whether a looked-up index is another one at every iteration of a loop."""
    looked_up = [atom.value for atom in position.index.indirect_indices()]
    found = find_required_locals(nest, looked_up)
    return any(axis in e.axes() for e in (*looked_up, *(local.expression for local in found)))
