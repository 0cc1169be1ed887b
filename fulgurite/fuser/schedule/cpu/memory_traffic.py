"""What moves between memory and the cores, decided once for all schedules.

In: a nest with its loops ordered. Out: which results go past the caches, in which pass the next row is
fetched, which values stay in a buffer between passes.
"""

from __future__ import annotations

from fulgurite.device import Device
from fulgurite.fuser.cost import elements, number, tensor_bytes
from fulgurite.fuser.ir.expression import Expression, Guard, Load, walk
from fulgurite.fuser.ir.index import Axis
from fulgurite.fuser.ir.loop_nest import Nest
from fulgurite.fuser.schedule.cpu.base import needed

# a result from which a kernel gains by writing past the caches even when the next one reads it at once:
# measured on two cores with 2 MiB of second level cache each (16 MiB: 0.9 times as fast, 32 MiB: 1.5)
STREAM_BYTES = 32 << 20
STREAM_RUN = 128  # bytes written one after the other that are worth it
FETCH_ROW = 4 << 10  # bytes: the hardware fetches shorter rows by itself


def streamed(nest: Nest, vector: Axis) -> tuple[str, ...]:
    """Results that are too large to be read from a cache later."""
    read = {tensor.name for tensor, _, is_store in nest.accesses() if not is_store}
    names = []
    for store in nest.stores:
        along = store.index.coefficient(vector)
        run = number(vector.size) * store.tensor.itemsize
        if tensor_bytes(store.tensor) >= STREAM_BYTES and store.tensor.name not in read:
            if along is not None and along == 1 and run >= STREAM_RUN:
                names.append(store.tensor.name)
    return tuple(names)


def contiguous_loads(nest: Nest, vector: Axis, other: Axis) -> list[Load]:
    """Loads that every point makes, one after the other along `vector`, new ones for each `other`."""
    found: dict[Load, None] = {}
    for expression in _expressions(nest):
        for part in unguarded(expression):
            if isinstance(part, Load) and part.index and not part.index[0].loaded():
                along = part.index[0].coefficient(vector)
                step = part.index[0].coefficient(other)
                if along is not None and along == 1 and step is not None and step != 0:
                    found[part] = None
    return list(found)


def fetching_pass(
    nest: Nest, passes: list[list[Expression]], kept: tuple[str, ...], device: Device
) -> int | None:
    """The pass with most to compute: while it works on this row, the next one comes into the cache.

    None for one pass (the hardware sees it coming) and for rows that don't fit twice.
    """
    if len(passes) < 2 or not nest.grid or not nest.body:
        return None
    loads = contiguous_loads(nest, nest.body[-1], nest.grid[-1])
    points = elements(tuple(axis.size for axis in nest.body))
    size = points * sum(load.dtype.itemsize for load in loads)
    if not FETCH_ROW <= size <= device.second_level_cache // 4:
        return None
    values = [{x.name for x in needed(nest, roots)} for roots in passes]
    for k in range(1, len(values)):
        values[k] -= {name for name in kept if any(name in earlier for earlier in values[:k])}
    work = [sum(nest.locals[name].flops for name in names) for names in values]
    return max(range(1, len(passes)), key=lambda k: work[k])


def unguarded(expression: Expression):  # type: ignore[no-untyped-def]
    """The parts of an expression that are evaluated at every point."""
    yield expression
    if not isinstance(expression, Guard):
        for part in expression.parts():
            yield from unguarded(part)


def _expressions(nest: Nest) -> list[Expression]:
    return [x.expression for x in nest.locals.values()] + [s.value for s in nest.stores]


def loads_of(expressions: list[Expression]) -> set[Load]:
    return {p for e in expressions for p in walk(e) if isinstance(p, Load) and p.index}
