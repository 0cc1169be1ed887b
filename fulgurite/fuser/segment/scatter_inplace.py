"""Indexed stores straight into the buffer of their initial values, where that is safe.

In: the loop nests of a region's kernels, in the order they run. Out: the same nests; an indexed
store that writes into the buffer of its initial values has no nest for those (`LoopNest.initial`).

    cache[i] = cache[i]; cache[slot[s]] set= key[s]      only the second part is left

The buffer is that of a value which nobody else reads, or of an input that is overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.expression import Expression, Load, walk
from fulgurite.fuser.ir.expression_rewrites import rewrite_expression
from fulgurite.fuser.ir.index import Index, product
from fulgurite.fuser.ir.index_rewrites import map_indirect
from fulgurite.fuser.ir.loop_nest import LoopNest
from fulgurite.fuser.ir.statement import Region, Tensor


def is_scatter(nest: LoopNest) -> bool:
    """Whether the nest stores at computed indices."""
    return any(store.combine is not None for store in nest.stores)


def has_scatter(nests: Sequence[LoopNest], name: str) -> bool:
    """Whether some nest stores into this tensor at computed indices."""
    return any(is_scatter(nest) for nest in nests if _stores_to(nest, name))


def find_initial_buffer(nest: LoopNest) -> str | None:
    """Returns the tensor that an indexed store copies first, element by element; None if none."""
    if nest.initial is None:
        return None
    (store,) = nest.initial.stores
    value = store.value
    if not isinstance(value, Load) or value.index != (store.index,):
        return None
    source = nest.initial.memory[value.name]
    is_same = source.dtype == store.tensor.dtype
    return value.name if is_same and product(source.sizes) == product(store.tensor.sizes) else None


def reuse_initial_buffers(region: Region, nests: Sequence[LoopNest]) -> list[LoopNest]:
    """Stores into the buffer of the initial values where they are a value that nobody else reads.

    The kernel that computes that value writes it into the result of the indexed store.
    """
    changed = list(nests)
    kept = region.results | {tensor.name for tensor in region.inputs}
    for k in range(len(changed)):
        source = find_initial_buffer(changed[k])
        if source is None or source in kept or _count_reads(changed, source) > 1:
            continue
        (store,) = changed[k].stores
        changed[k] = replace(changed[k], initial=None)
        changed = [redirect_stores(nest, source, store.tensor) for nest in changed]
    return changed


def can_overwrite_input(nests: Sequence[LoopNest], name: str, target: str) -> bool:
    """Whether the indexed stores of `name` may write into the input that they start from."""
    storing = [k for k, nest in enumerate(nests) if _stores_to(nest, name)]
    if not all(is_scatter(nests[k]) for k in storing):
        return False
    first = storing[0]
    if find_initial_buffer(nests[first]) != target:
        return False
    after = [replace(nests[first], initial=None), *nests[first + 1 :]]
    return _count_reads(after, target) == 0


def overwrite_input(nests: Sequence[LoopNest], name: str, target: Tensor) -> list[LoopNest]:
    """Redirects the indexed stores of `name`, and its readers, to the input that they start from."""
    changed = []
    for nest in nests:
        if _stores_to(nest, name) and find_initial_buffer(nest) == target.name:
            nest = replace(nest, initial=None)
        changed.append(redirect_loads(redirect_stores(nest, name, target), name, target))
    return changed


def redirect_loads(
    nest: LoopNest, name: str, target: Tensor, offset: Index = indices.ZERO
) -> LoopNest:
    """Returns the nest with its loads of `name`, and those of its initial values, redirected."""
    initial = (
        redirect_loads(nest.initial, name, target, offset) if nest.initial is not None else None
    )
    if name not in nest.memory:
        return replace(nest, initial=initial)

    def rename(part: Expression) -> Expression | None:
        if not isinstance(part, Load) or part.name != name or nest.is_local(part):
            return None
        (index,) = part.index
        return replace(part, name=target.name, index=(rename_index(index) + offset,))

    def rename_all(part: Expression) -> Expression:
        return rewrite_expression(part, rename, lambda index: index)

    def rename_index(index: Index) -> Index:
        return map_indirect(index, rename_all)

    memory = {key: tensor for key, tensor in nest.memory.items() if key != name}
    locals_ = {
        key: replace(local, expression=rename_all(local.expression))
        for key, local in nest.locals.items()
    }
    stores = tuple(
        replace(store, value=rename_all(store.value), index=rename_index(store.index))
        for store in nest.stores
    )
    memory[target.name] = target
    return replace(nest, locals=locals_, stores=stores, memory=memory, initial=initial)


def redirect_stores(
    nest: LoopNest, name: str, target: Tensor, offset: Index = indices.ZERO
) -> LoopNest:
    """Returns the nest with its stores to `name`, and those of its initial values, redirected."""
    initial = (
        redirect_stores(nest.initial, name, target, offset) if nest.initial is not None else None
    )
    if not any(store.tensor.name == name for store in nest.stores):
        return replace(nest, initial=initial)
    memory = {key: tensor for key, tensor in nest.memory.items() if key != name}
    memory[target.name] = target
    stores = tuple(
        replace(store, tensor=target, index=store.index + offset, statement=name)
        if store.tensor.name == name
        else store
        for store in nest.stores
    )
    return replace(nest, stores=stores, memory=memory, initial=initial)


def _stores_to(nest: LoopNest, name: str) -> bool:
    return any(store.tensor.name == name for store in nest.stores)


def _count_reads(nests: Sequence[LoopNest], name: str) -> int:
    """Returns how many nests load a tensor; those of initial values count for themselves."""
    everything = [*nests, *(nest.initial for nest in nests if nest.initial is not None)]
    return sum(name in _loaded_tensors(nest) for nest in everything)


def _loaded_tensors(nest: LoopNest) -> set[str]:
    expressions = [local.expression for local in nest.locals.values()]
    expressions += [part for store in nest.stores for part in store.expressions]
    parts = (part for expression in expressions for part in walk(expression))
    return {part.name for part in parts if isinstance(part, Load) and not nest.is_local(part)}
