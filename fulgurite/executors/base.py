"""The executor contract and the registry of executors.

In: nodes to claim and regions to lower. Out: callables. A user's executor is a subclass of `Executor`
with two methods. Pass it to `compile(executors=[mine, "torch"])`, or register it by name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from fulgurite.errors import ArgumentError


class Executor(ABC):
    """Runs the ops that it claims.

    A region is a graph of neighbouring claimed ops, with flat inputs and a tuple of outputs.
    """

    name: ClassVar[str]
    # composite ops may be decomposed so that this executor can claim the decomposed ops
    accepts_decomposed_ops: ClassVar[bool] = False
    # a region falls back to torch's own ops where those are faster
    falls_back_if_slower: ClassVar[bool] = False
    # A region that it can't lower falls back to torch; else the error is raised. If what it lowers to has
    # a method `can_rerun(error)`, the same holds when a call fails (`executors/fallback.py`).
    falls_back_if_failed: ClassVar[bool] = False

    region_name: ClassVar[str] = ""  # name prefix of its regions; "": derived from their ops

    @abstractmethod
    def claims(self, node: fx.Node) -> bool:
        """Return whether this executor can run the node. `fake_value(node)` describes its value."""

    @abstractmethod
    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """Return a function from the region's inputs to its outputs, in order."""

    def warm_up(self, captured: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Start background work that lowering will need; autograd and claiming run meanwhile."""
        return

    def start_lowering(self, region: fx.GraphModule) -> None:
        """Start background compilation; called for all regions before the first `lower`."""
        return

    def lower_autotuned(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """Like `lower`, but time several schedules where the executor has several."""
        return self.lower(region)


@dataclass(frozen=True)
class ClaimedRegion:
    """A region to lower, and the executor that claimed it."""

    name: str
    executor: Executor
    module: fx.GraphModule
    restore: Callable[[], fx.GraphModule]  # builds the region as torch runs it
    guard: Callable[[Callable[..., Any]], Callable[..., Any]]  # adds the fallback to what runs


@dataclass(frozen=True)
class ExecutorChoice:
    """The executor of a region, its function (None: op by op) and a comment for the trace."""

    executor: Executor
    call: Callable[..., Any] | None
    comment: str = ""


_REGISTERED: dict[str, Executor] = {}  # BUILT_IN in __init__.py, then users' own


def register_executor(executor: Executor) -> Executor:
    """Make an executor available by name, for `executors=["name", "torch"]`."""
    _check_executor(executor)
    _REGISTERED[executor.name] = executor
    return executor


def executor_names() -> list[str]:
    """Names that `compile(executors=[...])` accepts."""
    return list(_REGISTERED)


def resolve_executors(requested: Sequence[Executor | str]) -> list[Executor]:
    """Turn names and objects into executors, in priority order."""
    if isinstance(requested, (str, Executor)):
        requested = [requested]
    executors: list[Executor] = []
    for entry in requested:
        if isinstance(entry, str):
            if entry not in _REGISTERED:
                raise ArgumentError(
                    f"there is no executor called {entry!r}",
                    next=f"one of {', '.join(map(repr, _REGISTERED))}, or an Executor object",
                )
            entry = _REGISTERED[entry]
        _check_executor(entry)
        executors.append(entry)
    if not executors:
        raise ArgumentError("executors is empty", next="leave it out, or end the list with 'torch'")
    return executors


def _check_executor(executor: Any) -> None:
    if not isinstance(executor, Executor):
        raise ArgumentError(
            f"{executor!r} is not an executor",
            next="pass a name, or an object of a subclass of fulgurite.Executor",
        )
    if not isinstance(getattr(executor, "name", None), str):
        raise ArgumentError(
            f"{type(executor).__name__} has no name", next='add to the class: name = "mine"'
        )
