"""Comments of a printed trace: types, lines of the user's program, costs.

In: values, sources and nodes. Out: the text after `:` or `#` in a trace.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fulgurite.trace import cost
from fulgurite.trace.describe import Source, describe
from fulgurite.trace.node_meta import comment_of
from fulgurite.trace.region import Region
from fulgurite.units import format_bytes


def type_annotation(value: Any) -> str:
    """`f32[4, 8]`, with the device unless it is the CPU."""
    text = describe(value)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        text += f" {value.device}"
    return text


def source_comment(source: Source) -> str:
    """The user's module and line that the following lines come from."""
    return f"# {source.module:<24}  {source.location:<18}  {source.code}".rstrip()


def cost_comment(node: fx.Node, executor: str) -> str:
    """The executor of a line, and its flops or the bytes it moves."""
    if isinstance(node.target, Region):
        return f"{executor}   {node.target.comment}"
    if cost.is_view(node):
        return f"{executor}   view"
    flops = cost.node_flops(node)
    moved = cost.node_bytes(node)
    amount = cost.format_flops(flops) if flops else format_bytes(moved) if moved else ""
    parts = (executor, amount, comment_of(node))
    return "   ".join(part for part in parts if part)
