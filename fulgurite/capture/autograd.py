"""AOTAutograd: a captured graph → functional forward and backward graphs.

In: a captured graph, FakeTensor inputs, and a function that builds each functional graph. Out: a callable
that runs the built graphs inside AOTAutograd's runtime wrappers, which handle aliased inputs, saved
tensors, tensor subclasses and gradients. Input mutations are the last lines of a graph
(`input.copy_(new)`); where autograd must see them, the runtime wrapper does them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch._aot_autograd.descriptors import PlainAOTInput, PlainAOTOutput
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext

from fulgurite.capture.alias_offsets import restore_alias_offsets
from fulgurite.capture.bincount import BINCOUNT_DECOMPOSITIONS
from fulgurite.capture.double_backward import CapturedGraph, describe_obstacle
from fulgurite.capture.encoder_layer import ENCODER_LAYER_DECOMPOSITIONS
from fulgurite.capture.foreach import foreach_decompositions
from fulgurite.capture.input_aliasing import (
    Report,
    describe_shared_gradients,
    guard_input_aliasing,
)
from fulgurite.capture.strided_inputs import guard_strided_inputs
from fulgurite.capture.subclass_views import describe_lost_views
from fulgurite.capture.subclasses import specialize_subclass_contexts
from fulgurite.capture.training import (
    BoxedFunction,
    RunnableGraph,
    TrainingGraphs,
)
from fulgurite.capture.upsample import keep_upsampling_whole
from fulgurite.host_api import load_library
from fulgurite.trace.node_meta import example_value, graph_argument
from fulgurite.transforms.remat import Partition

BuildGraph = Callable[[fx.GraphModule], RunnableGraph]
OPAQUE_INPUTS = (
    "inputs in oneDNN's layout (to_mkldnn), whose memory can't be read; call to_dense before"
)
FUNCTIONAL_INPUTS = (
    "torch.func.functionalize, which is a graph break; the function itself gives the same results"
)


def run_aot_autograd(
    module: fx.GraphModule,
    captured: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    forward: BuildGraph,
    backward: BuildGraph,
    inference: BuildGraph,
    partition: Partition,
    report: Report,
    without_calls: fx.GraphModule | None = None,
) -> Callable[..., Any]:
    """Functionalize the graph, differentiate it if needed, and build each graph.

    captured        runs the graph op by op: for inputs that alias each other in another way than these,
                    or that are views of memory that the graph reads by its addresses
    report          is told why calls run as captured
    without_calls   the captured graph before its layers became calls, for gradients of gradients
    """
    reason = (
        _describe_inputs(inputs)
        or describe_lost_views(module)
        or describe_shared_gradients(module, inputs)
    )
    if reason is not None:
        report(reason)
        return captured
    functional: list[fx.GraphModule] = []  # the joint graph, or that of inference
    unwrapped: list[RunnableGraph] = []
    # autocast is part of the graph: the runtime wrapper disables it around the call
    autocast = torch._C._is_any_autocast_enabled()
    plain = without_calls or module
    again = CapturedGraph(plain.forward, describe_obstacle(plain, autocast))
    training = TrainingGraphs(torch.is_grad_enabled(), autocast, again)

    def split(joint: fx.GraphModule, joint_inputs: Any, **options: Any) -> Any:
        functional.append(joint)
        result = partition(joint, joint_inputs, **options)
        training.backward_module = result[1]
        return result

    def build_forward(graph: fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        training.read_signature(graph, inputs)
        training.forward = forward(graph)
        return restore_alias_offsets(graph, training.forward)

    def build_backward(graph: fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        return training.build_backward(graph, backward)

    def build_inference(graph: fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        functional.append(graph)
        run = inference(graph)
        if not autocast and can_skip_runtime_wrapper(graph, len(inputs)):
            unwrapped.append(run)
        return restore_alias_offsets(graph, run)

    backend = aot_autograd(
        fw_compiler=build_forward,
        bw_compiler=build_backward,
        inference_compiler=build_inference,
        partition_fn=split,
        decompositions={
            **foreach_decompositions(),
            **BINCOUNT_DECOMPOSITIONS,
            **ENCODER_LAYER_DECOMPOSITIONS,
        },
        keep_inference_input_mutations=True,  # an input mutation is a line of the trace
    )
    outputs = [example_value(node) for node in module.graph.output_node().all_input_nodes]
    with (
        _keep_scalar_tensors(module),
        keep_upsampling_whole(),
        specialize_subclass_contexts(outputs),
    ):
        wrapped = backend(module, inputs)
    result = call_without_wrapper(unwrapped[0]) if unwrapped else training.call(wrapped)
    for graph in functional:
        result = guard_strided_inputs(result, captured, inputs, graph, report)
    return guard_input_aliasing(result, captured, inputs, report) if _mutates_inputs() else result


def _describe_inputs(inputs: Sequence[Any]) -> str | None:
    """Why a graph runs as captured because of the kind of its inputs."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if any(x.layout is torch._mkldnn for x in tensors):
        return OPAQUE_INPUTS
    return FUNCTIONAL_INPUTS if any(map(torch._is_functional_tensor, tensors)) else None


