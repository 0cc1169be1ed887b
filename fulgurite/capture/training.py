"""Training graphs called through a small autograd function instead of AOTAutograd's runtime wrappers.

In: a forward and a backward graph as AOTAutograd made them, and its metadata. Out: a callable that runs
them. AOTAutograd's wrappers (25 µs forward, 30 µs backward) serve any graph: they rebuild views, copy
into mutated inputs, wrap tensor subclasses, pass effect tokens and RNG states. `read_signature` decides
from the metadata that nothing of this is needed; all other graphs keep the wrappers.

AOTAutograd builds the backward graph when it is first needed. Until then, and for the first call, its own
function runs.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._C import (
    _are_functorch_transforms_active,
    _DisableAutocast,
    _is_any_autocast_enabled,
)
from torch._functorch._aot_autograd import runtime_wrappers
from torch._guards import TracingContext
from torch.autograd import Function

from fulgurite.capture.batched_backward import is_inside_vmap, run_captured_backward
from fulgurite.capture.double_backward import (
    CallInputs,
    CapturedGraph,
    read_versions,
    run_differentiable,
)
from fulgurite.capture.training_native import make_native_backward, make_native_forward
from fulgurite.capture.training_signature import Tangent, TrainingSignature, read_signature
from fulgurite.capture.unused_outputs import BackwardGraphs, find_missing
from fulgurite.host_api import load_library, make_unsafe_view

BoxedFunction = Callable[[list[Any]], Any]

_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph  # retain_graph or create_graph


class RunnableGraph(Protocol):
    """A built graph. `run` is read at every call, because an edited trace may replace it."""

    run: BoxedFunction

    def __call__(self, inputs: list[Any]) -> Any: ...


@dataclass
class TrainingGraphs:
    """The graphs of one training function, filled in while AOTAutograd builds them."""

    grad_enabled: bool  # whether gradients were recorded outside of the graph at capture
    autocast: bool  # autocast is part of the graphs: it is disabled while they run
    captured: CapturedGraph  # what double backward differentiates
    backward_module: fx.GraphModule | None = None  # as partitioned, before it is built
    signature: TrainingSignature | None = None
    forward: RunnableGraph | None = None
    backward: RunnableGraph | None = None  # with all tangents; built when it is first needed
    backward_graphs: BackwardGraphs | None = None  # without the tangents that have no gradient
    missing: tuple[
        int, ...
    ] = ()  # tangents without a gradient in the call that builds the first graph

    def read_signature(self, forward: fx.GraphModule, inputs: Sequence[Any]) -> None:
        metadata = TracingContext.get().fw_metadata
        if metadata is not None:
            # no backward graph overwrites what forward saved, so backward may run twice (retain_graph)
            metadata.bw_donated_idxs = []
            if any(info.mutates_data for info in metadata.input_info):
                self.captured = replace(self.captured, reason="it writes one of its inputs")
        if self.backward_module is not None and metadata is not None and self.grad_enabled:
            self.signature = read_signature(forward, self.backward_module, metadata, inputs)
        self.backward_module = None

    def build_backward(
        self, module: fx.GraphModule, build: Callable[[fx.GraphModule], RunnableGraph]
    ) -> Callable[[list[Any]], Any]:
        """Build the backward graph that is needed now. AOTAutograd calls the result."""
        if self.signature is None or not self.signature.may_miss_gradients:
            self.backward = build(module)
            return self.backward
        self.backward_graphs = BackwardGraphs(module, len(self.signature.tangents), build)
        self.find_backward(self.missing)
        return self.backward_graphs

    def find_backward(self, missing: tuple[int, ...]) -> RunnableGraph | None:
        """The backward graph without these tangents; None before AOTAutograd has built one."""
        if self.backward_graphs is None:
            self.missing = missing
            return self.backward
        graph: RunnableGraph = self.backward_graphs.find(missing)
        if not missing:
            self.backward = graph
        return graph

    def call(self, wrapped: Callable[..., Any]) -> Callable[..., Any]:
        """The graph as TorchDynamo calls it; `wrapped` is the graph inside AOTAutograd's wrappers."""
        if self.signature is None:
            return wrapped
        return call_training_graph(self, self.signature, wrapped)


def call_training_graph(
    graphs: TrainingGraphs, signature: TrainingSignature, wrapped: Callable[..., Any]
) -> Callable[..., Any]:
    """A training graph as TorchDynamo calls it.

    wrapped   the graph inside AOTAutograd's wrappers. It runs the first call, which tells where
              AOTAutograd builds the backward graph, and calls inside functorch transforms.
    """
    cell: list[Callable[..., Any] | None] = [None]  # after the first call: `apply` of our function

    def call(*inputs: Any) -> Any:
        apply = cell[0]
        if apply is not None and torch.is_grad_enabled() and not _are_functorch_transforms_active():
            return apply(*inputs)
        kept = CallInputs.of(graphs.captured, inputs)
        results = wrapped(*inputs)
        if not any(_is_functorch_tensor(value) for value in inputs):
            node = find_aot_node(results)
            if node is not None:
                node.call_inputs = kept
                node.materialize_grads = not signature.may_miss_gradients
                function = type(node)._forward_cls
                if apply is None:
                    extend_aot_backward(graphs, signature.tangents, function)
                    cell[0] = make_function(graphs, signature, function._backward_impl)
        return results

    library = load_library()
    return call if library is None else library.make_callable("call_training", (cell, call))


