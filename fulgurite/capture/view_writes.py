"""In-place writes through views that torch's functionalization gets wrong.

In: a captured graph. Out: the same graph with other views.

- `unfold`, if its windows are written: torch rebuilds the base from the windows alone, so elements in no
  window become 0. `x.unfold(-1, 2, 2).mul_(2)` clears the last of three.
- `unsafe_split` and `unsafe_chunk`: torch takes the parts for copies, so a write to a part does not change
  the base, and a write to the base does not change the parts. In eager mode they share memory.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fulgurite.trace.node_meta import example_value

IN_PLACE_OPERATORS = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift,
)  # fmt: skip


def replace_views(module: fx.GraphModule) -> None:
    """Replace each view whose writes torch gets wrong."""
    has_changed = False
    for node in module.graph.nodes:
        if _is_call(node, "unfold") and is_written(node):
            node.op, node.target = "call_function", view_windows
        elif any(_is_call(node, name) for name in SPLITS) and _is_constant(node):
            node.op, node.target = "call_function", SPLITS[_name(node.target)]
        else:
            continue
        has_changed = True
    if has_changed:
        module.recompile()


def is_written(node: fx.Node) -> bool:
    """Whether the graph may write to a value, or to a view of it."""
    return any(map(_writes, _uses(node)))


def view_windows(x: Tensor, dimension: int, size: int, step: int) -> Tensor:
    """`x.unfold(dimension, size, step)`, as views through which torch writes right.

    Windows that overlap can't be written in eager mode either.
    """
    if x.dim() == 0 or step < size:
        return x.unfold(dimension, size, step)
    dim = dimension % x.dim()
    count = (x.shape[dim] - size) // step + 1
    if count == 1:
        return x.narrow(dim, 0, size).unsqueeze(dim).movedim(dim + 1, -1)
    if count * step <= x.shape[dim]:
        steps = x.narrow(dim, 0, count * step).unflatten(dim, (count, step))
        return steps.narrow(dim + 1, 0, size).movedim(dim + 1, -1)
    # the last window ends before its step does; not for all strides, but with an error then
    shape, strides = [*x.shape, size], [*x.stride(), x.stride(dim)]
    shape[dim], strides[dim] = count, x.stride(dim) * step
    return x.as_strided(shape, strides)


def _view_parts(split: Callable[..., Any]) -> Callable[..., Any]:
    """A function that splits a tensor, with views for parts."""

    def view_parts(*operands: Any, dim: int = 0, **named: Any) -> tuple[Tensor, ...]:
        values = (*operands, *named.values())  # the tensor has a name of its own in each overload
        x, sizes, dim = (*sorted(values, key=lambda value: not isinstance(value, Tensor)), dim)[:3]
        lengths = [part.shape[dim] for part in split(x, sizes, dim)]
        return tuple(x.narrow(dim, sum(lengths[:k]), n) for k, n in enumerate(lengths))

    return view_parts


SPLITS = {
    "unsafe_split": _view_parts(torch.split),
    "unsafe_split_with_sizes": _view_parts(torch.split),
    "unsafe_chunk": _view_parts(torch.chunk),
}


def _is_constant(node: fx.Node) -> bool:
    """Whether no gradient passes through a split: autograd takes its parts for copies, too."""
    return not any(part.requires_grad for part in example_value(node) or ())


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _is_call(node: fx.Node, name: str) -> bool:
    """Whether a node calls a function or method of torch with this name."""
    owners = (torch, torch.Tensor, torch.ops.aten)
    known = [getattr(owner, name) for owner in owners if hasattr(owner, name)]
    return (node.op == "call_method" and node.target == name) or (
        node.op == "call_function" and node.target in known
    )


def _uses(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """All uses of a value and of what is computed from it, as (user, value)."""
    pending, seen = [node], {node}
    while pending:
        value = pending.pop()
        for user in value.users:
            yield user, value
            if user not in seen:
                seen.add(user)
                pending.append(user)


def _writes(use: tuple[fx.Node, fx.Node]) -> bool:
    """Whether an op may write to its argument. A name that ends in `_` says so; so does `out=`."""
    user, value = use
    if user.kwargs.get("out") is value:
        return True
    name = _name(user.target)
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_in_place |= user.target in IN_PLACE_OPERATORS
    return is_in_place and bool(user.args) and user.args[0] is value
