"""Writes to a region's inputs: which can be read, and which kernels store straight into the input.

In: `input.copy_(value)` at the end of a region; later the nests of the region's kernels. Out: a statement with the
input's own layout, noted in `Region.writes`; and nests whose store goes to the input itself, where nothing can see
the new value in the place of the old one. The launcher copies what is left.

    running_mean[c] = 0.1 * mean[c] + 0.9 * running_mean[c]

An input that nobody reads after the region is lent (`Region.lent`): a result of the same size and dtype is stored there, by
the same rules, and there is no need for memory of its own.

    conv[i] = max(scale[i % 64] * conv[i] + shift[i % 64], 0)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fulgurite.fuser.frontend.lowering_context import Reader
from fulgurite.fuser.frontend.pointwise import Unsupported
from fulgurite.fuser.frontend.tensor_value import Value, fresh_axes, from_size, from_stride
from fulgurite.fuser.ir.expression import Expression, Load, walk
from fulgurite.fuser.ir.loop_nest import Nest, Store
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.trace.cost import is_view


def read_write(reader: Reader, node: torch.fx.Node) -> Value:
    """The statement of `input.copy_(value)`."""
    target, source = node.args[:2]
    if not isinstance(target, torch.fx.Node) or target.op != "placeholder":
        raise Unsupported("a write to something that is not an input")
    if any(is_view(user) for user in target.users):
        raise Unsupported("a write to an input that is also seen through views")
    if not isinstance(source, torch.fx.Node) or not _alike(target, source):
        raise Unsupported("a write that converts, broadcasts or has dynamic sizes")
    old = target.meta["val"]
    axes = fresh_axes(tuple(from_size(size) for size in old.shape))
    strides = tuple(from_stride(stride) for stride in old.stride())
    reader.origin, reader.reading = "copy_", node
    if any(axis.size == 0 for axis in axes):
        return reader.value(target)  # nothing is written
    expression = reader.value(source).broadcast(axes)
    reader.store(f"{target.name}_new", old.dtype, axes, expression, strides=strides)
    reader.writes.append((reader.statements[-1].name, target.name))
    return reader.value(target)


def _alike(target: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Same dtype and sizes, all of them numbers; every element of the input in a place of its own."""
    old, new = target.meta.get("val"), source.meta.get("val")
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    known = all(isinstance(n, int) for n in (*old.shape, *old.stride(), *new.shape))
    if not known or old.dtype != new.dtype or old.shape != new.shape or old.is_complex():
        return False
    filled = 1
    for size, stride in sorted(zip(old.shape, old.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != filled:
            return False
        filled *= size
    return True


def in_place(region: Region, nests: Sequence[Nest]) -> tuple[Region, list[Nest]]:
    """The nests of a region's kernels, in the order they run, with stores straight into inputs.

    And the region: of its inputs that are lent those are left that hold results, which its outputs now are.
    """
    changed = list(nests)
    for name, target in region.writes:
        place = _maker(nests, name)
        if not _is_returned(region, name, target) and _is_safe(nests[place], name, target):
            if not _is_read(nests[place + 1 :], target):
                changed[place] = _redirected(changed[place], region, name, target)
    taken: dict[str | None, str] = {}
    for name in _free_results(region):
        for target in _fitting(region, name, set(taken.values())):
            place = _maker(nests, name)
            alone = _feeds_nothing_else(nests[place], name, target)
            if alone and not _is_read(nests[place + 1 :], target):
                changed[place] = _redirected(changed[place], region, name, target)
                taken[name] = target
                break
    outputs = tuple(replace(o, name=taken.get(o.name, o.name)) for o in region.outputs)
    return replace(region, outputs=outputs, lent=frozenset(taken.values())), changed


def _maker(nests: Sequence[Nest], name: str) -> int:
    """The place of the nest that stores a statement."""
    return next(k for k, nest in enumerate(nests) if any(_stores(s, name) for s in nest.stores))


def _is_read(nests: Sequence[Nest], target: str) -> bool:
    return any(target in nest.memory for nest in nests)


def _free_results(region: Region) -> list[str]:
    """Statements that are returned, and not written to an input as well; without those of no elements."""
    written = {name for name, _ in region.writes}
    made = {s.name for s in region.statements if not s.tensor.is_empty} - written
    return list(dict.fromkeys(o.name for o in region.outputs if o.name in made and not o.pairs))


def _fitting(region: Region, name: str, taken: set[str]) -> list[str]:
    """The lent inputs that have room for a result, and for nothing more."""
    result, seen = region.tensors[name], {o.name for o in region.outputs}
    used = taken | seen | {target for _, target in region.writes}
    return [
        one.name
        for one in region.inputs
        if one.name in region.lent - used
        and (one.dtype, one.pairs) == (result.dtype, result.pairs)
        and _filled(one) is not None
        and _filled(one) == _filled(result)
    ]


def _filled(tensor: Tensor) -> int | None:
    """How many elements of memory a tensor fills, each with one of its own; None where it does not, or sizes are symbols."""
    if not all(n.is_constant for n in (*tensor.sizes, *tensor.strides)):
        return None
    filled = 1
    pairs = zip(tensor.strides, tensor.sizes, strict=True)
    for stride, size in sorted((stride.constant, size.constant) for stride, size in pairs):
        if size != 1 and stride != filled:
            return None
        filled *= size
    return filled


def _stores(store: Store, name: str) -> bool:
    return store.tensor.name == name


def _is_returned(region: Region, name: str, target: str) -> bool:
    """Whether the old or the new values are results too, which have memory of their own."""
    return any(output.name in (name, target) for output in region.outputs)


def _is_safe(nest: Nest, name: str, target: str) -> bool:
    """Whether a kernel reads the input at no other place than the one it then writes, and before it does.

    What is computed from the input goes to that store alone, or, where nothing is reduced, to others at the same
    points: kernels read all that a point needs before they store.
    """
    own, others = _own_and_others(nest, name, target)
    fed = fed_by(nest, target)
    if _reads_elsewhere(nest, own, target):
        return False
    if not others:
        return True
    plain = all(local.reduction is None for local in nest.locals.values())
    same = all(set(s.index.axes()) == set(own.index.axes()) for s in others)
    return plain and same and _reads(own.value, target, fed)


def _feeds_nothing_else(nest: Nest, name: str, target: str) -> bool:
    """Whether a kernel reads the input at no other place than the one it then writes, and for that store alone."""
    own, others = _own_and_others(nest, name, target)
    return not others and not _reads_elsewhere(nest, own, target)


def _own_and_others(nest: Nest, name: str, target: str) -> tuple[Store, list[Store]]:
    """The store of a statement, and the others that read the input."""
    fed = fed_by(nest, target)
    (own,) = [store for store in nest.stores if _stores(store, name)]
    return own, [s for s in nest.stores if s is not own and _reads(s.value, target, fed)]


def _reads_elsewhere(nest: Nest, own: Store, target: str) -> bool:
    """Whether the input is read at another place than the store's, or summed up."""
    places = [index for tensor, index, _ in nest.accesses() if tensor.name == target]
    sums = any(nest.locals[local].reduction is not None for local in fed_by(nest, target))
    return sums or any(place != own.index for place in places)


def fed_by(nest: Nest, target: str) -> set[str]:
    """The locals that depend on a tensor."""
    found: set[str] = set()
    for local in nest.locals.values():
        if _reads(local.expression, target, found):
            found.add(local.name)
    return found


def needs_barrier(nest: Nest) -> bool:
    """Whether a tensor that is read and written feeds other stores as well.

    Threads of a GPU may hold an element twice; one could then read what the other has written already.
    """
    for own in nest.stores:
        name = own.tensor.name
        fed = fed_by(nest, name)
        if any(_reads(s.value, name, fed) for s in nest.stores if s is not own):
            return True
    return False


def _reads(expression: Expression, target: str, fed: set[str]) -> bool:
    return any(
        isinstance(part, Load) and (part.name in fed if not part.index else part.name == target)
        for part in walk(expression)
    )


def _redirected(nest: Nest, region: Region, name: str, target: str) -> Nest:
    memory = {key: tensor for key, tensor in nest.memory.items() if key != name}
    memory[target] = region.tensors[target]
    stores = tuple(
        replace(s, tensor=region.tensors[target]) if _stores(s, name) else s for s in nest.stores
    )
    return replace(nest, stores=stores, memory=memory)
