"""Writes of a kernel straight into a region's input, where that is safe.

In: the loop nests of a region's kernels, in the order they run. Out: the same nests, with stores
redirected to inputs.

An input that the program mutates (`Region.writes`) gets its new values from the kernel itself if no
kernel can read a new value in k of an old one. The launcher copies the rest.

    running_mean[c] = 0.1 * mean[c] + 0.9 * running_mean[c]

An input that nobody reads after the region is donated (`Region.donated`). A result of the same size
and dtype then reuses its buffer, by the same rules.

    conv[i] = max(scale[i % 64] * conv[i] + shift[i % 64], 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fulgurite.fuser.ir.expression import Expression, Load, walk
from fulgurite.fuser.ir.loop_nest import LoopNest, Store
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.fuser.segment.scatter_inplace import (
    can_overwrite_input,
    has_scatter,
    overwrite_input,
    reuse_initial_buffers,
)


def store_in_place(region: Region, nests: Sequence[LoopNest]) -> tuple[Region, list[LoopNest]]:
    """Redirects stores to inputs, where that is safe.

    In the returned region, `donated` has only the inputs that now hold results, and the outputs
    name those inputs.
    """
    nests = reuse_initial_buffers(region, nests)
    changed = list(nests)
    for name, target in region.writes:
        if name == target:  # in slices
            continue
        k = _find_storing_nest(nests, name)
        if has_scatter(nests, name):
            if not _is_returned(region, name, target) and can_overwrite_input(nests, name, target):
                changed = overwrite_input(changed, name, region.tensors[target])
            continue
        if not _is_returned(region, name, target) and _can_store_in_place(nests[k], name, target):
            if not _is_accessed(nests[k + 1 :], name, target):
                changed[k] = _redirect_store(changed[k], region, name, target)
    donations: dict[str | None, str] = {}
    for name in _find_donation_candidates(region):
        for target in _find_matching_donations(region, name, set(donations.values())):
            k = _find_storing_nest(nests, name)
            if has_scatter(nests, name):
                if not can_overwrite_input(nests, name, target):
                    continue
                changed = overwrite_input(changed, name, region.tensors[target])
                donations[name] = target
                break
            is_safe = _feeds_only_this_store(nests[k], name, target)
            if is_safe and not _is_accessed(nests[k + 1 :], name, target):
                changed[k] = _redirect_store(changed[k], region, name, target)
                donations[name] = target
                break
    outputs = tuple(replace(o, name=donations.get(o.name, o.name)) for o in region.outputs)
    return replace(region, outputs=outputs, donated=frozenset(donations.values())), changed


def _find_storing_nest(nests: Sequence[LoopNest], name: str) -> int:
    """Returns the number of the nest that stores a statement."""
    return next(k for k, nest in enumerate(nests) if any(_stores_to(s, name) for s in nest.stores))


def _is_accessed(nests: Sequence[LoopNest], name: str, target: str) -> bool:
    """Whether later kernels read the input's old values, or the result by its own name."""
    initial = [nest.initial for nest in nests if nest.initial is not None]
    return any(name in nest.memory or target in nest.memory for nest in (*nests, *initial))


def _find_donation_candidates(region: Region) -> list[str]:
    """Returns the non-empty statements that are returned and not written to an input."""
    written = {name for name, _ in region.writes}
    computed = {s.name for s in region.statements if not s.tensor.is_empty} - written
    return list(
        dict.fromkeys(
            o.name for o in region.outputs if o.name in computed and not o.is_view_as_real
        )
    )


def _find_matching_donations(region: Region, name: str, donations: set[str]) -> list[str]:
    """Returns the donated inputs with the size and dtype of a result."""
    result, returned = region.tensors[name], {o.name for o in region.outputs}
    used = donations | returned | {target for _, target in region.writes}
    return [
        buffer.name
        for buffer in region.inputs
        if buffer.name in region.donated - used
        and (buffer.dtype, buffer.is_view_as_real) == (result.dtype, result.is_view_as_real)
        and _dense_size(buffer) is not None
        and _dense_size(buffer) == _dense_size(result)
    ]


