"""Worker processes of the suite `zoo`.

In: jobs. Out: rows, as they come. Each job runs in its own process with a time limit. A process that ends without a
row is a row as well. Jobs that time anything run in batches: all prepare at the same time, then each times alone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from fulgurite.bench.zoo.worker import READY, Job, Row, run_job

TURN_SECONDS = 2.5  # kept before the deadline for each worker's timing
LOG_CHARACTERS = 4000  # of a crashed process's output, in its row: the stack of the crash


def start_server() -> Any:
    """A context whose processes are forked from one that has imported the packages.

    If one of them has initialized CUDA, a forked process can't use it: then each process imports them itself.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fulgurite.bench.zoo.preload"])
    if not torch.cuda.is_available() or _can_use_cuda(context):
        return context
    print("an import initializes CUDA: every worker imports the packages itself")
    return multiprocessing.get_context("spawn")


def _can_use_cuda(context: Any) -> bool:
    """Whether a process of the context can use CUDA."""
    connection, other_end = context.Pipe()
    process = context.Process(target=_report_bad_fork, args=(other_end,))
    process.start()
    other_end.close()
    is_bad: bool = connection.recv()
    process.join()
    return not is_bad


def _report_bad_fork(connection: Connection) -> None:
    connection.send(torch.cuda._is_in_bad_fork())


class Worker:
    """One running process and its job."""

    def __init__(self, job: Job, time_limit: float, context: Any, run: Any = run_job) -> None:
        self.job = job
        self.time_limit = time_limit
        self.connection, other_end = context.Pipe()
        self.process = context.Process(target=run, args=(job, other_end))
        self.start = time.perf_counter()
        self.limit = self.start + time_limit
        self.process.start()
        other_end.close()

    @property
    def remaining(self) -> float:
        """Seconds up to its time limit, at least 0."""
        return max(0.0, self.limit - time.perf_counter())

    def receive(self) -> Row | str | None:
        """A row, READY, or None if it is still at work. A row is the end of the process."""
        try:
            message = self.connection.recv() if self.connection.poll() else None
            status, reason = "timeout", f"after {self.time_limit:.0f} s"
        except (EOFError, ConnectionResetError):  # it ended without a row
            self.process.join()
            message, status, reason = None, "crashed", _crash_reason(self.process.exitcode)
        if message is None and status == "timeout" and self.remaining:
            return None
        if message == READY:
            return READY
        self.end()
        if message is None:
            error = f"{reason}: {_log_tail(self.job)}"
            message = {**self.job.describe(), "status": status, "error": error}
        return {**message, "seconds": time.perf_counter() - self.start}

    def take_turn(self) -> Row:
        """Let a worker that is READY time its steps, and wait for its row."""
        self.limit = time.perf_counter() + self.time_limit  # it may have waited for others
        self.connection.send(None)
        while True:
            wait([self.connection], self.remaining)
            message = self.receive()
            if isinstance(message, dict):
                return message

    def end(self) -> None:
        """Kill the process, if it has not ended, and the compilers that it started."""
        if self.connection.closed:
            return
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended, or this is before its setsid
            self.process.kill()
        self.process.join()
        self.connection.close()


def measure_rows(
    jobs: Sequence[Job], workers: int, time_limit: float, deadline: float, context: Any
) -> Iterator[Row]:
    """The rows of the jobs. Jobs not done at the deadline, a `time.perf_counter()`, have no rows."""
    if all(job.timing_budget for job in jobs):
        yield from _measure_in_batches(jobs, workers, time_limit, deadline, context)
    else:
        yield from _measure_in_parallel(jobs, workers, time_limit, deadline, context)


def _measure_in_parallel(
    jobs: Sequence[Job], workers: int, time_limit: float, deadline: float, context: Any
) -> Iterator[Row]:
    pending, running = list(reversed(jobs)), list[Worker]()
    try:
        while (pending or running) and time.perf_counter() < deadline:
            while pending and len(running) < workers:
                running.append(Worker(pending.pop(), time_limit, context))
            for worker, message in _wait_for_messages(running, deadline):
                assert isinstance(message, dict), "a job without timing asks for no turn"
                running.remove(worker)
                yield message
    finally:
        _end_all(running)


def _measure_in_batches(
    jobs: Sequence[Job], workers: int, time_limit: float, deadline: float, context: Any
) -> Iterator[Row]:
    for first in range(0, len(jobs), workers):
        if time.perf_counter() >= deadline:
            return
        running = [Worker(job, time_limit, context) for job in jobs[first : first + workers]]
        ready: list[Worker] = []
        start_of_turns = deadline - TURN_SECONDS * len(running)
        try:
            while running and time.perf_counter() < start_of_turns:
                for worker, message in _wait_for_messages(running, start_of_turns):
                    running.remove(worker)
                    if isinstance(message, dict):
                        yield message
                    else:
                        ready.append(worker)
            _end_all(running)
            while ready and time.perf_counter() < deadline:
                yield ready.pop().take_turn()
        finally:
            _end_all([*running, *ready])


def _wait_for_messages(
    running: Sequence[Worker], deadline: float
) -> list[tuple[Worker, Row | str]]:
    """Wait until a worker has a message, is out of time, or the deadline is reached."""
    first_limit = min(worker.remaining for worker in running)
    connections: list[Connection] = [worker.connection for worker in running]
    wait(connections, max(0.0, min(first_limit, deadline - time.perf_counter())))
    messages = [(worker, worker.receive()) for worker in running]
    return [(worker, message) for worker, message in messages if message is not None]


def _end_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.end()


def _crash_reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


def _log_tail(job: Job) -> str:
    log = Path(job.log)
    if not log.exists():
        return ""
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:].strip()
