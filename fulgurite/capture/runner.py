"""Modules that run compiled while the compiled model around them runs.

In: modules of one model, each with the function that runs it compiled. Out: a `Runner`, whose `wrap` makes
these functions active during the calls of the model.

The modules are not replaced: called through the original model, they run in eager mode. A module that
backward calls again (activation checkpointing) runs compiled if its forward did. A module is run compiled
as a whole, its hooks included, or only its `forward`: hooks that communicate (FSDP2) stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fulgurite.capture.dynamo import is_capturing

# reason of the intended graph breaks in the outer graph
BREAK_REASON = "the repeated layers of a model are compiled as graphs of their own"
RunModule = Callable[..., Any]  # takes the module, then its arguments


class Runner:
    """Runs some modules of a model compiled.

    calls      functions that replace `__call__`, with the module's hooks
    forwards   functions that replace `forward`; the hooks run in eager mode
    """

    def __init__(
        self,
        calls: Mapping[nn.Module, RunModule],
        forwards: Mapping[nn.Module, RunModule] | None = None,
    ) -> None:
        self.calls, self.forwards = dict(calls), dict(forwards or {})
        self.seen: set[nn.Module] = set()  # modules that were called at least once
        for module in self.calls:
            if not isinstance(module._compiled_call_impl, _ModuleCall):
                module._compiled_call_impl = _ModuleCall(module)  # type: ignore[assignment]
        for module in self.forwards:
            module.__dict__["forward"] = MethodType(forward, module)

    def wrap(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """`model`, with these modules compiled during its calls."""
        return with_context_value(_active_runner, self, model)


def with_context_value(
    variable: ContextVar[Any], value: Any, function: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, with the context variable set to `value` during its calls."""

    def run(*args: Any, **kwargs: Any) -> Any:
        token = variable.set(value)
        try:
            return function(*args, **kwargs)
        finally:
            variable.reset(token)

    return run


_active_runner: ContextVar[Runner | None] = ContextVar("fulgurite_active_runner", default=None)
capturing_outer_graph: ContextVar[bool] = ContextVar(
    "fulgurite_capturing_outer_graph", default=False
)


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def is_capturing_outer_graph() -> bool:
    """Whether TorchDynamo captures an outer graph, in which layers are graph breaks."""
    return capturing_outer_graph.get()


class _ModuleCall:
    """Replaces a module's `__call__`: runs it compiled inside a compiled model, as it is elsewhere."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.runner: Runner | None = None
        self.break_graph = torch._dynamo.disable(self.call, reason=BREAK_REASON)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():
            if is_capturing_outer_graph():
                return self.break_graph(*args, **kwargs)
            return self.module._call_impl(*args, **kwargs)
        return self.call(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:  # not inside backward
            runner = _active_runner.get()
            is_compiled = runner is not None and self.module in runner.calls
            self.runner = runner if is_compiled else None
        if self.runner is not None:
            self.runner.seen.add(self.module)
            return self.runner.calls[self.module](self.module, *args, **kwargs)
        return self.module._call_impl(*args, **kwargs)


_last_runners: WeakKeyDictionary[nn.Module, Runner | None] = WeakKeyDictionary()


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces a module's `forward`: compiled inside a compiled model, as it is elsewhere.

    A bound method pickles as its object and this name, so it must be the name of the original.
    """
    if is_capturing():
        return type(self).forward(self, *args, **kwargs)
    if torch._C._current_graph_task_id() == -1:  # not inside backward
        active = _active_runner.get()
        runner = active if active is not None and self in active.forwards else None
        _last_runners[self] = runner
    runner = _last_runners.get(self)
    if runner is None:
        return type(self).forward(self, *args, **kwargs)
    runner.seen.add(self)
    return runner.forwards[self](self, *args, **kwargs)
