"""Reading a printed trace back: what `@fulgurite.region`, `@fulgurite.subgraph` and `fulgurite.unprintable`
in its text mean.

In: the functions of a printed trace. Out: regions, lowered again by the executor the text names the first time
they run; and graphs, for the higher-order ops that look inside the function they are given.
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


def region(executor: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Marks a function of a printed trace as a region that `executor` runs.

    A stretch that was a CUDA graph runs call by call: an edited trace is there to be looked into.
    """
    if executor == CudaGraphExecutor.name:
        return lambda function: function
    (runs,) = resolve_executors([executor])

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        lowered: dict[Any, Callable[..., Sequence[Any]]] = {}

        @functools.wraps(function)
        def run(*inputs: Any) -> Any:
            if any(isinstance(value, FakeTensor) for value in inputs):
                return function(*inputs)  # asked what it would give: its ops know
            key = tuple(_signature(value) for value in inputs)
            if key not in lowered:
                with torch.no_grad():
                    module = make_fx(function, tracing_mode="fake")(*inputs)
                placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
                for node, value in zip(placeholders, inputs, strict=True):
                    node.meta.setdefault("val", value)  # a number, which is the same in every call
                lowered[key] = runs.lower(module)
            return lowered[key](*inputs)

        return run

    return wrap


def subgraph(function: Callable[..., Any]) -> fx.GraphModule:
    """Marks a function of a printed trace as the graph that a higher-order op (cond, checkpoint) runs."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in inspect.signature(function).parameters]
    graph.output(graph.call_function(function, tuple(inputs)))
    return fx.GraphModule({}, graph, class_name=function.__name__)


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.stride(), value.device)
    return value


class unprintable:
    """Stands where a trace held something that has no text: a process group, a user's object."""

    def __init__(self, what: str) -> None:
        self.what = what

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TraceTextError(
            f"the trace uses {self.what}, which can't be written as text",
            next="run the trace from the compiled function, or put your own object in its place",
        )

    __call__ = _refuse

    def __getattr__(self, name: str) -> Any:
        self._refuse()
