"""In-place writes through `as_strided` of a view: torch's functionalization refuses them.

In: a captured graph. Out: the same graph, in which each `as_strided` that is written is a view of the first
tensor of its storage. Size, stride and offset of `as_strided` count from the storage, so only the offset must
be given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fulgurite.capture.input_aliasing import has_storage
from fulgurite.capture.view_writes import is_written
from fulgurite.trace.node_meta import example_value


def view_storages(module: fx.GraphModule) -> None:
    """Let each `as_strided` through which the graph writes view the first tensor of its storage."""
    first: dict[int, fx.Node] = {}  # by storage
    has_changed = False
    for node in module.graph.nodes:
        value = example_value(node)
        if not has_storage(value):
            continue
        root = first.setdefault(value.untyped_storage()._cdata, node)
        if _is_as_strided(node) and is_written(node):
            has_changed |= _move_to(root, node)
    if has_changed:
        module.recompile()


def _move_to(root: fx.Node, node: fx.Node) -> bool:
    """Let an `as_strided` view another tensor of its storage, if that gives the same values and gradients."""
    names = ("input", "size", "stride", "storage_offset")
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    source, base, offset = given["input"], example_value(root), given.get("storage_offset")
    if root in (source, node) or "self" in given or not isinstance(source, fx.Node):
        return False
    view = example_value(source)
    if base.dtype != view.dtype or base.requires_grad != view.requires_grad:
        return False
    if offset is None:
        with node.graph.inserting_before(node):
            offset = node.graph.call_method("storage_offset", (source,))
        offset.meta["example_value"] = view.storage_offset()
    node.op, node.target = "call_function", torch.as_strided
    node.args, node.kwargs = (root, given["size"], given["stride"], offset), {}
    return True


def _is_as_strided(node: fx.Node) -> bool:
    functions: tuple[Any, ...] = (torch.as_strided, torch.Tensor.as_strided)
    return (node.op == "call_method" and node.target == "as_strided") or (
        node.op == "call_function" and node.target in functions
    )
