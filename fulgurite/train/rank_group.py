"""`RankGroup`: the processes of one attempt of a run, and how they ended.

In: a function, a configuration, a number of ranks. Out: exit codes, last errors, last steps.

Processes come from a fork server that has imported torch once, so a restart costs no import. They end
with the supervisor, also if it is killed. The supervisor hosts the store, so it outlives every rank.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch.distributed import TCPStore

from fulgurite.errors import ArgumentError, FulguriteError
from fulgurite.lifeline import Lifeline, bind
from fulgurite.parallel.processes.launch import PRELOADED_MODULES, find_pid, rank_environment
from fulgurite.train.config import TrainConfig
from fulgurite.train.heartbeat import Beat, beat_path, error_path, read_beat

RunFunction = Callable[[TrainConfig], object]


@dataclass(frozen=True)
class RankExit:
    """How a rank ended, or that it did not.

    Attributes:
        code: of its process; negative: the signal that killed it; None: it still ran.
        error: the last line of its error, if it raised one.
        trace: the whole traceback.
        last_step: of its last heartbeat; None: it never finished a step.
    """

    rank: int
    code: int | None
    error: str | None
    trace: str | None
    last_step: int | None

    def describe(self) -> str:
        where = (
            "before its first step" if self.last_step is None else f"after step {self.last_step}"
        )
        if self.error:
            return f"rank {self.rank} failed {where}: {self.error}"
        if self.code is not None and self.code < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.code).name} {where}"
        return f"rank {self.rank} ended with exit code {self.code} {where}"


class RankGroup:
    """Running processes, one a rank."""

    def __init__(self, run: RunFunction, config: TrainConfig, count: int) -> None:
        if config.output is None:
            raise ArgumentError("a supervised run has no folder", next="set output")
        self.count, self.folder = count, Path(config.output)
        self.started = time.monotonic()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._remove_old_signs()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED_MODULES, run.__module__])
        threads = choose_threads(config, count)
        self.processes: list[BaseProcess] = []
        self.lifelines: list[Lifeline] = []
        for rank in range(count):
            environment = dict(os.environ) | rank_environment(rank, count, self.store.port)
            errors, lifeline = error_path(self.folder, rank), Lifeline()
            arguments = (lifeline.child_end, run, config, environment, threads, errors)
            self.processes.append(context.Process(target=_run_rank, args=arguments, daemon=True))
            self.processes[-1].start()
            lifeline.attach(find_pid(self.processes[-1]))
            self.lifelines.append(lifeline)

    def _remove_old_signs(self) -> None:
        for rank in range(self.count):
            error_path(self.folder, rank).parent.mkdir(parents=True, exist_ok=True)
            error_path(self.folder, rank).unlink(missing_ok=True)
            beat_path(self.folder, rank).unlink(missing_ok=True)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes if process.pid is not None]

    def beats(self) -> list[Beat | None]:
        return [read_beat(self.folder, rank) for rank in range(self.count)]

    def wait_for_exit(self, seconds: float) -> None:
        """Return when a process that still runs ends, or after `seconds`."""
        running = [process.sentinel for process in self.processes if process.exitcode is None]
        if running:
            wait(running, seconds)

    def wait_for_all(self, seconds: float) -> None:
        """Return when all have ended, or after `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))

    def exits(self) -> list[RankExit]:
        return [self._read_exit(rank) for rank in range(self.count)]

    def _read_exit(self, rank: int) -> RankExit:
        beat, path = read_beat(self.folder, rank), error_path(self.folder, rank)
        trace = path.read_text() if path.exists() else None
        return RankExit(
            rank=rank,
            code=self.processes[rank].exitcode,
            error=trace.splitlines()[0] if trace else None,
            trace=trace,
            last_step=None if beat is None else beat.step,
        )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to every process that still runs."""
        for process in self.processes:
            if process.exitcode is None and process.pid is not None:
                with suppress(ProcessLookupError):  # it ended just now
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """Kill every process and wait until it is gone."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


def choose_threads(config: TrainConfig, ranks: int) -> int:
    """Threads of a rank: one if bits must not depend on the number of ranks, else a share of the cores."""
    if config.deterministic:
        return 1
    if os.environ.get("OMP_NUM_THREADS", "").isdigit():
        return int(os.environ["OMP_NUM_THREADS"])
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def _run_rank(
    lifeline: Connection,
    run: RunFunction,
    config: TrainConfig,
    environment: dict[str, str],
    threads: int,
    errors: Path,
) -> None:
    """The process of a rank."""
    bind(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor handles ctrl-C, and sends SIGTERM
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    try:
        run(config)
    except FulguriteError as error:
        _leave_error(errors, f"{type(error).__name__}: {error.one_line()}")
        sys.exit(1)
    except Exception as error:  # any error of the run is the supervisor's to report
        first_line = (str(error).strip() or "no message").splitlines()[0]
        _leave_error(errors, f"{type(error).__name__}: {first_line}")
        sys.exit(1)


def _leave_error(path: Path, line: str) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(f"{line}\n{traceback.format_exc()}")
    unfinished.rename(path)
