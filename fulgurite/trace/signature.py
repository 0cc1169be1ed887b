"""Signatures: cache keys of regions and calls.

In: a graph module with metadata, or one of its calls. Out: a text without names. Equal texts mean the same
ops on the same dtypes, sizes and strides, so repeated layers share their kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx, strided

from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.node_meta import fake_value, is_donated


def region_signature(module: fx.GraphModule) -> str:
    """A region without its names: equal regions of different layers have equal signatures."""
    number = {node: position for position, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _NodeIndex(number[n]))
        value = fake_value(node)
        layouts = [
            (t.dtype, tuple(t.shape), tuple(t.stride()), t.device, t.is_conj(), t.is_neg())
            for t in iter_tensors(value)
        ]
        target = "" if node.op in ("placeholder", "output") else node.target
        target = "donated" if is_donated(node) else target
        if target is torch.ops.aten.as_strided.default:  # it reads memory around its argument
            layouts += [t.storage_offset() for t in iter_tensors(fake_value(node.args[0]))]
        lines.append(f"{node.op} {target} {arguments} {layouts or value}")
    return "\n".join(lines)


def call_signature(node: fx.Node) -> str | None:
    """A call without its names: equal signatures compute the same. None if a size is symbolic."""
    sources = node.all_input_nodes
    results = list(iter_tensors(fake_value(node)))
    number = {source: position for position, source in enumerate(sources)}
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _NodeIndex(number[n]))
    values = [fake_value(source) for source in sources] + results
    is_static = all(isinstance(value, Tensor) and _is_static_dense(value) for value in values)
    if not results or not is_static:
        return None
    layouts = [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.device) for t in values]
    return f"{node.target} {arguments} {layouts}"


def _is_static_dense(value: Tensor) -> bool:
    """Whether the tensor is strided, with static sizes and without conjugate or negative bit."""
    if value.layout is not strided or value.is_conj() or value.is_neg():
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return all(isinstance(size, int) for size in sizes)


@dataclass(frozen=True)
class _NodeIndex:
    """A node by its position: prints as `%3`."""

    position: int

    def __repr__(self) -> str:
        return f"%{self.position}"
