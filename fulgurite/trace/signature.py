"""A region without its names: what two equal regions of different layers have in common.

In: a graph module with metadata, or one call of it. Out: a text. Equal texts mean the same ops on the same dtypes,
sizes and strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, fx, strided

from fulgurite.trace.cost import tensors


def signature(module: fx.GraphModule) -> str:
    """A region without its names: equal regions of different layers have the same."""
    number = {node: position for position, node in enumerate(module.graph.nodes)}
    lines = []
    for node in module.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Numbered(number[n]))
        value = node.meta.get("val")
        known = [(t.dtype, tuple(t.shape), tuple(t.stride()), t.device) for t in tensors(value)]
        target = "" if node.op in ("placeholder", "output") else node.target
        target = "lent" if node.meta.get("lent") else target
        lines.append(f"{node.op} {target} {arguments} {known or value}")
    return "\n".join(lines)


def call_signature(node: fx.Node) -> str | None:
    """A call without its names: equal ones compute the same from equal tensors. None where sizes are symbols."""
    sources = node.all_input_nodes
    made = list(tensors(node.meta.get("val")))
    number = {source: position for position, source in enumerate(sources)}
    arguments = fx.node.map_arg((node.args, node.kwargs), lambda n: _Numbered(number[n]))
    values = [source.meta.get("val") for source in sources] + made
    if not made or not all(isinstance(value, Tensor) and _is_plain(value) for value in values):
        return None
    layouts = [(t.dtype, tuple(t.shape), t.stride(), t.storage_offset(), t.device) for t in values]
    return f"{node.target} {arguments} {layouts}"


def _is_plain(value: Tensor) -> bool:
    """Of fixed sizes, and nothing but its numbers."""
    if value.layout is not strided or value.is_conj() or value.is_neg():
        return False
    sizes = (*value.shape, *value.stride(), value.storage_offset())
    return all(isinstance(size, int) for size in sizes)


@dataclass(frozen=True)
class _Numbered:
    position: int

    def __repr__(self) -> str:
        return f"%{self.position}"
