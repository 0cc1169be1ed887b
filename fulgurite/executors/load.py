"""Load a printed trace: `@fulgurite.region`, `@fulgurite.subgraph` and `fulgurite.unprintable`.

In: the functions of a printed trace. Out: regions, which the named executor lowers again when they first
run; and graph modules, for the higher-order ops that inspect the function they are given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite.errors import TraceTextError
from fulgurite.executors.base import resolve_executors
from fulgurite.executors.cudagraph import CudaGraphExecutor
from fulgurite.trace.frozen import FROZEN
from fulgurite.trace.node_meta import has_fake_value, set_fake_value


def region(executor: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Mark a function of a printed trace as a region that `executor` runs.

    A region that was captured as a CUDA graph runs call by call, so that it can be debugged. So does
    one of packed weights, at every call.
    """
    if executor in (CudaGraphExecutor.name, FROZEN):
        return lambda function: function
    (region_executor,) = resolve_executors([executor])

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        lowered: dict[Any, Callable[..., Sequence[Any]]] = {}

        @functools.wraps(function)
        def run(*inputs: Any) -> Any:
            if any(isinstance(value, FakeTensor) for value in inputs):
                return function(*inputs)  # shape propagation: its ops do it
            key = tuple(_signature(value) for value in inputs)
            if key not in lowered:
                with torch.no_grad():
                    module = make_fx(function, tracing_mode="fake")(*inputs)
                placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
                for node, value in zip(placeholders, inputs, strict=True):
                    if not has_fake_value(node):
                        set_fake_value(node, value)  # a number, constant for this key
                lowered[key] = region_executor.lower(module)
            return lowered[key](*inputs)

        return run

    return wrap


def subgraph(function: Callable[..., Any]) -> fx.GraphModule:
    """Mark a function of a printed trace as the graph of a higher-order op (cond, checkpoint)."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in inspect.signature(function).parameters]
    graph.output(graph.call_function(function, tuple(inputs)))
    return fx.GraphModule({}, graph, class_name=function.__name__)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride(), value.device)
    return value


class unprintable:
    """Replaces an object of a trace that has no text form: a process group, a user's object."""

    def __init__(self, what: str) -> None:
        self.what = what

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TraceTextError(
            f"the trace uses {self.what}, which can't be written as text",
            next="run the trace from the compiled function, or replace it by your own object",
        )

    __call__ = _raise

    def __getattr__(self, name: str) -> Any:
        self._raise()
