"""What a printed trace says beside its lines: types, places in the user's program, costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fulgurite.trace import cost
from fulgurite.trace.describe import Source, describe
from fulgurite.trace.region import Region


def annotation(value: Any) -> str:
    """`f32[4, 8]`, with the device where it is not the CPU."""
    text = describe(value)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        text += f" {value.device}"
    return text


def place_comment(place: Source) -> str:
    """The module and the line of the user's that the lines below come from."""
    return f"# {place.module:<24}  {place.place:<18}  {place.code}".rstrip()


def cost_comment(node: fx.Node, executor: str) -> str:
    """Who runs a line, and how many bytes it moves or products it makes."""
    if isinstance(node.target, Region):
        return f"{executor}   {node.target.summary}"
    if cost.is_view(node):
        return f"{executor}   view"
    flops = cost.node_flops(node)
    moved = cost.node_bytes(node)
    amount = cost.flops_text(flops) if flops else cost.bytes_text(moved) if moved else ""
    parts = (executor, amount, node.meta.get("remark"))
    return "   ".join(part for part in parts if part)
