"""Region: ops of a trace that one executor runs as one call.

In: the executor's name, the region's graph, and what the executor lowered it to. Out: the target of one
call in the final trace. The printer shows a region as a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import fx


@dataclass(frozen=True, eq=False)
class Region:
    """The target of a call in a final trace."""

    name: str
    executor: str
    module: fx.GraphModule
    call: Callable[..., Any]  # takes the module's inputs, returns a tuple
    summary: str = ""  # "4 ops   64.0 MiB"

    @property
    def comment(self) -> str:
        """The comment in the printed trace: the summary, and what runs after a failure."""
        fallback = getattr(self.call, "fallback", None)
        return f"{self.summary}   fallback: {fallback.instead}" if fallback else self.summary

    @property
    def __name__(self) -> str:  # fx reads it of every call target
        return self.name

    def __call__(self, *inputs: Any) -> Any:
        return self.call(*inputs)


def bind_cached_launches(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a trace that has run once, with its regions replaced by their cached launches.

    A region's `call` may have a `cached_launch`: a function of the same arguments that skips the checks
    of the first call. Calling it directly saves 0.2 µs per region.
    """
    if not isinstance(run, FunctionType):
        return run
    launches = {n: getattr(call, "cached_launch", None) for n, call in run.__globals__.items()}
    cached = {name: launch for name, launch in launches.items() if callable(launch)}
    return FunctionType(run.__code__, run.__globals__ | cached, run.__name__)
