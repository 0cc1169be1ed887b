"""Region: a piece of a trace that one executor runs as a whole.

In: the executor's name, the graph it took, and what it made of it. Out: the target of one call in the final
trace; the printer shows it as a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import fx


@dataclass(frozen=True, eq=False)
class Region:
    name: str
    executor: str
    module: fx.GraphModule
    call: Callable[..., Any]  # the module's inputs, positionally → a tuple
    summary: str = ""  # "4 ops   64.0 MiB", for the trace's comment

    @property
    def __name__(self) -> str:  # fx asks every call target for one
        return self.name

    def __call__(self, *inputs: Any) -> Any:
        return self.call(*inputs)


def with_prepared(run: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a trace that has run: its regions are what their executors have prepared by now.

    A region's `call` may have a `prepared` function of the same arguments; the way round it takes 0.2 µs a call.
    """
    if not isinstance(run, FunctionType):
        return run
    names = {n: getattr(call, "prepared", None) for n, call in run.__globals__.items()}
    prepared = {name: function for name, function in names.items() if callable(function)}
    return FunctionType(run.__code__, run.__globals__ | prepared, run.__name__)
