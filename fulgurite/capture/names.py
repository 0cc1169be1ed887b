"""Names from the user's program for the inputs of a graph.

In: captured graphs, whose inputs are called `L_self_modules_up_parameters_weight_`, and AOTAutograd's graphs,
whose inputs are called `primals_3` and `tangents_1`. Out: copies that say `up_weight`, `x` and `grad_0`.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from fulgurite.trace.metadata import fill_metadata
from fulgurite.trace.trace import copy_module


def captured_name(name: str) -> str:
    """`l_self_modules_up_parameters_weight_` → `up_weight`; `l_x_` → `x`."""
    text = re.sub(r"^[lL]_", "", name).rstrip("_") or name
    text = re.sub(r"^\w+?_(?=modules_|parameters_|buffers_)", "", text)
    text = re.sub(r"(^|_)(?:modules|parameters|buffers)_(?=\w)", r"\1", text)
    return text if text.isidentifier() else f"_{text}"


def with_captured_names(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a captured graph with clean input names, and metadata where every graph keeps it."""
    copied = copy_module(module)
    for node in copied.graph.nodes:
        if node.op == "placeholder":
            _rename(node, captured_name(node.name))
        if "example_value" in node.meta:
            node.meta["val"] = node.meta["example_value"]
        node.meta.pop("grapharg", None)  # holds the user's tensors alive
    return copied


class Names:
    """The names of one captured graph, for the functional graphs that come of it.

    Forward is built before backward; what it renamed, backward finds among its inputs (the saved values).
    """

    def __init__(self, captured: fx.GraphModule) -> None:
        nodes = list(captured.graph.nodes)
        self.inputs = [node.name for node in nodes if node.op == "placeholder"]
        self.values = {n.name: n.meta.get("val") for n in nodes if n.op.startswith("call_")}
        self.renamed: dict[str, str] = {}

    def apply(self, module: fx.GraphModule) -> fx.GraphModule:
        """A copy of an AOTAutograd graph, named as the captured one."""
        copied = copy_module(module)
        for node in copied.graph.nodes:
            if node.op == "placeholder":
                description = node.meta.get("desc")
                name = _described(description, self.inputs)
                if name is None and description is None:
                    name = _numbered(node.name, self.inputs)
                name = name or self.renamed.get(node.name)
                if name:
                    _rename(node, name)
        for node, name in self._results(copied).items():
            old = node.name
            _rename(node, name)
            self.renamed[old] = node.name
        fill_metadata(copied)  # the partitioner adds nodes without any
        return copied

    def _results(self, module: fx.GraphModule) -> dict[fx.Node, str]:
        """The node that holds the value of each captured op: the last that looks like it."""
        found: dict[str, fx.Node] = {}
        for node in module.graph.nodes:
            source = node.meta.get("from_node")
            name: str = source[-1].name if source and node.op == "call_function" else ""
            if name not in self.values or not _looks_like(node.meta.get("val"), self.values[name]):
                continue
            if node.target is operator.getitem and node.args[1] != 0:
                continue
            found[name] = node
        return {node: name for name, node in found.items()}


def _looks_like(value: Any, captured: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(captured, torch.Tensor):
        return False
    return value.dtype == captured.dtype and list(map(str, value.shape)) == list(
        map(str, captured.shape)
    )


def _described(description: Any, captured: list[str]) -> str | None:
    """The name by AOTAutograd's own description of where the input comes from."""
    if description is None:
        return None
    kind = type(description).__name__
    if kind == "PlainAOTInput" and description.idx < len(captured):
        return captured[description.idx]
    if kind in ("ParamAOTInput", "BufferAOTInput"):  # a constant that a transform added
        return str(description.target).replace(".", "_")
    if kind == "SubclassGetAttrAOTInput":
        base = _described(description.base, captured)
        return f"{base}_{description.attr.strip('_')}" if base else None
    if kind == "TangentAOTInput":
        position = getattr(description.output, "idx", None)
        return None if position is None else f"grad_{position}"
    return None


def _numbered(name: str, captured: list[str]) -> str | None:
    match = re.fullmatch(r"(primals|tangents)_(\d+)", name)
    if match is None:
        return None
    position = int(match[2]) - 1
    if match[1] == "tangents":
        return f"grad_{position}"
    return captured[position] if position < len(captured) else None


def _rename(node: fx.Node, name: str) -> None:
    if node.name != name:
        node._rename(name)
        if node.op == "placeholder":
            node.target = node.name
