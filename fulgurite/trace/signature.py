"""A region without its names: what two equal regions of different layers have in common.

In: a graph module with metadata. Out: a text. Equal texts mean the same ops on the same dtypes, sizes and strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

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
        lines.append(f"{node.op} {target} {arguments} {known or value}")
    return "\n".join(lines)


@dataclass(frozen=True)
class _Numbered:
    position: int

    def __repr__(self) -> str:
        return f"%{self.position}"