def _mutates_inputs() -> bool:
    """Whether the graph that was just built mutates one of its inputs."""
    metadata = TracingContext.get().fw_metadata
    if metadata is None:
        return True
    return any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)


def can_skip_runtime_wrapper(graph: fx.GraphModule, inputs: int) -> bool:
    """Whether an inference graph takes the captured graph's inputs and returns its outputs unchanged.

    AOTAutograd's runtime wrapper (8 µs a call) then does nothing: no input is mutated, no output is a
    view of an input or of another output, and there are no tensor subclasses, effects or RNG states.
    """
    metadata = TracingContext.get().fw_metadata
    return (
        metadata is not None
        and _has_plain_signature(graph, inputs)
        and metadata.grad_enabled_mutation is None
        and not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
        and all(info.output_type is OutputType.non_alias for info in metadata.output_info)
        and not any(info.requires_grad or info.dynamic_dims for info in metadata.output_info)
        and all(_is_trusted_op(node) for node in graph.graph.nodes if node.op == "call_function")
    )


def _has_plain_signature(graph: fx.GraphModule, inputs: int) -> bool:
    """Whether the graph's inputs and outputs are the captured graph's, one by one.

    Others are the inner tensors of a subclass, the common base of several views, parameters of a
    module, effect tokens and RNG states. AOTAutograd describes each in `desc`. The metadata does not
    tell: for a graph with subclasses it is that of the inner tensors.
    """
    found = [node.meta.get("desc") for node in graph.graph.find_nodes(op="placeholder")]
    outputs = graph.graph.output_node().meta.get("desc", ())
    return found == [PlainAOTInput(k) for k in range(inputs)] and list(outputs) == [
        PlainAOTOutput(k) for k in range(len(outputs))
    ]


def _is_trusted_op(node: fx.Node) -> bool:
    """Whether the op is torch's or ours. The wrapper checks whether others return views of inputs."""
    return getattr(node.target, "namespace", "aten") in ("aten", "prims", "fulgurite")


def call_without_wrapper(graph: RunnableGraph) -> Callable[..., Any]:
    """An inference graph as TorchDynamo calls it, run without gradient recording."""
    library = load_library()
    if library is not None:  # the same in native code
        return library.make_callable("call_graph", (graph,))  # type: ignore[no-any-return]

    def call(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return graph.run([*inputs])
        torch._C._set_grad_enabled(False)  # torch.no_grad() itself takes 1.5 µs
        try:
            return graph.run([*inputs])
        finally:
            torch._C._set_grad_enabled(True)

    return call


@contextmanager
def _keep_scalar_tensors(module: fx.GraphModule) -> Iterator[None]:
    """Keep AOTAutograd from treating the user's 0-dim float64 tensors as Python floats.

    TorchDynamo passes a changing Python float as a 0-dim float64 tensor. AOTAutograd requests a second
    capture without those it could not use. It can't tell such a tensor from the user's own, and the
    second capture then drops in-place writes to it (as with aot_eager). Symbols already listed for
    specialization request no second capture. They are removed again afterwards, so that a second
    capture for a real Python float is not affected.
    """
    names = _scalar_tensor_symbols(module) - TensorifyState.force_specializations
    TensorifyState.force_specializations |= names
    try:
        yield
    finally:
        TensorifyState.force_specializations -= names


def _scalar_tensor_symbols(module: fx.GraphModule) -> set[str]:
    """Symbols of the values of the user's own 0-dim float64 tensors."""
    names = set()
    for node in module.graph.find_nodes(op="placeholder"):
        source = graph_argument(node)
        memo = getattr(example_value(node), "item_memo", None)
        if source is not None and memo is not None and not source.pass_arg_as_tensor:
            names.add(str(memo.node._expr))  # the symbol itself, not its replacement
    return names