def extend_aot_backward(graphs: TrainingGraphs, tangents: Sequence[Tangent], function: Any) -> None:
    """Let AOTAutograd's autograd function, which runs the first call, do what `backward` below does.

    It takes batched gradients, outputs without a gradient, and is differentiable. AOTAutograd's own hook for
    the last is not called if neither gradients nor saved tensors require gradients (torch 2.11).
    """
    run_aot: Callable[..., Any] = function.backward
    outputs = [tangent.output for tangent in tangents]

    def backward(ctx: Any, *gradients: Any) -> Any:
        is_boxed = len(gradients) == 1 and type(gradients[0]) is list
        given = gradients[0] if is_boxed else gradients
        found = [given[k] for k in outputs]
        missing = find_missing(found)
        if is_inside_vmap():
            return run_captured_backward(ctx.call_inputs, outputs, given)
        run = partial(run_without, ctx, given, missing) if missing else partial(run_aot, ctx)
        if not torch.is_grad_enabled():
            del found, given
            return run(*gradients)
        taken = [k for k, gradient in zip(outputs, found, strict=True) if gradient is not None]
        values = [gradient for gradient in found if gradient is not None]
        return run_differentiable(ctx.call_inputs, partial(run, *gradients), taken, values)

    def run_without(ctx: Any, given: Any, missing: tuple[int, ...], *_: Any) -> tuple[Any, ...]:
        if len(missing) == len(outputs):
            return (None,) * len(ctx.needs_input_grad)
        values = [coerce_gradient(tangent, given[tangent.output]) for tangent in tangents]
        graphs.find_backward(missing)
        return tuple(function._backward_impl(ctx, [*ctx.symints, *ctx.saved_tensors, *values]))

    function.backward = staticmethod(backward)


def coerce_gradient(tangent: Tangent, gradient: Any) -> Any:
    """The gradient in the layout that the backward graph was traced with. Autograd has checked the rest."""
    if type(gradient) is Tensor and gradient.stride() == tangent.stride:
        return gradient
    return gradient if gradient is None else tangent.coerce(gradient)


