"""Memory traffic of CPU kernels: non-temporal stores and prefetches.

In: a loop nest with its loops ordered. Out: which results bypass the caches, and which pass
prefetches the next row.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.cost import count_elements, size_hint, tensor_bytes
from fulgurite.fuser.ir.expression import Expression, Load
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.schedule.analysis import find_required_locals, iter_expressions, iter_unmasked
from fulgurite.kernels.tuning import fuser_cpu as tuning


def find_nontemporal_stores(nest: LoopNest, simd_axis: Axis) -> tuple[str, ...]:
    """Results that are too large to be read from a cache later."""
    read = {tensor.name for tensor, _, is_store in nest.accesses() if not is_store}
    is_nontemporal: dict[str, bool] = {}  # of a tensor: all its stores, which may be slices
    for store in nest.stores:
        stride = store.index.coefficient(simd_axis)
        run = size_hint(simd_axis.size) * store.tensor.itemsize
        is_large = tensor_bytes(store.tensor) >= tuning.MIN_NONTEMPORAL_BYTES
        is_contiguous = stride is not None and stride == 1 and run >= tuning.MIN_NONTEMPORAL_RUN
        name = store.tensor.name
        is_own = is_large and is_contiguous and name not in read
        is_nontemporal[name] = is_nontemporal.get(name, True) and is_own
    return tuple(name for name, is_chosen in is_nontemporal.items() if is_chosen)


def find_contiguous_loads(nest: LoopNest, along: Axis, other: Axis) -> list[Load]:
    """Unmasked loads that are contiguous along one axis and depend on the axis `other`."""
    found: dict[Load, None] = {}
    for expression in iter_expressions(nest):
        for part in iter_unmasked(expression):
            if isinstance(part, Load) and part.index and not part.index[0].indirect_indices():
                stride = part.index[0].coefficient(along)
                step = part.index[0].coefficient(other)
                if stride is not None and stride == 1 and step is not None and step != 0:
                    found[part] = None
    return list(found)


def choose_prefetch_pass(
    nest: LoopNest, roots: list[list[Expression]], buffered: tuple[str, ...], device: DeviceInfo
) -> int | None:
    """The pass with most to compute: while it works on this row, the next row is prefetched.

    None for a single pass, which the hardware prefetches, and for rows that don't fit in L2 twice.
    """
    if len(roots) < 2 or not nest.grid or not nest.body:
        return None
    loads = find_contiguous_loads(nest, nest.body[-1], nest.grid[-1])
    points = count_elements(tuple(axis.size for axis in nest.body))
    row_bytes = points * sum(load.dtype.itemsize for load in loads)
    if not tuning.MIN_PREFETCH_ROW_BYTES <= row_bytes <= device.l2_cache_bytes // 4:
        return None
    computed = [{x.name for x in find_required_locals(nest, r)} for r in roots]
    for k in range(1, len(computed)):
        computed[k] -= {name for name in buffered if any(name in c for c in computed[:k])}
    flops = [sum(nest.locals[name].flops for name in names) for names in computed]
    return max(range(1, len(roots)), key=lambda k: flops[k])
