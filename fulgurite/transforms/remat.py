"""Which values forward saves for backward, and which backward computes again.

In: the joint graph of forward and backward that AOTAutograd traced. Out: the two graphs. Policies:

    none     save everything backward reads; recompute nothing
    mincut   torch's min-cut partitioner: recompute what is cheap, save where that costs the fewest bytes
    full     save the inputs only; backward runs forward again (as checkpointing the whole graph does)
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch.utils.checkpoint import CheckpointPolicy

from fulgurite.kernels.quantize.ops import quantize_parts
from fulgurite.trace.cost import memory_of, value_bytes
from fulgurite.trace.metadata import fake_mode_of
from fulgurite.trace.trace import copy_module
from fulgurite.trace.writes import written
from fulgurite.transforms.attention import replace_known_masks
from fulgurite.transforms.cross_entropy import logarithms_from_logits
from fulgurite.transforms.masks import masks_from_inputs
from fulgurite.transforms.pooling import small_offsets
from fulgurite.transforms.simplify import merge_common_subexpressions

aten = torch.ops.aten
Remat = Literal["none", "mincut", "full"]
REMAT = get_args(Remat)
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


def partitioner(policy: Remat) -> Partition:
    """The partition function of a policy, as AOTAutograd calls it."""

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        merge_common_subexpressions(joint.graph)
        replace_known_masks(joint.graph)
        _cast_in_backward(joint.graph)
        _without_running_statistics(joint.graph)
        small_offsets(joint)
        if policy != "none":  # it computes once more, if only what is read anyway
            masks_from_inputs(joint)
            logarithms_from_logits(joint)
        if policy == "full":
            _recompute_forward(joint.graph)
        forward, backward = _split(policy, joint, inputs, options)
        _save_what_was(forward, options["num_fwd_outputs"])
        _mark_saved(forward, backward, options["num_fwd_outputs"])
        return forward, backward

    return partition


def _split(policy: Remat, joint: fx.GraphModule, inputs: Any, options: dict[str, Any]) -> Any:
    if policy == "none":
        return default_partition(joint, inputs, **options)
    with functorch_config.patch(
        cse=False,  # torch's own imports all of Inductor, a second by itself
        # activations that a matmul of backward reads are computed again too: a kernel that runs there
        # anyway (of the activation's own gradient) writes them, and a quarter less is saved
        ban_recompute_materialized_backward=False,
    ):
        return min_cut_rematerialization_partition(joint, inputs, **options)


def _cast_in_backward(graph: fx.Graph) -> None:
    """Leave in backward the casts that its rules make there, of weights above all.

    They depend on no gradient, so that torch would rather make them in forward and keep them.
    """
    for node in graph.nodes:
        cast = node.args[0] if node.target is operator.getitem else node
        if not isinstance(cast, fx.Node) or cast.target is not quantize_parts.overload:
            continue
        if cast.meta.get("partitioner_tag") == "is_backward":
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta.setdefault("ac_graph_id", 0)


def _without_running_statistics(graph: fx.Graph) -> None:
    """In training the backward of a batch norm reads no running statistics: they are not kept for it."""
    for target, trains in (
        (aten.native_batch_norm_backward.default, 7),
        (aten.batch_norm_backward.default, 7),
    ):
        for node in graph.find_nodes(op="call_function", target=target):
            if len(node.args) > trains and node.args[trains] is True:
                node.args = (*node.args[:3], None, None, *node.args[5:])


def _save_what_was(forward: fx.GraphModule, user_outputs: int) -> None:
    """Keep a copy where backward reads an input as it was before this graph writes to it."""
    graph = forward.graph
    overwritten = {target for node in graph.nodes for target in written(node)}
    if not overwritten:
        return
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(results[user_outputs:], user_outputs):
        if not isinstance(node, fx.Node) or memory_of(node) not in overwritten:
            continue
        if node not in copies:
            with graph.inserting_after(node):
                copies[node] = graph.call_function(aten.clone.default, (node,))
            copies[node].meta["val"] = node.meta["val"].clone()
        results[position] = copies[node]
    output.args = (type(output.args[0])(results),)  # type: ignore[call-arg,arg-type]
    forward.recompile()


def _mark_saved(forward: fx.GraphModule, backward: fx.GraphModule, user_outputs: int) -> None:
    """Inputs of backward that are its own to drop: what forward made for it, and gave to nobody else."""
    results = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    returned = {memory_of(n) for n in results[:user_outputs] if isinstance(n, fx.Node)}
    kept = [n for n in results[user_outputs:] if isinstance(n, fx.Node)]
    saved = {n.name for n in kept if memory_of(n) not in returned and not _is_input(n)}
    for node in backward.graph.find_nodes(op="placeholder"):
        node.meta["saved"] = node.name in saved


def _is_input(node: fx.Node) -> bool:
    return memory_of(node).op in ("placeholder", "get_attr")


def _recompute_forward(graph: fx.Graph) -> None:
    """Mark everything that needs no gradient as checkpointing does; random ops then replay their draws."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(source in backward for source in node.all_input_nodes):
            backward.add(node)
        elif node.op == "call_function" and not written(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = 0


def saved_bytes(forward: fx.GraphModule, user_outputs: int) -> int:
    """Bytes that stay alive between forward and backward, without the graph's own inputs.

    Inputs (parameters above all) live on anyway; what the policy decides about is everything else.
    """
    saved = forward.graph.output_node().args[0][user_outputs:]  # type: ignore[index]
    roots = {memory_of(node) for node in saved if isinstance(node, fx.Node)}
    return sum(value_bytes(node.meta.get("val")) for node in roots if node.op != "placeholder")


class SavedBytes:
    """What each policy would save, worked out when someone asks.

    Keeps a copy of the joint graph, because partitioning changes the one it is given.
    """

    def __init__(self, joint: fx.GraphModule, inputs: Any, options: dict[str, Any]) -> None:
        self._joint = copy_module(joint)
        self._inputs = inputs
        self._options = options

    def under(self, policy: Remat) -> int:
        options = {k: v for k, v in self._options.items() if k != "static_lifetime_input_nodes"}
        with tracing(TracingContext(fake_mode_of(self._joint))):
            forward, _ = partitioner(policy)(copy_module(self._joint), self._inputs, **options)
        return saved_bytes(forward, self._options["num_fwd_outputs"])
