"""Lowers `input.copy_(value)` at the end of a region: the program mutates an input.

In: the copy_ node. Out: a statement with the input's own layout, recorded in `Region.writes`.
The result of an indexed store is written as it is, without another statement. Later,
`segment/inplace.py` decides which kernels store straight into the input.
"""

from __future__ import annotations

import torch

from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.symbolic_sizes import sizes_to_indices, strides_to_indices
from fulgurite.fuser.frontend.tensor_value import TensorValue, axis_indices
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Load
from fulgurite.fuser.ir.index import Index, make_axes
from fulgurite.trace.cost import is_view
from fulgurite.trace.node_meta import fake_value


def lower_input_copy(ctx: LoweringContext, node: torch.fx.Node) -> TensorValue:
    """Adds the statement of `input.copy_(value)`."""
    target, source = node.args[:2]
    if not isinstance(target, torch.fx.Node) or target.op != "placeholder":
        raise Unsupported("copy_ to a tensor that is not an input")
    if any(is_view(user) for user in target.users):
        raise Unsupported("copy_ to an input that also has views")
    if not isinstance(source, torch.fx.Node) or not _can_copy_back(target, source):
        raise Unsupported("copy_ that converts the dtype, broadcasts or has dynamic sizes")
    old = fake_value(target)
    axes = make_axes(sizes_to_indices(old))
    strides = strides_to_indices(old)
    ctx.origin, ctx.current_node = "copy_", node
    if any(axis.size == 0 for axis in axes):
        return ctx.get_value(target)  # nothing is written
    value = ctx.get_value(source)
    store = _find_indexed_store(ctx, value, strides)
    if store is not None:
        ctx.writes.append((store, target.name))
        return ctx.get_value(target)
    expression = value.broadcast_to(axes)
    ctx.add_statement(f"{target.name}_new", old.dtype, axes, expression, strides=strides)
    ctx.writes.append((ctx.statements[-1].name, target.name))
    return ctx.get_value(target)


def _find_indexed_store(
    ctx: LoweringContext, value: TensorValue, strides: tuple[Index, ...]
) -> str | None:
    """Returns the indexed store whose whole result is the value, in the input's layout."""
    if not isinstance(value.expression, Load):
        return None
    found = [s for s in ctx.statements if s.scatter and s.name == value.expression.name]
    is_whole = list(value.expression.index) == axis_indices(value.axes)
    if not found or not is_whole or found[0].tensor.strides != strides:
        return None
    is_written = any(found[0].name == name for name, _ in ctx.writes)
    return None if is_written else found[0].name


def _can_copy_back(target: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Whether dtypes and static sizes are equal, and the input is dense."""
    old, new = fake_value(target), fake_value(source)
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    is_static = all(isinstance(n, int) for n in (*old.shape, *old.stride(), *new.shape))
    if not is_static or old.dtype != new.dtype or old.shape != new.shape or old.is_complex():
        return False
    if old.is_neg():
        return False
    count = 1
    for size, stride in sorted(zip(old.shape, old.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != count:
            return False
        count *= size
    return True
