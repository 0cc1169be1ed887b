"""Rematerialization: which values forward saves for backward, and which backward recomputes.

In: the joint graph of forward and backward from AOTAutograd. Out: the two graphs. Policies:

    none     save everything that backward reads; recompute nothing
    mincut   torch's min-cut partitioner: recompute cheap ops to save the fewest bytes
    full     save the inputs only; backward runs forward again (checkpointing of the whole graph)

Values that are compared for equality are never recomputed: `amax` gives its gradient to the elements that
equal the result, and a recomputed one may differ in its last bit.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing

from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.trace.cost import is_view, value_bytes, view_base
from fulgurite.trace.metadata import find_fake_mode
from fulgurite.trace.mutations import mutated_inputs
from fulgurite.trace.node_meta import (
    fake_value,
    is_in_backward,
    mark_must_recompute,
    mark_must_save,
    set_fake_value,
    set_saved_for_backward,
)
from fulgurite.trace.subgraph import is_subgraph_result
from fulgurite.trace.trace import copy_module
from fulgurite.transforms.attention_masks import fold_masks_in_graph
from fulgurite.transforms.conv_training import use_channels_last
from fulgurite.transforms.cross_entropy import recompute_log_softmax_in_backward
from fulgurite.transforms.max_pool import use_int8_offsets
from fulgurite.transforms.relu_backward import recompute_relu_masks
from fulgurite.transforms.simplify import merge_subexpressions_in_graph

aten = torch.ops.aten
Remat = Literal["none", "mincut", "full"]
REMAT_POLICIES = get_args(Remat)
Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
# operators whose results are elements of their input, or exact functions of them
UNROUNDED = frozenset(
    {
        *(aten.abs.default, aten.neg.default, aten.clone.default, aten.detach.default),
        *(aten.amax.default, aten.amin.default, aten.aminmax.default),
        *(aten.max.default, aten.max.dim, aten.min.default, aten.min.dim),
    }
)


def make_partitioner(policy: Remat) -> Partition:
    """The partition function of a policy, in the form AOTAutograd calls."""

    def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        merge_subexpressions_in_graph(joint.graph)
        fold_masks_in_graph(joint.graph)
        _recompute_casts(joint.graph)
        _drop_running_statistics(joint.graph)
        if policy != "none":  # these recompute, if only from tensors that are read anyway
            recompute_relu_masks(joint)
        use_channels_last(joint)
        use_int8_offsets(joint)
        if policy != "none":
            recompute_log_softmax_in_backward(joint)
        if policy == "full":
            _recompute_forward(joint.graph)
        if policy != "none":
            _save_compared_values(joint.graph)
        forward, backward = _split_joint_graph(policy, joint, inputs, options)
        _clone_overwritten_inputs(forward, options["num_fwd_outputs"])
        _mark_saved_tensors(forward, backward, options["num_fwd_outputs"])
        return forward, backward

    return partition


def _split_joint_graph(
    policy: Remat, joint: fx.GraphModule, inputs: Any, options: dict[str, Any]
) -> Any:
    if policy == "none":
        return default_partition(joint, inputs, **options)
    with functorch_config.patch(
        cse=False,  # torch's own CSE imports all of Inductor, which takes a second
        # recompute activations that a backward matmul reads, too: the kernel of the activation's
        # gradient, which runs anyway, writes them; this saves a quarter less
        ban_recompute_materialized_backward=False,
    ):
        return min_cut_rematerialization_partition(joint, inputs, **options)


def _recompute_casts(graph: fx.Graph) -> None:
    """Keep quantizing casts of backward, mostly of weights, in backward.

    They depend on no gradient, so torch's partitioner would move them to forward and save them.
    """
    for node in graph.nodes:
        cast = node.args[0] if node.target is operator.getitem else node
        if not isinstance(cast, fx.Node) or cast.target is not quantize_op.overload:
            continue
        if is_in_backward(cast):
            mark_must_recompute(node, keep_checkpoint=True)


def _save_compared_values(graph: fx.Graph) -> None:
    """Save both values of forward that are compared for equality, not one of them.

    Not one of several results of an operator: torch can't be told to save it. By itself it recomputes no such
    operator; with the policy `full`, both values are recomputed.
    """
    for target in (aten.eq.Tensor, aten.ne.Tensor):
        for comparison in graph.find_nodes(op="call_function", target=target):
            operands = comparison.all_input_nodes
            sources = [_find_rounded_value(node) for node in operands]
            if not all(fake_value(node).is_floating_point() for node in operands):
                continue
            if all(source.target is not operator.getitem for source in sources):
                for source in sources:
                    if source.op == "call_function" and not is_in_backward(source):
                        mark_must_save(source)


def _find_rounded_value(node: fx.Node) -> fx.Node:
    """The operator whose result a value is, by operators that don't round."""
    while True:
        operation = node.all_input_nodes[0] if node.target is operator.getitem else node
        is_one_of_several = operation is not node and operation.target not in UNROUNDED
        if is_one_of_several or not (is_view(node) or node.target in UNROUNDED):
            return node
        node = operation.all_input_nodes[0]


