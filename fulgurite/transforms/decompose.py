"""Decompose one op into smaller ops, one level at a time.

In: a node of a functional graph. Out: a graph module of the decomposed ops on the same arguments, or None
if there is no decomposition. It uses torch's decomposition table and those of our custom operators.
`inline_decomposition` replaces the op by the decomposed ops.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch._decomp
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils import _pytree as pytree

from fulgurite.op import get_decomposition
from fulgurite.trace.metadata import find_fake_mode, use_fake_mode
from fulgurite.trace.node_meta import copy_source_and_groups, fake_value, set_fake_value
from fulgurite.transforms import nll_loss

# torch's decompositions of these don't match eager, which first truncates both ends for integers and
# rounds them for bfloat16
INEXACT_DECOMPOSITIONS = (torch.ops.aten.linspace, torch.ops.aten.logspace)


@lru_cache(maxsize=1)
def decomposition_table() -> dict[Any, Any]:
    """torch's table of decompositions, without those that change results, and ours."""
    table = torch._decomp.decomposition_table
    inexact = {
        getattr(packet, name) for packet in INEXACT_DECOMPOSITIONS for name in packet.overloads()
    }
    exact = {op: function for op, function in table.items() if op not in inexact}
    return exact | nll_loss.DECOMPOSITIONS


def decompose(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The decomposed ops of `node`, as a graph whose inputs are the node's `all_input_nodes`."""
    function = decomposition_table().get(node.target) or get_decomposition(node.target)
    if function is None:
        return None
    sources = node.all_input_nodes
    values = [fake_value(source) for source in sources]
    if any(value is None for value in values):
        return None

    def run(*inputs: Any) -> Any:
        value_of = dict(zip(sources, inputs, strict=True))
        args = _substitute_nodes(node.args, value_of)
        kwargs = {key: _substitute_nodes(value, value_of) for key, value in node.kwargs.items()}
        result = function(*args, **kwargs)
        if result is NotImplemented:
            raise NotImplementedError(f"no decomposition of {node.target} for these arguments")
        return tuple(result) if isinstance(result, tuple) else result  # not a named tuple

    try:
        # make_fx has global state, and backward runs on its own thread
        with compile_lock, use_fake_mode(find_fake_mode(module)):
            traced = make_fx(run, tracing_mode="real")(*values)
    except (NotImplementedError, GuardOnDataDependentSymNode):
        return None  # not for these arguments, or it depends on data
    is_unusable = any(n.target is node.target or _reads_data(n) for n in traced.graph.nodes)
    return None if is_unusable else traced


def _reads_data(node: fx.Node) -> bool:
    """Whether the node turns tensor data into a size or a number."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _substitute_nodes(value: Any, value_of: dict[fx.Node, Any]) -> Any:
    """An argument with values in place of nodes. Lists are copied: a decomposition may change them."""
    if isinstance(value, fx.Node):
        return value_of[value]
    if isinstance(value, (list, tuple)):
        items = [_substitute_nodes(item, value_of) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def inline_decomposition(
    node: fx.Node, decomposed: fx.GraphModule
) -> tuple[list[fx.Node], list[Any]]:
    """Replace `node` by its decomposed ops. Returns the new nodes and the nodes of its results."""
    graph = node.graph
    result: Any = None
    value_of: dict[fx.Node, Any] = dict(
        zip((n for n in decomposed.graph.nodes if n.op == "placeholder"), node.all_input_nodes)
    )
    new_nodes: list[fx.Node] = []
    with graph.inserting_before(node):
        for op in decomposed.graph.nodes:
            if op.op == "placeholder":
                continue
            if op.op == "output":
                result = fx.node.map_arg(op.args[0], lambda n: value_of[n])
                _replace_uses(node, result)
                break
            copy = graph.node_copy(op, lambda n: value_of[n])
            copy_source_and_groups(node, copy)
            set_fake_value(copy, fake_value(op))
            value_of[op] = copy
            new_nodes.append(copy)
    return new_nodes, pytree.tree_leaves(result)


def _replace_uses(node: fx.Node, result: Any) -> None:
    """Let the users of `node`, or of its items, use `result`; then erase `node`."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        items, _ = pytree.tree_flatten(result)
        for user in list(node.users):
            position = user.args[1]
            assert isinstance(position, int), f"{node.name}: getitem with {position!r}"
            user.replace_all_uses_with(items[position])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
