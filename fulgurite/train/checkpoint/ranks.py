"""`SaveRanks`: the ranks that save together. An error of one is an error of all, with the same text.

The group is of its own and on CPUs (gloo): the writing thread uses it while the training thread runs
collectives of the layout.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from fulgurite.errors import ArgumentError
from fulgurite.train.checkpoint.errors import CheckpointError, describe_failure

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # ranks of one machine may write much later than others


class SaveRanks:
    """All ranks of a run; one rank needs no process group."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.group: dist.ProcessGroup | None = None
        if world_size > 1:
            if not (dist.is_available() and dist.is_initialized()):
                raise ArgumentError(
                    f"{world_size} ranks save together, but there is no process group",
                    next="call torch.distributed.init_process_group first",
                )
            self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def run_on_all(self, function: Callable[[], T]) -> list[T]:
        """Call a function on every rank; returns all results, by rank, on every rank."""
        outcome = self._try(function)
        outcomes = [outcome]
        if self.group is not None:
            outcomes = [outcome] * self.world_size
            dist.all_gather_object(outcomes, outcome, group=self.group)
        _raise_failures(outcomes)
        return [result for result, _failure in outcomes]

    def run_on_first(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0; returns its result on every rank."""
        if self.group is None:
            return function()
        outcome: list[Any] = [self._try(function) if self.is_first else None]
        dist.broadcast_object_list(outcome, src=0, group=self.group)
        _raise_failures(outcome)
        result: T = outcome[0][0]
        return result

    def _try(self, function: Callable[[], T]) -> tuple[T | Any, tuple[str, bool, type] | None]:
        try:
            return function(), None
        except (Exception, CheckpointException) as error:  # told to all ranks, raised there
            kind = type(error) if isinstance(error, CheckpointError) else CheckpointError
            return None, (*describe_failure(error, self.rank), kind)

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None


def _raise_failures(outcomes: list[tuple[Any, tuple[str, bool, type] | None]]) -> None:
    failures = [failure for _result, failure in outcomes if failure is not None]
    if failures:
        texts = dict.fromkeys(text for text, _is_storage, _kind in failures)
        is_storage = any(is_storage for _text, is_storage, _kind in failures)
        raise failures[0][2]("; ".join(texts), is_storage)
