"""The contract of an executor, and the list of them.

In: nodes to claim and regions to lower. Out: callables. A user's executor is a subclass of `Executor` with two
methods; it is passed to `compile(executors=[mine, "torch"])`, or registered by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fulgurite.errors import ArgumentError


class Executor(ABC):
    """Runs the ops it claims. Regions are graphs of claimed neighbours, inputs and outputs flat."""

    name: ClassVar[str]
    takes_pieces: ClassVar[bool] = False  # composite ops may be taken apart to reach this executor
    # a region that torch's own ops run faster is given back to them
    compared: ClassVar[bool] = False

    region_name: ClassVar[str] = ""  # of its regions in the trace; by default their ops give it

    @abstractmethod
    def claims(self, node: fx.Node) -> bool:
        """Whether this executor can run the node. `node.meta["val"]` says what its value looks like."""

    @abstractmethod
    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """A function of the region's inputs that returns its outputs, in order."""

    def expect(self, captured: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """May start what regions of this graph will need: it is differentiated and claimed meanwhile."""
        return

    def begin(self, region: fx.GraphModule) -> None:
        """May start what `lower` will need: all regions are begun before the first is lowered."""
        return

    def tuned(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """The same after a search for the fastest way, where the executor has several."""
        return self.lower(region)


@dataclass(frozen=True)
class Chosen:
    """Who runs a region, the function that does (None: op by op), and a remark for the trace."""

    executor: Executor
    call: Callable[..., Any] | None
    remark: str = ""


_REGISTERED: dict[str, Executor] = {}  # BUILT_IN in __init__.py, then users' own


def register_executor(executor: Executor) -> Executor:
    """Make an executor known by its name, for `executors=["name", "torch"]`."""
    _check(executor)
    _REGISTERED[executor.name] = executor
    return executor


def executor_names() -> list[str]:
    return list(_REGISTERED)


def resolve_executors(wanted: Sequence[Executor | str]) -> list[Executor]:
    """Names and objects → executors, in priority order."""
    if isinstance(wanted, (str, Executor)):
        wanted = [wanted]
    found: list[Executor] = []
    for entry in wanted:
        if isinstance(entry, str):
            if entry not in _REGISTERED:
                raise ArgumentError(
                    f"there is no executor called {entry!r}",
                    next=f"one of {', '.join(map(repr, _REGISTERED))}, or an Executor object",
                )
            entry = _REGISTERED[entry]
        _check(entry)
        found.append(entry)
    if not found:
        raise ArgumentError("executors is empty", next="leave it out, or end the list with 'torch'")
    return found


def _check(executor: Any) -> None:
    if not isinstance(executor, Executor):
        raise ArgumentError(
            f"{executor!r} is not an executor",
            next="pass a name, or an object of a subclass of fulgurite.Executor",
        )
    if not isinstance(getattr(executor, "name", None), str):
        raise ArgumentError(
            f"{type(executor).__name__} has no name", next='give the class a line: name = "mine"'
        )
