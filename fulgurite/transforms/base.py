"""The contract: a transform is a function from Trace to Trace that says when it runs.

    @fulgurite.transform(phase="after_autograd")
    def my_pass(trace: Trace) -> Trace:
        return trace.edited(lambda graph: ...)

A plain function is taken as one that runs after autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.errors import ArgumentError
from fulgurite.trace import Trace

Phase = Literal["before_autograd", "after_autograd", "after_claim"]
Change = Callable[[Trace], Trace]


@dataclass(frozen=True)
class Transform:
    name: str
    phase: Phase
    change: Change

    def __call__(self, trace: Trace) -> Trace:
        with _disable_current_modes():  # torch compiles in fake mode; constants are to be real
            result = self.change(trace)
        if not isinstance(result, Trace):
            raise ArgumentError(
                f"the transform {self.name} returned {type(result).__name__}, not a Trace",
                next="return the trace it was given, or trace.edited(...)",
            )
        return result


@overload
def transform(change: Change, /) -> Transform: ...
@overload
def transform(*, phase: Phase = ..., name: str | None = ...) -> Callable[[Change], Transform]: ...
def transform(
    change: Change | None = None, /, *, phase: Phase = "after_autograd", name: str | None = None
) -> Transform | Callable[[Change], Transform]:
    """Make a Transform of a function; see the module's docstring."""
    if phase not in get_args(Phase):
        raise ArgumentError(f"phase={phase!r} is not a phase", next=f"one of {get_args(Phase)}")

    def wrap(function: Change) -> Transform:
        return Transform(name or function.__name__, phase, function)

    return wrap if change is None else wrap(change)


def as_transform(value: Any) -> Transform:
    """A Transform from what a user put in the list."""
    if isinstance(value, Transform):
        return value
    if callable(value) and not isinstance(value, type):
        return Transform(getattr(value, "__name__", type(value).__name__), "after_autograd", value)
    raise ArgumentError(
        f"{value!r} is not a transform",
        next="pass a function Trace -> Trace, or one decorated with @fulgurite.transform",
    )
