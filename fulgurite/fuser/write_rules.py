"""Writes to a region's inputs: which can be read, and which kernels store straight into the input.

In: `input.copy_(value)` at the end of a region; later the nests of the region's kernels. Out: a statement with the
input's own layout, noted in `Region.writes`; and nests whose store goes to the input itself, where nothing can see
the new value in the place of the old one. The launcher copies what is left.

    running_mean[c] = 0.1 * mean[c] + 0.9 * running_mean[c]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fulgurite.trace.cost import is_view

from .expression import Expression, Load, walk
from .ir import Region
from .nest import Nest, Store
from .pointwise_rules import Unsupported
from .reader import Reader
from .values import Value, fresh_axes, from_size, from_stride


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


def in_place(region: Region, nests: Sequence[Nest]) -> list[Nest]:
    """The nests of a region's kernels, in the order they run, with stores straight into inputs."""
    changed = list(nests)
    for name, target in region.writes:
        place = next(
            k for k, nest in enumerate(nests) if any(_stores(s, name) for s in nest.stores)
        )
        later = nests[place + 1 :]
        if any(target in nest.memory for nest in later) or _is_returned(region, name, target):
            continue
        if _is_safe(nests[place], name, target):
            changed[place] = _redirected(changed[place], region, name, target)
    return changed


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
    (own,) = [store for store in nest.stores if _stores(store, name)]
    places = [index for tensor, index, _ in nest.accesses() if tensor.name == target]
    if any(place != own.index for place in places):
        return False
    fed = fed_by(nest, target)
    if any(nest.locals[local].reduction is not None for local in fed):
        return False
    others = [s for s in nest.stores if s is not own and _reads(s.value, target, fed)]
    if not others:
        return True
    plain = all(local.reduction is None for local in nest.locals.values())
    same = all(set(s.index.axes()) == set(own.index.axes()) for s in others)
    return plain and same and _reads(own.value, target, fed)


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
