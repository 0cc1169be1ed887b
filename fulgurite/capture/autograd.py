"""AOTAutograd: a captured graph → functional forward and backward graphs.

In: a captured graph, FakeTensor inputs, and a function that builds each functional graph. Out: a callable
that runs the built graphs inside AOTAutograd's runtime wrappers, which handle aliased inputs, saved
tensors, tensor subclasses and gradients. Input mutations are the last lines of a graph
(`input.copy_(new)`); where autograd must see them, the runtime wrapper does them instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta
from torch._guards import TracingContext

from fulgurite.capture.input_aliasing import guard_input_aliasing
from fulgurite.trace.node_meta import example_value, graph_argument
from fulgurite.transforms.remat import Partition

BoxedFunction = Callable[[list[Any]], Any]


class RunnableGraph(Protocol):
    """A built graph. `run` is read at every call, because an edited trace may replace it."""

    run: BoxedFunction

    def __call__(self, inputs: list[Any]) -> Any: ...


BuildGraph = Callable[[fx.GraphModule], RunnableGraph]


def run_aot_autograd(
    module: fx.GraphModule,
    captured: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    forward: BuildGraph,
    backward: BuildGraph,
    inference: BuildGraph,
    partition: Partition,
) -> Callable[..., Any]:
    """Functionalize the graph, differentiate it if needed, and build each graph.

    captured   runs the graph op by op: for inputs that alias each other in another way than these
    """

    unwrapped: list[RunnableGraph] = []
    # autocast is part of the graph: the runtime wrapper disables it around the call
    autocast = torch._C._is_any_autocast_enabled()

    def make_compiler(
        build: BuildGraph,
    ) -> Callable[[fx.GraphModule, Sequence[Any]], BoxedFunction]:
        return lambda graph, _: build(graph)

    def build_inference(graph: fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        run = inference(graph)
        if not autocast and can_skip_runtime_wrapper(module, graph, len(inputs)):
            unwrapped.append(run)
        return run

    backend = aot_autograd(
        fw_compiler=make_compiler(forward),
        bw_compiler=make_compiler(backward),
        inference_compiler=build_inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,  # an input mutation is a line of the trace
    )
    with _keep_scalar_tensors(module):
        wrapped = backend(module, inputs)
    if unwrapped:
        return call_without_wrapper(unwrapped[0])
    return guard_input_aliasing(wrapped, captured, inputs) if _mutates_inputs() else wrapped


def _mutates_inputs() -> bool:
    """Whether the graph that was just built mutates one of its inputs."""
    metadata = TracingContext.get().fw_metadata
    if metadata is None:
        return True
    return any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)


def can_skip_runtime_wrapper(captured: fx.GraphModule, graph: fx.GraphModule, inputs: int) -> bool:
    """Whether an inference graph takes the captured graph's inputs and returns its outputs unchanged.

    AOTAutograd's runtime wrapper (8 µs a call) then does nothing: no input is mutated, no output is a
    view of an input or of another output, and there are no tensor subclasses, effects or RNG states.
    """
    metadata = TracingContext.get().fw_metadata
    if metadata is None:
        return False
    if any(True for _ in captured.parameters()) or any(True for _ in captured.buffers()):
        return False  # the wrapper passes these before the inputs
    if len(graph.graph.find_nodes(op="placeholder")) != inputs:
        return False  # a duplicate input, or the common base of several inputs
    if metadata.tokens or metadata.num_graphsafe_rng_states or metadata.num_intermediate_bases:
        return False
    if metadata.grad_enabled_mutation is not None:
        return False
    metas = [*metadata.subclass_inp_meta, *metadata.subclass_fw_graph_out_meta]
    return (
        not any(info.mutates_data or info.mutates_metadata for info in metadata.input_info)
        and all(info.output_type is OutputType.non_alias for info in metadata.output_info)
        and not any(info.requires_grad or info.dynamic_dims for info in metadata.output_info)
        and all(isinstance(meta, PlainTensorMeta) for meta in metas)
        and all(_is_trusted_op(node) for node in graph.graph.nodes if node.op == "call_function")
    )


def _is_trusted_op(node: fx.Node) -> bool:
    """Whether the op is torch's or ours. The wrapper checks whether others return views of inputs."""
    return getattr(node.target, "namespace", "aten") in ("aten", "prims", "fulgurite")


def call_without_wrapper(graph: RunnableGraph) -> Callable[..., Any]:
    """An inference graph as TorchDynamo calls it, run without gradient recording."""

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
