"""Input names from the user's program.

In: TorchDynamo's graphs, with inputs such as `L_self_modules_up_parameters_weight_`, and AOTAutograd's
graphs, with inputs such as `primals_3` and `tangents_1`. Out: copies with the names `up_weight`, `x` and
`grad_0`.
"""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from torch import fx

from fulgurite.trace.metadata import fill_metadata
from fulgurite.trace.node_meta import (
    adopt_example_value,
    captured_op_name,
    drop_graph_argument,
    fake_value,
    input_descriptor,
    is_static_input,
    mark_frozen_input,
)
from fulgurite.trace.trace import copy_module


def clean_input_name(name: str) -> str:
    """`l_self_modules_up_parameters_weight_` → `up_weight`; `l_x_` → `x`."""
    text = re.sub(r"^[lL]_", "", name).rstrip("_") or name
    text = re.sub(r"^\w+?_(?=modules_|parameters_|buffers_)", "", text)
    text = re.sub(r"(^|_)(?:modules|parameters|buffers)_(?=\w)", r"\1", text)
    return text if text.isidentifier() else f"_{text}"


def clean_input_names(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a captured graph with clean input names, and its values under the key `val`."""
    copied = copy_module(module)
    for node in copied.graph.nodes:
        if node.op == "placeholder":
            _rename_node(node, clean_input_name(node.name))
        adopt_example_value(node)
        drop_graph_argument(node)  # it keeps the user's tensors alive
    return copied


class CapturedNames:
    """The names of one captured graph, for the functional graphs derived from it.

    Forward is built before backward. Backward finds the names that forward gave to saved values.
    """

    def __init__(self, captured: fx.GraphModule) -> None:
        nodes = list(captured.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.inputs = [node.name for node in placeholders]
        self.weights = {k for k, node in enumerate(placeholders) if is_static_input(node)}
        self.values = {n.name: fake_value(n) for n in nodes if n.op.startswith("call_")}
        self.renamed: dict[str, str] = {}

    def apply(self, module: fx.GraphModule) -> fx.GraphModule:
        """A copy of an AOTAutograd graph with the captured graph's names."""
        copied = copy_module(module)
        for node in copied.graph.nodes:
            if node.op == "placeholder":
                description = input_descriptor(node)
                if _position_from_descriptor(description) in self.weights:
                    mark_frozen_input(node)
                name = _name_from_descriptor(description, self.inputs)
                if name is None and description is None:
                    name = _name_from_position(node.name, self.inputs)
                name = name or self.renamed.get(node.name)
                if name:
                    _rename_node(node, name)
        for node, name in self._match_captured_ops(copied).items():
            old = node.name
            _rename_node(node, name)
            self.renamed[old] = node.name
        fill_metadata(copied)  # the partitioner adds nodes without metadata
        return copied

    def _match_captured_ops(self, module: fx.GraphModule) -> dict[fx.Node, str]:
        """The node of each captured op's value: the last one traced from it with its shape and dtype."""
        found: dict[str, fx.Node] = {}
        for node in module.graph.nodes:
            name = captured_op_name(node) if node.op == "call_function" else ""
            if name not in self.values or not _has_same_shape_and_dtype(
                fake_value(node), self.values[name]
            ):
                continue
            if node.target is operator.getitem and node.args[1] != 0:
                continue
            found[name] = node
        return {node: name for name, node in found.items()}


def _has_same_shape_and_dtype(value: Any, captured: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not isinstance(captured, torch.Tensor):
        return False
    return value.dtype == captured.dtype and list(map(str, value.shape)) == list(
        map(str, captured.shape)
    )


def _position_from_descriptor(description: Any) -> int | None:
    """The position of a captured graph's input that is an input of the functional graph, unchanged."""
    is_plain = type(description).__name__ == "PlainAOTInput"
    return int(description.idx) if is_plain else None


def _name_from_descriptor(description: Any, captured: list[str]) -> str | None:
    """The input's name from AOTAutograd's descriptor of where it comes from."""
    if description is None:
        return None
    kind = type(description).__name__
    if kind == "PlainAOTInput" and description.idx < len(captured):
        return captured[description.idx]
    if kind in ("ParamAOTInput", "BufferAOTInput"):  # a constant added by a transform
        return str(description.target).replace(".", "_")
    if kind == "SubclassGetAttrAOTInput":
        base = _name_from_descriptor(description.base, captured)
        return f"{base}_{description.attr.strip('_')}" if base else None
    if kind == "TangentAOTInput":
        position = getattr(description.output, "idx", None)
        return None if position is None else f"grad_{position}"
    return None


def _name_from_position(name: str, captured: list[str]) -> str | None:
    match = re.fullmatch(r"(primals|tangents)_(\d+)", name)
    if match is None:
        return None
    position = int(match[2]) - 1
    if match[1] == "tangents":
        return f"grad_{position}"
    return captured[position] if position < len(captured) else None


def _rename_node(node: fx.Node, name: str) -> None:
    if node.name != name:
        node._rename(name)
        if node.op == "placeholder":
            node.target = node.name