def _dense_size(tensor: Tensor) -> int | None:
    """Returns the elements of a dense tensor; None if it has gaps, overlaps or dynamic sizes."""
    if not all(n.is_constant for n in (*tensor.sizes, *tensor.strides)):
        return None
    count = 1
    pairs = zip(tensor.strides, tensor.sizes, strict=True)
    for stride, size in sorted((stride.constant, size.constant) for stride, size in pairs):
        if size != 1 and stride != count:
            return None
        count *= size
    return count


def _stores_to(store: Store, name: str) -> bool:
    return store.tensor.name == name


def _is_returned(region: Region, name: str, target: str) -> bool:
    """Whether the region also returns the old or the new values: they need another buffer."""
    return any(output.name in (name, target) for output in region.outputs)


def _can_store_in_place(nest: LoopNest, name: str, target: str) -> bool:
    """Whether a kernel reads each element of the input only before it overwrites that element.

    Values that depend on the input may go to this store alone. In a kernel without reductions they
    may also go to other stores at the same points, since a kernel loads everything of a point
    before it stores.
    """
    own, others = _split_stores(nest, name, target)
    dependent = find_dependent_locals(nest, target)
    if nest.is_row_program or _reads_elsewhere(nest, own, target):
        return False
    if not others:
        return True
    is_pointwise = all(local.reduction is None for local in nest.locals.values())
    same_points = all(set(s.index.axes()) == set(own.index.axes()) for s in others)
    return is_pointwise and same_points and _depends_on(own.value, target, dependent)


def _feeds_only_this_store(nest: LoopNest, name: str, target: str) -> bool:
    """Whether a kernel reads only the element that it then overwrites, for this store alone."""
    own, others = _split_stores(nest, name, target)
    return not (nest.is_row_program or others or _reads_elsewhere(nest, own, target))


def _split_stores(nest: LoopNest, name: str, target: str) -> tuple[Store, list[Store]]:
    """Returns the store of a statement, and the other stores that depend on the input."""
    dependent = find_dependent_locals(nest, target)
    (own,) = [store for store in nest.stores if _stores_to(store, name)]
    return own, [s for s in nest.stores if s is not own and _depends_on(s.value, target, dependent)]


def _reads_elsewhere(nest: LoopNest, own: Store, target: str) -> bool:
    """Whether the input is read at another index than the store's, or reduced."""
    read_at = [index for tensor, index, _ in nest.accesses() if tensor.name == target]
    is_reduced = any(
        nest.locals[local].reduction is not None for local in find_dependent_locals(nest, target)
    )
    return is_reduced or any(index != own.index for index in read_at)


def find_dependent_locals(nest: LoopNest, target: str) -> set[str]:
    """Returns the locals that depend on a tensor."""
    found: set[str] = set()
    for local in nest.locals.values():
        if _depends_on(local.expression, target, found):
            found.add(local.name)
    return found


def needs_barrier(nest: LoopNest) -> bool:
    """Whether a tensor that is read and written also feeds other stores.

    Two GPU threads may load the same element. Without a barrier, one could load it after the other
    has overwritten it.
    """
    for own in nest.stores:
        name = own.tensor.name
        dependent = find_dependent_locals(nest, name)
        if any(_depends_on(s.value, name, dependent) for s in nest.stores if s is not own):
            return True
    return False


def _depends_on(expression: Expression, target: str, dependent: set[str]) -> bool:
    return any(
        isinstance(part, Load)
        and (part.name in dependent if not part.index else part.name == target)
        for part in walk(expression)
    )


def _redirect_store(nest: LoopNest, region: Region, name: str, target: str) -> LoopNest:
    memory = {key: tensor for key, tensor in nest.memory.items() if key != name}
    memory[target] = region.tensors[target]
    stores = tuple(
        replace(s, tensor=region.tensors[target]) if _stores_to(s, name) else s for s in nest.stores
    )
    return replace(nest, stores=stores, memory=memory)
