"""One op → the pieces it is made of, by torch's own decompositions and by those of our operators, one level at a time.

In: a node of a functional graph. Out: a graph module of the pieces on the same arguments, or None where there is
no decomposition (or the op's own kernel is the definition). `inline` puts such pieces in the op's place.
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

from fulgurite.op import pieces_of
from fulgurite.trace.metadata import fake_mode_of, faking
from fulgurite.transforms import losses

# torch's rules for these don't give eager's numbers: it truncates both ends first for integers, and rounds them to bfloat16
CHANGE_RESULTS = (torch.ops.aten.linspace, torch.ops.aten.logspace)


@lru_cache(maxsize=1)
def decompositions() -> dict[Any, Any]:
    """torch's table of decompositions for inference and training, without the ones that change results, and ours."""
    table = torch._decomp.decomposition_table
    changing = {getattr(packet, name) for packet in CHANGE_RESULTS for name in packet.overloads()}
    return {op: rule for op, rule in table.items() if op not in changing} | losses.PIECES


def decompose(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The pieces of `node`, as a graph of the nodes among its arguments (in `all_input_nodes` order)."""
    rule = decompositions().get(node.target) or pieces_of(node.target)
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
        if result is NotImplemented:
            raise NotImplementedError(f"no pieces of {node.target} for these arguments")
        return tuple(result) if isinstance(result, tuple) else result  # not a named tuple

    try:
        # make_fx keeps global state, and backward has a thread of its own
        with compile_lock, faking(fake_mode_of(module)):
            traced = make_fx(pieces, tracing_mode="real")(*values)
    except (NotImplementedError, GuardOnDataDependentSymNode):
        return None  # the rule doesn't know these arguments, or would have to look at the data
    stays = any(n.target is node.target or _reads_data(n) for n in traced.graph.nodes)
    return None if stays else traced


def _reads_data(node: fx.Node) -> bool:
    """Whether the node turns tensor data into a size or a number."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _argument(value: Any, value_of: dict[fx.Node, Any]) -> Any:
    """An argument with values for nodes, in lists that the decomposition may change."""
    if isinstance(value, fx.Node):
        return value_of[value]
    if isinstance(value, (list, tuple)):
        items = [_argument(item, value_of) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value


def inline(node: fx.Node, pieces: fx.GraphModule) -> tuple[list[fx.Node], list[Any]]:
    """Replace `node` by its pieces; returns the new nodes, which carry the node's source, and its results."""
    graph = node.graph
    result: Any = None
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
    return made, pytree.tree_leaves(result)


def _provenance(node: fx.Node) -> dict[str, Any]:
    kept = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "seq_nr", "partitioner_tag")
    # the op that this one is itself a piece of, and the region that it has to itself
    inherited = ("whole", "apart")
    return {key: node.meta[key] for key in (*kept, *inherited) if key in node.meta}


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