def _drop_running_statistics(graph: fx.Graph) -> None:
    """Drop the running statistics from batch-norm backward, which does not read them in training."""
    for target, position in (
        (aten.native_batch_norm_backward.default, 7),
        (aten.batch_norm_backward.default, 7),
    ):
        for node in graph.find_nodes(op="call_function", target=target):
            if len(node.args) > position and node.args[position] is True:
                node.args = (*node.args[:3], None, None, *node.args[5:])


def _clone_overwritten_inputs(forward: fx.GraphModule, user_outputs: int) -> None:
    """Save a clone of an input that backward reads, if forward mutates it."""
    graph = forward.graph
    overwritten = {target for node in graph.nodes for target in mutated_inputs(node)}
    overwritten |= _inputs_written_after_forward(graph)
    if not overwritten:
        return
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    copies: dict[fx.Node, fx.Node] = {}
    for position, node in enumerate(results[user_outputs:], user_outputs):
        if not isinstance(node, fx.Node) or view_base(node) not in overwritten:
            continue
        if node not in copies:
            with graph.inserting_after(node):
                copies[node] = graph.call_function(aten.clone.default, (node,))
            set_fake_value(copies[node], fake_value(node).clone())
        results[position] = copies[node]
    output.args = (type(output.args[0])(results),)  # type: ignore[call-arg,arg-type]
    forward.recompile()


def _inputs_written_after_forward(graph: fx.Graph) -> set[fx.Node]:
    """Inputs that AOTAutograd's wrapper writes, because autograd must see it: outputs are their values."""
    described = graph.output_node().meta.get("desc", ())
    written = [one.mutated_input for one in described if isinstance(one, InputMutationAOTOutput)]
    inputs = graph.find_nodes(op="placeholder")
    return {node for node in inputs if node.meta.get("desc") in written}


def _mark_saved_tensors(
    forward: fx.GraphModule, backward: fx.GraphModule, user_outputs: int
) -> None:
    """Mark the inputs of backward that it may free: computed by forward and not returned to the user."""
    results = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
    returned = {view_base(n) for n in results[:user_outputs] if isinstance(n, fx.Node)}
    candidates = [n for n in results[user_outputs:] if isinstance(n, fx.Node)]
    saved = {n.name for n in candidates if view_base(n) not in returned and not _is_input(n)}
    for node in backward.graph.find_nodes(op="placeholder"):
        set_saved_for_backward(node, node.name in saved)


def _is_input(node: fx.Node) -> bool:
    return view_base(node).op in ("placeholder", "get_attr")


def _recompute_forward(graph: fx.Graph) -> None:
    """Mark all of forward as checkpointed. Random ops then replay their draws."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(source in backward for source in node.all_input_nodes):
            backward.add(node)
        elif is_subgraph_result(node):
            continue  # the layer's own backward recomputes it
        elif node.op == "call_function" and not mutated_inputs(node):
            mark_must_recompute(node)


def count_saved_bytes(forward: fx.GraphModule, user_outputs: int) -> int:
    """Bytes that stay allocated between forward and backward, without the graph's inputs.

    Inputs (mostly parameters) stay allocated anyway; the policy decides about everything else.
    """
    saved = forward.graph.output_node().args[0][user_outputs:]  # type: ignore[index]
    roots = {view_base(node) for node in saved if isinstance(node, fx.Node)}
    return sum(value_bytes(fake_value(node)) for node in roots if node.op != "placeholder")


class SavedBytes:
    """Bytes that each policy would save for backward, computed on request.

    Holds a copy of the joint graph, because partitioning modifies its input.
    """

    def __init__(self, joint: fx.GraphModule, inputs: Any, options: dict[str, Any]) -> None:
        self._joint = copy_module(joint)
        self._inputs = inputs
        self._options = options

    def for_policy(self, policy: Remat) -> int:
        options = {k: v for k, v in self._options.items() if k != "static_lifetime_input_nodes"}
        with tracing(TracingContext(find_fake_mode(self._joint))):
            forward, _ = make_partitioner(policy)(copy_module(self._joint), self._inputs, **options)
        return count_saved_bytes(forward, self._options["num_fwd_outputs"])
