"""The op that AOTAutograd traces for a call of an outlined layer.

In: the functional graphs of one layer (`LayerGraphs`) and its inputs. Out: one node in the model's
forward graph and one in its backward graph, whatever the size of the layer. The layer itself was
functionalized, differentiated and partitioned once, by `capture/layer_graphs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, track_tensor_tree

from fulgurite.trace.node_meta import fake_value
from fulgurite.trace.subgraph import SubgraphCall


class ViewStep(NamedTuple):
    """One view op on the way from a tensor to a view of it. `args` lacks the tensor itself."""

    op: Any
    args: tuple[Any, ...]


class Result(NamedTuple):
    """A value in terms of a call: an input or a result of the sub-graph, then views of it."""

    is_input: bool
    position: int
    views: tuple[ViewStep, ...] = ()

    def get(self, inputs: Sequence[Any], results: Sequence[Any]) -> Any:
        value = (inputs if self.is_input else results)[self.position]
        for op, args in self.views:
            value = op(value, *args)
        return value


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """One functional graph of a layer: its call, and the layer's values in terms of the call."""

    call: SubgraphCall
    results: tuple[Result | None, ...]  # None: a gradient that does not exist

    def __call__(self, *inputs: Any) -> list[Any]:
        computed = call_subgraph(self.call, *inputs)
        return [None if r is None else r.get(inputs, computed) for r in self.results]


@dataclass(frozen=True, eq=False)
class LayerGraphs:
    """The functional graphs of a layer: one for inference, or forward and backward.

    A training forward returns the layer's `num_outputs` outputs, then the saved values. Backward takes
    saved sizes, saved tensors and the gradients of the outputs at `differentiable`.
    """

    forward: LayerGraph
    num_outputs: int
    backward: LayerGraph | None = None
    saved_sizes: tuple[Any, ...] = ()
    differentiable: tuple[int, ...] = ()
    tangents: tuple[Tensor, ...] = ()  # fake tensors: the layouts that backward was traced with

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Call the layer; with gradients if an input needs one and the layer has any."""
        tensors = [value for value in inputs if isinstance(value, Tensor)]
        needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if needs_gradient and self.backward is not None:
            return _DifferentiableCall.apply(self, *inputs)  # type: ignore[no-any-return,no-untyped-call]
        return tuple(self.forward(*inputs)[: self.num_outputs])


class _DifferentiableCall(torch.autograd.Function):
    """Runs a layer's forward and backward graphs inside autograd."""

    @staticmethod
    def forward(ctx: Any, layer: LayerGraphs, *inputs: Any) -> Any:
        results = layer.forward(*inputs)
        outputs = results[: layer.num_outputs]
        ctx.layer = layer
        ctx.save_for_backward(*results[layer.num_outputs :])
        ctx.mark_non_differentiable(
            *(v for k, v in enumerate(outputs) if k not in layer.differentiable)
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        layer: LayerGraphs = ctx.layer
        assert layer.backward is not None, "forward checked it"
        tangents = [
            match_strides(gradients[position], expected)
            for position, expected in zip(layer.differentiable, layer.tangents, strict=True)
        ]
        return None, *layer.backward(*layer.saved_sizes, *ctx.saved_tensors, *tangents)


def match_strides(tensor: Tensor, expected: Tensor) -> Tensor:
    """The tensor with the strides that a graph was traced for; a copy if its own differ."""
    if tensor.stride() == expected.stride():
        return tensor
    copy = tensor.new_empty_strided(expected.shape, expected.stride())
    return copy.copy_(tensor)


class _CallSubgraph(HigherOrderOperator):
    """`call_subgraph(call, *inputs)`: one node in a graph that is being traced."""

    def __init__(self) -> None:
        super().__init__("fulgurite_call_subgraph")

    def __call__(self, call: SubgraphCall, *inputs: Any) -> tuple[Any, ...]:
        return super().__call__(call, *inputs)  # type: ignore[no-any-return,misc]


call_subgraph = _CallSubgraph()


@call_subgraph.py_autograd_impl  # type: ignore[untyped-decorator]
def _run_below_autograd(call: SubgraphCall, *inputs: Any) -> tuple[Any, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return call_subgraph(call, *inputs)


@call_subgraph.py_functionalize_impl  # type: ignore[untyped-decorator]
def _run_functionalized(ctx: Any, call: SubgraphCall, *inputs: Any) -> Any:
    unwrapped = ctx.unwrap_tensors(inputs)
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(call_subgraph(call, *unwrapped))


@call_subgraph.py_impl(ProxyTorchDispatchMode)  # type: ignore[untyped-decorator]
def _trace(mode: ProxyTorchDispatchMode, call: SubgraphCall, *inputs: Any) -> Any:
    arguments = tuple(mode.tracer.unwrap_proxy(value) for value in inputs)
    proxy = mode.tracer.create_proxy("call_function", call, arguments, {}, name=call.name)
    return track_tensor_tree(call_subgraph(call, *inputs), proxy, constant=None, tracer=mode.tracer)


@call_subgraph.py_impl(FakeTensorMode)  # type: ignore[untyped-decorator]
def _propagate(mode: FakeTensorMode, call: SubgraphCall, *inputs: Any) -> tuple[Any, ...]:
    """New fake tensors like those recorded when the layer was traced: its inputs are alike."""
    output: fx.Node = call.module.graph.output_node()
    with mode:
        return tuple(_empty_like(fake_value(node)) for node in output.args[0])  # type: ignore[union-attr,arg-type]


def _empty_like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@call_subgraph.py_impl(DispatchKey.CompositeExplicitAutograd)  # type: ignore[untyped-decorator]
def _run(call: SubgraphCall, *inputs: Any) -> Any:
    return call.module(*inputs)
