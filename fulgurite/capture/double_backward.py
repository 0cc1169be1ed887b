"""Gradients of gradients: `torch.autograd.grad(..., create_graph=True)` through a compiled graph.

In: a compiled graph's inputs, kept until its backward pass has freed the graph, and the captured
graph. Out: first gradients from the compiled backward graph, as part of an autograd graph. Only when
they are differentiated does torch run the captured graph op by op, with autograd, and differentiate
that twice. So gradient penalties, MAML and physics-informed losses work. Where `create_graph` is not
used, only the inputs are kept.

The graph is run again, so its inputs must be unchanged, and it may neither write them nor draw random
numbers. It may not call a `torch.autograd.Function`: TorchDynamo captures the function's backward as it
runs without `create_graph`, so second gradients would miss what goes through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch.autograd_function import autograd_function_apply
from torch.autograd import Function

from fulgurite.trace.subgraph import SubgraphCall

Run = Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class CapturedGraph:
    """A captured graph that can be run again. `reason` says why not, if it can't."""

    run: Callable[..., Any]
    reason: str = ""


@dataclass(frozen=True)
class CallInputs:
    """The inputs of one call of a compiled graph, and their versions."""

    graph: CapturedGraph
    values: tuple[Any, ...]
    versions: tuple[int, ...]

    @classmethod
    def of(cls, graph: CapturedGraph, values: Sequence[Any]) -> CallInputs:
        if graph.reason:
            return cls(graph, (), ())
        return cls(graph, tuple(values), read_versions(values))

    def check(self, purpose: str = "double backward") -> None:
        """Raise if the graph can't be run again with these inputs."""
        reason = self.graph.reason
        if not reason and read_versions(self.values) != self.versions:
            reason = "one of its inputs was modified by an in-place operation after it"
        if reason:
            raise RuntimeError(
                f"{purpose} of a compiled graph runs it again, but {reason}\n"
                "  next   exclude that part from the compiled function: torch.compiler.disable"
            )


def read_versions(values: Sequence[Any]) -> tuple[int, ...]:
    tensors = (value for value in values if isinstance(value, Tensor))
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def describe_obstacle(module: fx.GraphModule, autocast: bool) -> str:
    """Why a captured graph can't be run again; empty if it can."""
    if autocast:
        return "it was called under torch.autocast"
    graphs = [part.graph for part in module.modules() if isinstance(part, fx.GraphModule)]
    if any(_calls_custom_function(graph) for graph in graphs):
        return "TorchDynamo captures the backward of a torch.autograd.Function without its gradient"
    for node in module.graph.nodes:
        target = node.target
        tags = getattr(target, "tags", ())
        is_random = torch.Tag.nondeterministic_seeded in tags or _name(target) in RANDOM_FUNCTIONS
        if is_random and not _is_inactive_dropout(node):
            return f"it draws random numbers ({_name(target)})"
        if isinstance(target, SubgraphCall):
            return "its transformed layers are compiled sub-graphs"
    return ""


def _calls_custom_function(graph: fx.Graph) -> bool:
    return bool(graph.find_nodes(op="call_function", target=autograd_function_apply))


# functions and methods as TorchDynamo captures them, before they are ATen ops with tags
RANDOM_FUNCTIONS = frozenset(
    {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
     "feature_dropout", "rand", "rand_like", "randn", "randn_like", "randint", "randint_like",
     "randperm", "bernoulli", "bernoulli_", "normal", "normal_", "uniform_", "exponential_",
     "multinomial", "poisson", "rrelu", "rrelu_", "gumbel_softmax", "random_", "cauchy_",
     "geometric_", "log_normal_", "fractional_max_pool2d", "fractional_max_pool3d"}
)  # fmt: skip


def _is_inactive_dropout(node: fx.Node) -> bool:
    """Whether a dropout is called with training=False, or without dropping anything."""
    if "dropout" not in _name(node.target):
        return False
    arguments = [*node.args[1:], *node.kwargs.values()]
    return any(value is False or value == 0.0 for value in arguments[:2])


def _name(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def run_differentiable(
    call: CallInputs, run: Run, outputs: Sequence[int], gradients: Sequence[Tensor]
) -> Any:
    """The gradients that `run` computes, in an autograd graph.

    outputs     the outputs of the captured graph that `gradients` belong to
    """
    tensors = [value for value in call.values if needs_gradient(value)]
    if not tensors:  # connects the gradients to a graph, which raises when it is differentiated
        tensors = [torch.empty(0, requires_grad=True)]
    return _DifferentiableBackward.apply(  # type: ignore[no-untyped-call]
        call, run, tuple(outputs), *tensors, *gradients
    )


def needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def rerun_with_autograd(
    call: CallInputs, tensors: Sequence[Tensor]
) -> tuple[list[Tensor], Sequence[Any]]:
    """Run a captured graph again: aliases of the inputs that need gradients, and the outputs.

    tensors     the inputs that need gradients
    """
    # aliases: the same tensor may be given as several inputs, each with its own gradient
    inputs = [tensor.view_as(tensor) for tensor in tensors]
    remaining = iter(inputs)
    values = [next(remaining) if needs_gradient(x) else x for x in call.values]
    return inputs, call.graph.run(*values)


class _DifferentiableBackward(Function):
    """Compiled gradients, whose own gradients are those of the captured graph run in eager mode."""

    @staticmethod
    def forward(
        ctx: Any, call: CallInputs, run: Run, outputs: tuple[int, ...], *tensors: Any
    ) -> Any:
        ctx.call, ctx.outputs = call, outputs
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return tuple(run())

    @staticmethod
    def backward(ctx: Any, *seconds: Any) -> Any:
        call, outputs = ctx.call, ctx.outputs
        call.check()
        create_graph = torch.is_grad_enabled()
        saved = list(ctx.saved_tensors)
        split = len(saved) - len(outputs)
        with torch.enable_grad():
            gradients = [_alias_with_gradient(tensor) for tensor in saved[split:]]
            inputs, results = rerun_with_autograd(call, saved[:split])
            taken = [results[k] for k in outputs]
            firsts = iter(
                torch.autograd.grad(taken, inputs, gradients, create_graph=True, allow_unused=True)
                if inputs
                else ()
            )
            pairs = [
                (first, second)
                for value, second in zip(call.values, seconds, strict=True)
                if needs_gradient(value) and (first := next(firsts)) is not None
                if second is not None and first.requires_grad
            ]
            targets = [*inputs, *gradients]
            found: Sequence[Any] = [None] * len(targets)
            if pairs:
                found = torch.autograd.grad(
                    [first for first, _ in pairs],
                    targets,
                    [second for _, second in pairs],
                    create_graph=create_graph,
                    allow_unused=True,
                )
        return (None, None, None, *found)


def _alias_with_gradient(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
