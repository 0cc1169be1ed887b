"""Graphs that return views of a tensor subclass which AOTAutograd can't rebuild.

In: a captured graph. Out: whether it returns such a view. It then runs as captured.

AOTAutograd returns a view of an input, or of another output, as a view of that tensor: by the view's own
function, which autograd keeps, or else by `as_strided`. A view of a DTensor has no such function, and DTensor
has no `as_strided`. A class may also make wrappers without the offset of what they hold: `as_strided` then
finds another part.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fulgurite.trace.node_meta import example_value

LOST_VIEWS = "it returns views of {name}s, which as_strided does not find"


def describe_lost_views(module: fx.GraphModule) -> str | None:
    """Why AOTAutograd could not return the outputs of a captured graph; None: it can."""
    placeholders = module.graph.find_nodes(op="placeholder")
    nodes = dict.fromkeys(module.graph.output_node().all_input_nodes)
    inputs = [example_value(node) for node in placeholders]
    outputs = [example_value(node) for node in nodes if node not in placeholders]
    for value in outputs:
        if not is_traceable_wrapper_subclass(value) or value.is_nested:
            continue
        # views of other outputs are rebuilt for autograd alone
        bases = [*inputs, *(outputs if value.requires_grad else [])]
        views = [base for base in bases if _is_view(value, base)]
        if not all(_finds_by_strides(value, base) for base in views):
            return LOST_VIEWS.format(name=type(value).__name__)
    return None


def _is_view(value: Tensor, base: Any) -> bool:
    """Whether AOTAutograd takes a subclass for a view of another one: if the wrappers share a storage."""
    if value is base or not is_traceable_wrapper_subclass(base) or base.is_nested:
        return False
    if value.untyped_storage()._cdata != base.untyped_storage()._cdata:
        return False
    return value.shape != base.shape or value.stride() != base.stride()


def _finds_by_strides(value: Tensor, base: Tensor) -> bool:
    """Whether `as_strided` of the base gives the value."""
    try:
        view = base.as_strided(value.shape, value.stride(), value.storage_offset())
    except (RuntimeError, NotImplementedError):
        return False
    if type(view) is not type(value):  # a fallback of the subclass may return a plain tensor
        return False
    return list(_iter_layouts(view)) == list(_iter_layouts(value))


def _iter_layouts(value: Any) -> Iterator[Any]:
    """Sizes, strides and offsets of the plain tensors in a subclass."""
    if is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _iter_layouts(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value.shape, value.stride(), value.storage_offset()