def _is_functorch_tensor(value: Any) -> bool:
    """Whether a tensor is one of functorch's wrappers, left over from a transform that has ended."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def find_aot_node(results: Sequence[Any]) -> Any:
    """The autograd node of AOTAutograd's function, whose `_backward_impl` (ctx, arguments) → gradients
    builds the backward graph if needed; None if no result has one.
    """
    for value in results:
        node = value.grad_fn if isinstance(value, Tensor) else None
        function = getattr(type(node), "_forward_cls", None)
        if hasattr(function, "_aot_id") and hasattr(function, "_backward_impl"):
            return node
    return None


def make_function(
    graphs: TrainingGraphs, signature: TrainingSignature, run_aot_backward: Callable[..., Any]
) -> Callable[..., Any]:
    """The `apply` of an autograd function that runs the graphs."""
    forward_graph = graphs.forward
    assert forward_graph is not None, "the forward graph is built before it is called"
    first_saved, num_sizes = signature.num_outputs, signature.num_sizes
    non_differentiable, unsafe_views = signature.non_differentiable, signature.unsafe_views
    keeps_inputs = not graphs.captured.reason
    tangents, materializes = signature.tangents, not signature.may_miss_gradients
    autocast = graphs.autocast
    forbids_deterministic = signature.forbids_deterministic

    captured, taken = graphs.captured, [tangent.output for tangent in signature.tangents]

    def forward(ctx: Any, *inputs: Any) -> tuple[Any, ...]:
        ctx.set_materialize_grads(materializes)
        if keeps_inputs:
            ctx.call_inputs = (inputs, read_versions(inputs))
        results = forward_graph.run([*inputs])
        saved = results[first_saved:-num_sizes] if num_sizes else results[first_saved:]
        # a saved view keeps its base's autograd graph alive; its version counter is shared either way
        ctx.save_for_backward(*[x.detach() if x._is_view() else x for x in saved])
        if num_sizes:
            ctx.sizes = results[-num_sizes:]
        outputs = results[:first_saved]
        if unsafe_views:
            outputs = list(outputs)
            for k in unsafe_views:
                outputs[k] = make_unsafe_view(outputs[k])
        if non_differentiable:
            ctx.mark_non_differentiable(
                *[outputs[k] for k in non_differentiable if isinstance(outputs[k], Tensor)]
            )
            ctx._materialize_non_diff_grads = False
        return tuple(outputs)

    def backward(ctx: Any, *gradients: Any) -> Any:
        # newer versions of torch pass a list, which is cleared to free the gradients early
        boxed = gradients[0] if len(gradients) == 1 and type(gradients[0]) is list else None
        given = gradients if boxed is None else boxed
        del gradients
        if is_inside_vmap():
            return run_captured_backward(CallInputs(captured, *ctx.call_inputs), taken, given)
        found = [coerce_gradient(tangent, given[tangent.output]) for tangent in tangents]
        if boxed is not None:
            boxed.clear()
        del given
        missing = find_missing(found)
        if len(missing) == len(tangents):
            return (None,) * len(ctx.needs_input_grad)
        arguments = [*ctx.sizes, *ctx.saved_tensors] if num_sizes else [*ctx.saved_tensors]
        arguments += found
        del found
        _check_backward_state(forbids_deterministic)
        call_inputs = ctx.call_inputs
        if not _keeps_graph():
            ctx.call_inputs = None
        if torch.is_grad_enabled():
            first = len(arguments) - len(tangents)
            known = [k for k in range(len(tangents)) if k not in missing]
            outputs = [taken[k] for k in known]
            call = CallInputs(captured, *call_inputs)
            run = partial(run_backward, ctx, arguments, missing)
            return run_differentiable(call, run, outputs, [arguments[first + k] for k in known])
        return run_in_context(run_backward, ctx, arguments, missing)

    def run_backward(ctx: Any, arguments: list[Any], missing: tuple[int, ...]) -> tuple[Any, ...]:
        graph = graphs.find_backward(missing) if missing else graphs.backward
        if graph is None:
            graph = graphs.find_backward(missing)
        if graph is None:  # AOTAutograd builds it now
            return tuple(run_aot_backward(ctx, arguments))
        ctx.maybe_clear_saved_tensors()
        if missing:
            arguments = [value for value in arguments if value is not None]
        if autocast or _is_any_autocast_enabled():
            with _DisableAutocast():
                return tuple(graph.run(arguments))
        return tuple(graph.run(arguments))

    run_forward = make_native_forward(forward_graph, graphs, signature) or forward
    members = {
        "forward": staticmethod(without_autocast(run_forward) if autocast else run_forward),
        "backward": staticmethod(backward),
        "boxed_grads_call": True,
    }
    function = type("CompiledFunction", (Function,), members)
    node_class: Any = function._backward_cls  # type: ignore[attr-defined]
    node_class.call_inputs = ((), ())  # if they are not kept
    native = make_native_backward(graphs, signature, backward)
    if native is not None:
        node_class.apply = node_class.apply_boxed = native
    # without `Function.apply`, which looks for functorch transforms and leftovers of them (3 µs)
    apply = super(Function, function).apply  # type: ignore[misc]
    return mark_dynamic_outputs(prepare_inputs(apply, signature), signature)


def without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with autocast disabled: it is part of the graph."""

    def run(*inputs: Any) -> Any:
        with _DisableAutocast():
            return function(*inputs)

    return run


def mark_dynamic_outputs(
    apply: Callable[..., Any], signature: TrainingSignature
) -> Callable[..., Any]:
    """`apply`, with marks on symbolic dimensions of outputs: a next graph takes them as symbolic."""
    if not signature.dynamic_dims:
        return apply

    def call(*inputs: Any) -> Any:
        results = apply(*inputs)
        for k, dims in signature.dynamic_dims:
            _mark_dynamic(results[k], dims)
        return results

    return call


MARKERS = ("mark_dynamo_propagated_dynamic_indices", "maybe_mark_dynamic_helper")  # before 2.13
_mark_dynamic: Callable[[Tensor, set[int]], None] = next(
    getattr(runtime_wrappers, name) for name in MARKERS if hasattr(runtime_wrappers, name)
)


def prepare_inputs(apply: Callable[..., Any], signature: TrainingSignature) -> Callable[..., Any]:
    """`apply`, with detached inputs and incremented versions where the graph needs them."""
    detached, written = signature.detached_inputs, signature.written_inputs
    if not detached and not written:
        return apply

    def call(*inputs: Any) -> Any:
        values = [*inputs]
        for k in detached:
            values[k] = values[k].detach()
        if written:
            torch.autograd.graph.increment_version([values[k] for k in written])
        return apply(*values)

    return call


def run_in_context(run: Callable[..., Any], *arguments: Any) -> Any:
    """Run with the context variables of the thread that called backward; devices have their own."""
    if torch._C._is_key_in_tls("context"):
        context: contextvars.Context | None = torch._C._get_obj_in_tls("context")
        if context is not None:  # a copy: two devices' threads may run at the same time
            return context.copy().run(run, *arguments)
    return run(*arguments)


def _check_backward_state(forbids_deterministic: bool) -> None:
    """Raise AOTAutograd's error for backward under newly deterministic algorithms."""
    if forbids_deterministic and torch.are_deterministic_algorithms_enabled():
        raise RuntimeError(
            "This compiled backward function is being run with "
            "torch.use_deterministic_algorithms(True), but it was previously generated during the "
            "forward function while torch.use_deterministic_algorithms(False) was set."
        )
