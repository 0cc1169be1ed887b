"""One op → the pieces it is made of, by torch's own decompositions, one level at a time.

In: a node of a functional graph. Out: a graph module of the pieces on the same arguments, or None where torch
has no decomposition (or the op's own kernel is the definition). `inline` puts such pieces in the op's place.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch._decomp
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fulgurite.trace.metadata import fake_mode_of, faking


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Any]:
    """torch's table of decompositions for inference and training, without the ones that change results."""
    return dict(torch._decomp.decomposition_table)


def decompose(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The pieces of `node`, as a graph of the nodes among its arguments (in `all_input_nodes` order)."""
    rule = decompositions().get(node.target)
    if rule is None:
        return None
    sources = node.all_input_nodes
    values = [source.meta.get("val") for source in sources]
    if any(value is None for value in values):
        return None

    def pieces(*inputs: Any) -> Any:
        value_of = dict(zip(sources, inputs, strict=True))
        args = _argument(node.args, value_of)
        kwargs = {key: _argument(value, value_of) for key, value in node.kwargs.items()}
        result = rule(*args, **kwargs)
        return tuple(result) if isinstance(result, tuple) else result  # not a named tuple

    with faking(fake_mode_of(module)):
        traced = make_fx(pieces, tracing_mode="real")(*values)
    return None if any(n.target is node.target for n in traced.graph.nodes) else traced


def _argument(value: Any, value_of: dict[fx.Node, Any]) -> Any:
    """An argument with values for nodes, in lists that the decomposition may change."""
    if isinstance(value, fx.Node):
        return value_of[value]
    if isinstance(value, (list, tuple)):
        items = [_argument(item, value_of) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def inline(node: fx.Node, pieces: fx.GraphModule) -> list[fx.Node]:
    """Replace `node` by its pieces; returns the new nodes, which carry the node's source."""
    graph = node.graph
    value_of: dict[fx.Node, Any] = dict(
        zip((n for n in pieces.graph.nodes if n.op == "placeholder"), node.all_input_nodes)
    )
    made: list[fx.Node] = []
    with graph.inserting_before(node):
        for piece in pieces.graph.nodes:
            if piece.op == "placeholder":
                continue
            if piece.op == "output":
                result = fx.node.map_arg(piece.args[0], lambda n: value_of[n])
                _replace(node, result)
                break
            copy = graph.node_copy(piece, lambda n: value_of[n])
            copy.meta = {**_provenance(node), "val": piece.meta.get("val")}
            value_of[piece] = copy
            made.append(copy)
    return made


def _provenance(node: fx.Node) -> dict[str, Any]:
    kept = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "partitioner_tag")
    return {key: node.meta[key] for key in kept if key in node.meta}


def _replace(node: fx.Node, result: Any) -> None:
    """Point the users of `node` (or of its items) at the pieces' results."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        items, _ = pytree.tree_flatten(result)
        for user in list(node.users):
            position = user.args[1]
            assert isinstance(position, int), f"{node.name}: an item is picked by {position!r}"
            user.replace_all_uses_with(items[position])
            node.graph.erase_node(user)
    node.graph.erase_node(node)
