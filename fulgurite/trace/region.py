"""Region: a piece of a trace that one executor runs as a whole.

In: the executor's name, the graph it took, and what it made of it. Out: the target of one call in the final
trace; the printer shows it as a function of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
