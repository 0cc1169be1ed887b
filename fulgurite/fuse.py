"""fulgurite.fuse: the whole function becomes generated kernels, or an error says which op can't and why.

In: a function of tensors. Out: a `Fused` function: call it as the original, look at `.kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import fx

from fulgurite import fuser
from fulgurite.compile import Compiled
from fulgurite.errors import FusionError
from fulgurite.executors import Executor
from fulgurite.executors.fuser import FUSER, kernels_of
from fulgurite.options import make_options
from fulgurite.trace import describe, source_of


class _Refuse(Executor):
    """The last of the executors: what comes this far can't be generated."""

    name = "nothing"

    def claims(self, node: fx.Node) -> bool:
        refuse(node)

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        raise AssertionError("nothing is lowered by the executor that refuses")


def refuse(node: fx.Node) -> NoReturn:
    """The error for one op: its name, the user's line, its inputs and the reason."""
    name = str(node.target).removeprefix("aten.").split(".")[0]
    reason = fuser.why_not(node)
    inputs = [f"{n.name}: {describe(n.meta.get('val'))}" for n in node.all_input_nodes]
    raise FusionError(
        f"{name} can't be part of a generated kernel yet",
        where=str(source_of(node)),
        input=", ".join(inputs),
        reason=None if reason == name else reason,
        next=f"use fulgurite.compile, which leaves {name} to torch and fuses around it",
    )


class Fused(Compiled):
    """A function that runs as generated kernels only."""

    @property
    def kernels(self) -> list[fuser.Kernel]:
        """Every kernel of every graph compiled so far: source, schedule, bytes, times."""
        finals = [trace for trace in self.history if trace.stage == "final"]
        return [kernel for trace in finals for _, kernel in kernels_of(trace)]


def fuse(function: Callable[..., Any], *, dynamic: bool | None = None) -> Fused:
    """The function as generated kernels; raises FusionError at the first call where that can't be."""
    options = make_options(executors=[FUSER, _Refuse()], dynamic=dynamic, fullgraph=True)
    return Fused(function, options)
