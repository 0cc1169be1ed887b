"""The way through AOTAutograd.

In: a captured graph, FakeTensor inputs, and what to do with each functional graph. Out: a callable that runs
them with everything around: aliases of inputs, saved tensors, subclasses, gradients. Writes to inputs are the last
lines of a graph (`input.copy_(new)`) where autograd has no part in them, and done around it where it has.
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

from fulgurite.capture.overlap import as_captured
from fulgurite.transforms.remat import Partition

BoxedFunction = Callable[[list[Any]], Any]


class Program(Protocol):
    """A built graph. `run` is what runs now: an edited trace may take its place."""

    run: BoxedFunction

    def __call__(self, inputs: list[Any]) -> Any: ...


Build = Callable[[fx.GraphModule], Program]


def differentiate(
    module: fx.GraphModule,
    captured: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    forward: Build,
    backward: Build,
    inference: Build,
    partition: Partition,
) -> Callable[..., Any]:
    """Functionalize, derive backward where it is needed, and build each graph.

    captured   runs the graph op by op: for inputs that share memory in another way than these
    """

    plain: list[Program] = []
    autocast = (
        torch._C._is_any_autocast_enabled()
    )  # is part of the graph, and is to be off around it

    def builder(build: Build) -> Callable[[fx.GraphModule, Sequence[Any]], BoxedFunction]:
        return lambda graph, _: build(graph)

    def build_inference(graph: fx.GraphModule, _: Sequence[Any]) -> BoxedFunction:
        run = inference(graph)
        if not autocast and needs_nothing_around(module, graph, len(inputs)):
            plain.append(run)
        return run

    backend = aot_autograd(
        fw_compiler=builder(forward),
        bw_compiler=builder(backward),
        inference_compiler=build_inference,
        partition_fn=partition,
        keep_inference_input_mutations=True,  # `input.copy_(new)` is a line of the trace
    )
    with _scalar_tensors_stay(module):
        around = backend(module, inputs)
    if plain:
        return directly(plain[0])
    return as_captured(around, captured, inputs) if _writes() else around


def _writes() -> bool:
    """Whether the graph that was just built writes to one of its inputs."""
    facts = TracingContext.get().fw_metadata
    return facts is None or any(i.mutates_data or i.mutates_metadata for i in facts.input_info)


def needs_nothing_around(captured: fx.GraphModule, graph: fx.GraphModule, inputs: int) -> bool:
    """Whether a graph for inference takes the captured graph's inputs and gives its results as they are.

    Then what AOTAutograd would do around each call (8 µs of it) comes to nothing: no input is written, no result
    is a view of an input or of another result, there are no tensor subclasses, effects or random states.
    """
    facts = TracingContext.get().fw_metadata
    if facts is None:
        return False
    if any(True for _ in captured.parameters()) or any(True for _ in captured.buffers()):
        return False  # it puts these in front of the inputs
    if len(graph.graph.find_nodes(op="placeholder")) != inputs:
        return False  # an input that was given twice, or the base of several
    if facts.tokens or facts.num_graphsafe_rng_states or facts.num_intermediate_bases:
        return False
    if facts.grad_enabled_mutation is not None:
        return False
    metas = [*facts.subclass_inp_meta, *facts.subclass_fw_graph_out_meta]
    return (
        not any(info.mutates_data or info.mutates_metadata for info in facts.input_info)
        and all(info.output_type is OutputType.non_alias for info in facts.output_info)
        and not any(info.requires_grad or info.dynamic_dims for info in facts.output_info)
        and all(isinstance(meta, PlainTensorMeta) for meta in metas)
        and all(_is_known(node) for node in graph.graph.nodes if node.op == "call_function")
    )


def _is_known(node: fx.Node) -> bool:
    """Not an operator of others: the first call of those is checked for results that are views of inputs."""
    return getattr(node.target, "namespace", "aten") in ("aten", "prims", "fulgurite")


def directly(program: Program) -> Callable[..., Any]:
    """A graph for inference as TorchDynamo calls it; gradients are not kept inside."""

    def call(*inputs: Any) -> Any:
        if not torch.is_grad_enabled():
            return program.run([*inputs])
        torch._C._set_grad_enabled(False)  # torch.no_grad() itself takes 1.5 µs
        try:
            return program.run([*inputs])
        finally:
            torch._C._set_grad_enabled(True)

    return call


@contextmanager
def _scalar_tensors_stay(module: fx.GraphModule) -> Iterator[None]:
    """Keep AOTAutograd from taking the user's 0-dim float64 tensors for Python floats.

    Dynamo passes a changing Python float as a 0-dim float64 tensor, and AOTAutograd asks for a second capture
    without those it could not use. It can't tell such a tensor from a user's own, and the second capture then
    drops in-place writes to it (as under aot_eager). Names that are down for specialization already ask for no
    second capture; taken back afterwards, they change nothing in one that a real Python float asks for.
    """
    names = _scalar_tensor_symbols(module) - TensorifyState.force_specializations
    TensorifyState.force_specializations |= names
    try:
        yield
    finally:
        TensorifyState.force_specializations -= names


def _scalar_tensor_symbols(module: fx.GraphModule) -> set[str]:
    """The symbols by which torch knows the values of 0-dim float64 tensors that are the user's own."""
    names = set()
    for node in module.graph.find_nodes(op="placeholder"):
        source = node.meta.get("grapharg")
        memo = getattr(node.meta.get("example_value"), "item_memo", None)
        if source is not None and memo is not None and not source.pass_arg_as_tensor:
            names.add(str(memo.node._expr))  # the symbol itself, not what it was found equal to
    return names
