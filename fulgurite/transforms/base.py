"""The contract: a transform is a function Trace → Trace with a phase.

    @fulgurite.transform(phase="after_autograd")
    def my_pass(trace: Trace) -> Trace:
        return trace.edit(lambda graph: ...)

A plain function runs after autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.errors import ArgumentError
from fulgurite.trace import Trace

Phase = Literal["before_autograd", "after_autograd", "after_claim"]
TraceFunction = Callable[[Trace], Trace]


@dataclass(frozen=True)
class Transform:
    """A named function Trace → Trace and the phase it runs in."""

    name: str
    phase: Phase
    function: TraceFunction

    def __call__(self, trace: Trace) -> Trace:
        with _disable_current_modes():  # TorchDynamo calls us in fake mode; constants must be real
            result = self.function(trace)
        if not isinstance(result, Trace):
            raise ArgumentError(
                f"the transform {self.name} returned {type(result).__name__}, not a Trace",
                next="return the trace it was given, or trace.edit(...)",
            )
        return result


@overload
def transform(change: TraceFunction, /) -> Transform: ...
@overload
def transform(
    *, phase: Phase = ..., name: str | None = ...
) -> Callable[[TraceFunction], Transform]: ...
def transform(
    change: TraceFunction | None = None,
    /,
    *,
    phase: Phase = "after_autograd",
    name: str | None = None,
) -> Transform | Callable[[TraceFunction], Transform]:
    """Make a `Transform` from a function `Trace -> Trace`. A decorator, with or without arguments.

    Args:
        change: the function. None: return a decorator.
        phase: `"before_autograd"`, `"after_autograd"` or `"after_claim"`.
        name: the stage name in `compiled.history`. Default: the name of the function.
    """
    if phase not in get_args(Phase):
        raise ArgumentError(f"phase={phase!r} is not a phase", next=f"one of {get_args(Phase)}")

    def wrap(function: TraceFunction) -> Transform:
        return Transform(name or function.__name__, phase, function)

    return wrap if change is None else wrap(change)


def as_transform(value: Any) -> Transform:
    """A Transform from an entry of the user's list."""
    if isinstance(value, Transform):
        return value
    if callable(value) and not isinstance(value, type):
        return Transform(getattr(value, "__name__", type(value).__name__), "after_autograd", value)
    raise ArgumentError(
        f"{value!r} is not a transform",
        next="pass a function Trace -> Trace, or one decorated with @fulgurite.transform",
    )
