"""Restart of lost ranks: the `RankError` of a step in, the same engine with new ranks out.

    a rank is lost ─▶ requests that ran: failed, or back to the queue with their tokens
                   ─▶ all worker processes are killed, new ones are started, all ranks load the model
                   ─▶ the queue goes on: requests that waited, and those that are retried

The KV caches of all ranks are lost. A request that is retried computes its prompt and the tokens that
it has again, like a preempted one. Its listener gets no token twice. Greedy requests continue with the
same tokens as without the failure; so do sampled ones, since seed and position determine the random
numbers.

A request during which ranks are lost twice at the same token is likely to be the cause: it fails. After
`max_restarts` restarts within `window_seconds` every request fails, and the engine stays down.

Only ranks that this process has started can be restarted. Under torchrun or Ray every request fails and
the error is raised, so that rank 0's process ends and the launcher starts all ranks again.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fulgurite.errors import ArgumentError, FulguriteError, RankError
from fulgurite.logs import LOG
from fulgurite.option_values import FAILURE_MODES
from fulgurite.serve.engine.request import Request, RequestState, Update

if TYPE_CHECKING:
    from fulgurite.serve.engine.engine_core import EngineCore

RESTART_WINDOW = 600.0  # seconds
RESTART_DELAYS = (0.0, 1.0, 5.0, 15.0)  # seconds before a restart; the last one repeats
# What an engine keeps: its requests. Everything else is of the ranks that were lost,
KEPT_FIELDS = frozenset({
    "requests", "detokenizers", "listeners", "request_counter", "lock", "grammars", "recorder",
    "failed_updates", "tokenizer", "eos_token_ids", "restarter", "failure",
})  # fmt: skip
# and of that, these have no tensors of the device: others may read them while ranks load.
HOST_FIELDS = frozenset({
    "coordinator", "scheduler", "block_manager", "plan", "context", "in_flight", "launching",
    "max_in_flight",
})  # fmt: skip


@dataclass(frozen=True)
class RestartPolicy:
    """What happens when a rank is lost.

    on_failure        `fail` or `retry`: requests that were running
    max_restarts      restarts within `window_seconds`; 0: none
    delays            seconds before the first, second, ... of them
    """

    on_failure: str = "fail"
    max_restarts: int = 3
    window_seconds: float = RESTART_WINDOW
    delays: tuple[float, ...] = RESTART_DELAYS

    def __post_init__(self) -> None:
        if self.on_failure not in FAILURE_MODES:
            raise ArgumentError(
                f"on_rank_failure={self.on_failure!r}", next=f"use {' or '.join(FAILURE_MODES)}"
            )
        if self.max_restarts < 0:
            raise ArgumentError(f"max_restarts={self.max_restarts} must be 0 or more")


@dataclass(frozen=True)
class RankProcesses:
    """How an engine's ranks are checked, stopped and started.

    check    raises RankError if a process has ended
    stop     kill all workers and leave the mesh; called again after a start that failed
    start    start workers, load the model on all ranks, and return the new engine of rank 0
    """

    check: Callable[[], None]
    stop: Callable[[], None]
    start: Callable[[], EngineCore]


class RankRestarter:
    """Restarts the ranks of one engine. `listeners` hear why before, and "" after a restart."""

    def __init__(self, policy: RestartPolicy, processes: RankProcesses) -> None:
        self.policy, self.processes = policy, processes
        self.num_restarts = 0
        self.recent: deque[float] = deque()  # times of the restarts in the window
        self.last_seconds = 0.0  # that the last restart took
        self.listeners: list[Callable[[str], None]] = []

    def recover(self, engine: EngineCore, error: RankError) -> list[Update]:
        """Restart the ranks after this error; returns the last updates of requests that failed."""
        # Frames of the failed step hold tensors of the model that is about to be released.
        error.__traceback__ = error.__cause__ = error.__context__ = None
        LOG.warning("%s", error.one_line(), extra={"fields": {"event": "rank lost"}})
        failed: list[tuple[Update, Request]] = []
        for request in find_interrupted(engine):
            reason = self._find_reason_to_fail(request)
            if reason is not None:
                text = f"{request.id}, token {request.length}: {error.what}{reason}"
                failed.append((fail_request(engine, request, text), request))
        with ExitStack() as stack:  # in reverse order; each also if one before it raises
            stack.callback(self._restart, engine, error)
            for update, request in reversed(failed):
                stack.callback(engine._notify, update, request)
        return [update for update, _ in failed]

    def _find_reason_to_fail(self, request: Request) -> str | None:
        """Why a request that was running is not retried; None: it is."""
        if self.policy.on_failure == "fail":
            return " (on_rank_failure is fail)"
        if request.lost_at == request.num_reported:
            return " (twice at this token, so it is not retried again)"
        request.lost_at = request.num_reported
        request.num_restarts += 1
        return None

    def _restart(self, engine: EngineCore, error: FulguriteError) -> None:
        started = time.monotonic()
        for listener in self.listeners:
            listener(error.one_line())
        release_ranks(engine)
        try:
            fresh = self._start(error)
        except BaseException as failure:  # whatever it is, the engine is without its ranks
            self.processes.stop()
            engine.failure = describe_end(failure)
            fail_all(engine, engine.failure)
            if isinstance(failure, RankError | KeyboardInterrupt | SystemExit):
                raise
            raise engine.failure from failure
        retried = adopt_ranks(engine, fresh)
        self.last_seconds = time.monotonic() - started
        LOG.warning(
            "all ranks restarted in %.1f s; %d requests are retried, %d waited",
            self.last_seconds,
            retried,
            len(engine.requests) - retried,
            extra={"fields": {"event": "ranks restarted", "seconds": self.last_seconds}},
        )
        for listener in self.listeners:
            listener("")

    def _start(self, error: FulguriteError) -> EngineCore:
        """The engine of new ranks. A start that fails counts as a restart, too."""
        while True:
            self.processes.stop()
            time.sleep(self._count_restart(error))
            try:
                return self.processes.start()
            except (FulguriteError, RuntimeError, OSError) as failure:  # of ranks, store or files
                error = to_fulgurite_error(failure)
            # Not inside `except`: the traceback holds what was loaded so far.
            LOG.warning("the ranks could not be restarted: %s", error.one_line())

    def _count_restart(self, error: FulguriteError) -> float:
        """Seconds to wait before this restart; RankError if there were too many."""
        now, policy = time.monotonic(), self.policy
        while self.recent and now - self.recent[0] > policy.window_seconds:
            self.recent.popleft()
        if len(self.recent) >= policy.max_restarts:
            raise RankError(
                f"{error.what}; the engine gave up after {len(self.recent)} restarts in "
                f"{policy.window_seconds:g} s",
                ranks=error.ranks if isinstance(error, RankError) else (),
                next="look at the first error of that rank; then create the LLM again",
            )
        self.recent.append(now)
        self.num_restarts += 1
        return policy.delays[min(len(self.recent), len(policy.delays)) - 1]


def find_interrupted(engine: EngineCore) -> list[Request]:
    """The requests that were running, in order of arrival.

    Rank 0 does not know which requests other replicas have admitted: the first `max_sequences` of
    each, at most.
    """
    found, ran = [], Counter[int]()
    requests = [r for r in engine.requests.values() if r.id not in engine.grammars.pending]
    for request in sorted(requests, key=lambda request: request.options.priority):
        if engine._is_local(request):
            if request.state is RequestState.RUNNING:
                found.append(request)
            continue
        assert engine.coordinator is not None, "one rank has no other replica"
        replica = engine.coordinator.replica_of[request.id]
        ran[replica] += 1
        if ran[replica] <= engine.plan.limits.max_sequences:
            found.append(request)
    return found


def fail_request(engine: EngineCore, request: Request, text: str) -> Update:
    """End a request without the ranks that ran it; its listener is still to be notified."""
    request.error, request.error_cause = text, "ranks"
    request.finish("error")
    return engine._build_final_update(request, "")


def fail_all(engine: EngineCore, error: RankError) -> None:
    """End every request with an error that names the rank."""
    engine.grammars.pending.clear()
    with ExitStack() as stack:
        for request in list(engine.requests.values()):
            text = f"{request.id}, token {request.length}: {error.what}"
            stack.callback(engine._notify, fail_request(engine, request, text), request)


def release_ranks(engine: EngineCore) -> None:
    """Free the model, the KV cache and all else of the lost ranks that is on the device."""
    engine.in_flight.clear()
    engine.launching = ()
    for name in engine.__dict__.keys() - KEPT_FIELDS - HOST_FIELDS:
        del engine.__dict__[name]
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def adopt_ranks(engine: EngineCore, fresh: EngineCore) -> int:
    """Give the engine the ranks of a new one, and queue its requests there, in order of arrival.

    Returns the number of requests that had run before.
    """
    for name, value in fresh.__dict__.items():
        if name not in KEPT_FIELDS:
            engine.__dict__[name] = value
    engine.grammars.started.clear()
    pending = engine.grammars.pending
    queued = [request for request in engine.requests.values() if request.id not in pending]
    for request in queued:
        request.restart()
        engine._start(request)
        if engine.coordinator is not None:
            for token in request.output_ids.tolist():
                engine.coordinator.record_token(request, token)
    return sum(request.num_restarts > 0 for request in queued)


def describe_end(failure: BaseException) -> RankError:
    """The error of all later calls."""
    if isinstance(failure, RankError):
        return failure
    return RankError(
        f"the ranks could not be restarted: {type(failure).__name__}: {failure}",
        next="create the LLM again",
    )


def to_fulgurite_error(failure: Exception) -> FulguriteError:
    """The error without its traceback."""
    if isinstance(failure, FulguriteError):
        failure.__traceback__ = failure.__cause__ = failure.__context__ = None
        return failure
    return RankError(f"{type(failure).__name__}: {failure}")
