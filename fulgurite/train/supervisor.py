"""`supervise`: a run that ends only when it is finished, is asked to end, or can't go on.

    supervise(config, 4, train)

In: a configuration with a folder, a number of ranks, the function that trains. Out: an exit status. The
function resumes from the newest checkpoint of `config.output` by itself.

    start ranks ─▶ watch ─┬─ all ended well ──────────────▶ 0
                          ├─ SIGINT, SIGTERM: told to all ranks; they save ──▶ 128 + signal
                          └─ one died or stalls: kill all ─┬─▶ start again
                                                           └─▶ RankError: names the rank and its error

**The limit.** `checkpoint.max_restarts` counts restarts since the last new checkpoint, so a run that makes
progress may be disturbed for weeks, and one that always fails at the same step ends. A rank that raises an
error before its first step is not started again: it would raise it again.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fulgurite.errors import ArgumentError, RankError
from fulgurite.running_clock import RunningClock
from fulgurite.train.checkpoint import list_checkpoints
from fulgurite.train.config import TrainConfig
from fulgurite.train.heartbeat import Beat
from fulgurite.train.rank_group import RankExit, RankGroup, RunFunction
from fulgurite.train.run_folder import CHECKPOINTS, has_begun

POLL = 0.2  # seconds between two looks at the heartbeats
FAILURE_GRACE = 3.0  # seconds for the others to leave their errors
START_FACTOR = 4.0  # the first step compiles: it may take this many times `parallel.timeout`
DRAIN_SECONDS = 600.0  # for the last save
EVENTS = "supervisor.jsonl"


@dataclass
class Watch:
    """What a supervisor knows of the ranks that run now.

    Attributes:
        clock: stands still while the run is suspended, as by Ctrl-Z.
        quiet_since: when the heartbeat of any rank changed last.
    """

    group: RankGroup
    timeout: float
    beats: list[Beat | None] = field(default_factory=list)
    clock: RunningClock = field(default_factory=RunningClock)
    quiet_since: float = field(init=False)

    def __post_init__(self) -> None:
        self.quiet_since = self.clock.now()

    def find_stall(self) -> str | None:
        """Why the ranks count as stalled."""
        beats, now = self.group.beats(), self.clock.now()
        if beats != self.beats:
            self.beats, self.quiet_since = beats, now
        has_started = any(beat is not None for beat in beats)
        limit = self.timeout if has_started else START_FACTOR * self.timeout
        if now - self.quiet_since <= limit:
            return None
        steps = [-1 if beat is None else beat.step for beat in beats]
        rank = steps.index(min(steps))
        done = "no step" if steps[rank] < 0 else f"step {steps[rank]}"
        return f"no rank made progress for {limit:.0f} s; rank {rank} is behind, with {done} done"


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended. `rank` is the one at fault."""

    what: str
    rank: int
    trace: str | None = None
    others: str | None = None
    is_final: bool = False


