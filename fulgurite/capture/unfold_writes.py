"""In-place writes through `unfold`: torch's functionalization drops what the windows don't cover.

In: a captured graph. Out: the same graph with other views in place of each `unfold` whose windows
are written. For a write through `unfold`, torch rebuilds the base from the windows alone, so elements
in no window become 0: `x.unfold(-1, 2, 2).mul_(2)` clears the last of three.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

IN_PLACE_OPERATORS = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv,
    operator.ifloordiv, operator.imod, operator.ipow, operator.iand, operator.ior, operator.ixor,
    operator.ilshift, operator.irshift,
)  # fmt: skip


def keep_values_outside_windows(module: fx.GraphModule) -> None:
    """Replace each `unfold` through which the graph writes."""
    unfolds = [node for node in module.graph.nodes if _is_unfold(node)]
    written = [node for node in unfolds if is_written(node)]
    for node in written:
        node.op, node.target = "call_function", view_windows
    if written:
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


def _is_unfold(node: fx.Node) -> bool:
    return (node.op == "call_method" and node.target == "unfold") or (
        node.op == "call_function" and node.target in (torch.Tensor.unfold, torch.ops.aten.unfold)
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
    target = user.target
    name = target if isinstance(target, str) else str(getattr(target, "__name__", target))
    is_in_place = (name.endswith("_") and not name.endswith("__")) or target in IN_PLACE_OPERATORS
    return is_in_place and bool(user.args) and user.args[0] is value
