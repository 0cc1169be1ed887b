"""Lowers `input.copy_(value)` at the end of a region: the program mutates an input.

In: the copy_ node. Out: a statement with the input's own layout, recorded in `Region.writes`.
Later, `segment/inplace.py` decides which kernels store straight into the input.
"""

from __future__ import annotations

import torch

from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.tensor_value import TensorValue, size_to_index, stride_to_index
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.index import make_axes
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
    axes = make_axes(tuple(size_to_index(size) for size in old.shape))
    strides = tuple(stride_to_index(stride) for stride in old.stride())
    ctx.origin, ctx.current_node = "copy_", node
    if any(axis.size == 0 for axis in axes):
        return ctx.get_value(target)  # nothing is written
    expression = ctx.get_value(source).broadcast_to(axes)
    ctx.add_statement(f"{target.name}_new", old.dtype, axes, expression, strides=strides)
    ctx.writes.append((ctx.statements[-1].name, target.name))
    return ctx.get_value(target)


def _can_copy_back(target: torch.fx.Node, source: torch.fx.Node) -> bool:
    """Whether dtypes and static sizes are equal, and the input is dense."""
    old, new = fake_value(target), fake_value(source)
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        return False
    is_static = all(isinstance(n, int) for n in (*old.shape, *old.stride(), *new.shape))
    if not is_static or old.dtype != new.dtype or old.shape != new.shape or old.is_complex():
        return False
    count = 1
    for size, stride in sorted(zip(old.shape, old.stride(), strict=True), key=lambda pair: pair[1]):
        if size != 1 and stride != count:
            return False
        count *= size
    return True