class Supervisor:
    """Starts, watches and restarts the ranks of one run."""

    def __init__(
        self,
        config: TrainConfig,
        ranks: int,
        run: RunFunction,
        on_start: Callable[[RankGroup], None],
    ) -> None:
        if ranks < 1:
            raise ArgumentError(f"{ranks} ranks can't be started", next="start at least one")
        if config.output is None:
            raise ArgumentError("a supervised run has no folder", next="set output")
        self.config, self.ranks, self.run, self.on_start = config, ranks, run, on_start
        self.folder = Path(config.output)
        self.stop: signal.Signals | None = None
        self.restarts = 0  # since the last new checkpoint

    def supervise(self) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._handle_signals():
            while True:
                before = self._newest_step()
                failure = self._run_once()
                if failure is None:
                    return 0 if self.stop is None else 128 + self.stop
                if self._newest_step() != before:
                    self.restarts = 0
                self._check_limit(failure)
                self.restarts += 1
                self._report_restart(failure)

    def _run_once(self) -> Failure | None:
        """One attempt; None if it ended well."""
        group = RankGroup(self.run, self.config, self.ranks)
        self._log("start", ranks=self.ranks, pids=group.pids, from_step=self._newest_step())
        try:
            self.on_start(group)
            return self._watch(group)
        finally:
            group.kill()

    def _watch(self, group: RankGroup) -> Failure | None:
        watch = Watch(group, self.config.parallel.timeout)
        told = False
        while True:
            group.wait_for_exit(POLL)
            exits = group.exits()
            if all(found.code == 0 for found in exits):
                return None
            if any(found.code not in (None, 0) for found in exits):
                group.wait_for_all(FAILURE_GRACE)
                exits = group.exits()
                return None if told and was_stopped_early(exits) else choose_failure(exits)
            if self.stop is not None and not told:
                self._log("stop", signal=self.stop.name)
                group.send(signal.SIGTERM)
                watch.timeout, told = max(watch.timeout, DRAIN_SECONDS), True
            stall = watch.find_stall()
            if stall is not None:
                steps = [-1 if beat is None else beat.step for beat in watch.beats]
                return Failure(stall, steps.index(min(steps)))

    def _check_limit(self, failure: Failure) -> None:
        limit = self.config.checkpoint.max_restarts
        if self.stop is None and not failure.is_final and self.restarts < limit:
            return
        self._log("failed", what=failure.what, rank=failure.rank, restarts=self.restarts)
        reason = "" if failure.is_final else f"; {self.restarts} restarts did not help"
        raise RankError(
            f"{failure.what}{reason if self.restarts else ''}",
            ranks=(failure.rank,),
            trace=failure.trace,
            others=failure.others,
            next=self._next_step(),
        )

    def _next_step(self) -> str:
        """How the run can go on."""
        newest = self._newest_step()
        if not has_begun(self.folder):
            return "the run had not begun; start it again"
        kept = f"step {newest} is saved" if newest else "nothing was saved yet"
        return f"{kept}; resume with --resume {self.folder}"

    def _report_restart(self, failure: Failure) -> None:
        newest = self._newest_step()
        where = f"step {newest}" if newest else "the start"
        limit = self.config.checkpoint.max_restarts
        self._log("restart", what=failure.what, rank=failure.rank, from_step=newest)
        print(
            f"{failure.what}\n  all ranks start again from {where} (restart {self.restarts} of {limit})",
            file=sys.stderr,
            flush=True,
        )

    def _newest_step(self) -> int:
        checkpoints = list_checkpoints(self.folder / CHECKPOINTS)
        return checkpoints[-1][0] if checkpoints else 0

    def _log(self, event: str, **fields: Any) -> None:
        with (self.folder / EVENTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": time.time(), "event": event, **fields}) + "\n")

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM ask all ranks to save and end."""

        def receive(number: int, frame: FrameType | None) -> None:
            self.stop = signal.Signals(number)

        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread may set handlers
            return
        before = {n: signal.signal(n, receive) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def was_stopped_early(exits: list[RankExit]) -> bool:
    """Whether SIGTERM ended ranks that had done no step: until then they don't handle it."""
    codes = {found.code for found in exits}
    is_early = all(found.last_step is None for found in exits)
    return is_early and -signal.SIGTERM in codes and codes <= {None, 0, -signal.SIGTERM}


def choose_failure(exits: list[RankExit]) -> Failure:
    """The rank at fault: one that was killed, else one whose error is not about the others.

    When a rank dies, the others fail in a collective. Their errors come with its name or with that of
    the connection.
    """
    killed = [e for e in exits if e.code is not None and e.code < 0]
    raised = [e for e in exits if e.error is not None]
    own = [e for e in raised if not _is_about_others(e.error or "")]
    ended = [e for e in exits if e.code not in (None, 0)]
    culprit = (killed or own or raised or ended)[0]
    others = "\n".join(
        exit.describe()
        for exit in exits
        if exit is not culprit
        and exit.code not in (None, 0)
        and (exit.error is None or exit.error != culprit.error)  # all ranks found the same
    )
    is_final = culprit.error is not None and all(e.last_step is None for e in exits)
    return Failure(culprit.describe(), culprit.rank, culprit.trace, others or None, is_final)


def _is_about_others(error: str) -> bool:
    marks = ("RankError", "gloo", "Connection", "NCCL", "DistBackendError", "DistNetworkError")
    return any(mark in error for mark in marks)


def _ignore_start(group: RankGroup) -> None:
    """Nobody wants to know."""


def supervise(
    config: TrainConfig,
    ranks: int,
    run: RunFunction,
    on_start: Callable[[RankGroup], None] = _ignore_start,
) -> int:
    """Run `run(config)` on `ranks` processes, and again from the last checkpoint when one dies or stalls.

    Args:
        run: importable by its name; resumes from `config.output` by itself; calls `Heartbeat.beat`
            each step.
        on_start: called with the processes of each attempt.

    Returns:
        0, or 128 + the signal that asked the run to end. RankError if it can't go on.
    """
    return Supervisor(config, ranks, run, on_start).supervise()
