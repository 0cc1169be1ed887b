"""Ranks on one machine: N processes that run a function together.

    results = launch(train, 4, config)          one call; a list with one result a rank

    with RankPool(4) as pool:                    the same processes for several calls
        first = pool.run(step, 1)
        second = pool.run(step, 2)

A function is pickled by name, so it must be importable; arguments and results are pickled. If one rank
fails, the others get `failure_grace` seconds to fail on their own, since their errors help. Then all are
killed, and the error has the message of each. Rank processes end with their parent (lifeline.py).

Processes come from a fork server that has imported torch once, so starting a rank costs no import. The
parent hosts the store, so the store outlives every rank.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any

import torch
from torch.distributed import TCPStore

from fulgurite.errors import ArgumentError, RankError
from fulgurite.lifeline import Lifeline, bind
from fulgurite.parallel.health import describe_exit, publish_exits

PRELOADED_MODULES = ["torch", "torch.distributed", "fulgurite.parallel.processes.launch"]
FAILURE_GRACE = 15.0


def launch(
    function: Callable[..., Any], ranks: int, *arguments: Any, threads: int = 1
) -> list[Any]:
    """Call a function on `ranks` new processes; returns their results, by rank."""
    with RankPool(ranks, threads=threads) as pool:
        return pool.run(function, *arguments)


@dataclass(frozen=True)
class RankFailure:
    """The last error of a rank, or how its process ended."""

    rank: int
    text: str


class RankPool:
    """Processes with RANK, WORLD_SIZE and a store, which wait for functions to run."""

    def __init__(
        self, count: int, *, threads: int = 1, failure_grace: float = FAILURE_GRACE
    ) -> None:
        if count < 1:
            raise ArgumentError(f"{count} ranks can't be started", next="start at least one")
        self.count, self.failure_grace = count, failure_grace
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.exits: dict[int, str] = {}
        publish_exits(self.store, self.exits)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED_MODULES)
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.lifelines: list[Lifeline] = []
        for rank in range(count):
            lifeline = Lifeline()
            parent_end, child_end = context.Pipe()
            environment = dict(os.environ) | rank_environment(rank, count, self.store.port)
            process = context.Process(
                target=_run_rank,
                args=(lifeline.child_end, child_end, environment, threads),
                daemon=True,
            )
            process.start()
            lifeline.attach(find_pid(process))
            child_end.close()
            self.lifelines.append(lifeline)
            self.processes.append(process)
            self.pipes.append(parent_end)

    @property
    def is_alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every rank; RankError if one fails, after all processes have exited."""
        if not self.is_alive:
            raise RankError("these ranks have ended", next="start new ones: RankPool(count)")
        message = _pickle_call(function, arguments)
        for pipe in self.pipes:
            pipe.send_bytes(message)
        results, failures = self._collect()
        if failures:
            self.kill()
            raise _make_rank_error(failures, self.count)
        return [results[rank] for rank in range(self.count)]

    def _collect(self) -> tuple[dict[int, Any], list[RankFailure]]:
        """Receive all answers, or those until `failure_grace` seconds after the first failure."""
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        waiting = dict(enumerate(self.pipes))
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else deadline - time.monotonic()
            ready = wait(list(waiting.values()), left)
            if not ready:
                failures += [RankFailure(rank, "still running; killed") for rank in waiting]
                break
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                answer = self._receive(rank)
                del waiting[rank]
                if isinstance(answer, RankFailure):
                    failures.append(answer)
                    deadline = deadline or time.monotonic() + self.failure_grace
                else:
                    results[rank] = answer[0]
        return results, failures

    def _receive(self, rank: int) -> tuple[Any] | RankFailure:
        try:
            answer = self.pipes[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(5)
            if process.exitcode is not None:
                self.exits[rank] = describe_exit(process.exitcode)
                publish_exits(self.store, self.exits)  # the other ranks name it at once
            return RankFailure(rank, f"its process ended{_describe_exit(process.exitcode)}")
        try:
            worked, value = pickle.loads(answer)
        except Exception:  # unpickling a result may raise anything
            return RankFailure(rank, f"its result can't be read here\n{traceback.format_exc()}")
        return (value,) if worked else RankFailure(rank, value)

    def kill(self) -> None:
        """Kill every process."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        for lifeline in self.lifelines:
            lifeline.close()
        self.processes, self.pipes, self.lifelines = [], [], []

    def close(self) -> None:
        """Wait for every process to exit; kill it after five seconds."""
        for pipe in self.pipes:
            pipe.close()  # ends its loop
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


# torch asks the name server for the name of each address that it connects to, 127.0.0.1 too. A lost answer
# costs as long as the resolver waits: by default 5 s.
RESOLVER_OPTIONS = "timeout:1 attempts:5"


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment variables that a mesh reads: this rank, and the store of its parent."""
    return {
        "RES_OPTIONS": os.environ.get("RES_OPTIONS", RESOLVER_OPTIONS),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the parent hosts the store
    }


def _pickle_call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # all that pickle raises
        raise ArgumentError(
            f"{getattr(function, '__qualname__', function)} can't be sent to ranks: {error}",
            next="use a module-level function and picklable arguments",
        ) from error


def find_pid(process: BaseProcess) -> int:
    assert process.pid is not None, "the process has started"
    return process.pid


def _run_rank(
    lifeline: Connection, pipe: Connection, environment: dict[str, str], threads: int
) -> None:
    """The loop of a rank's process: functions in, results out, until the pipe is closed."""
    bind(lifeline)
    gc.freeze()  # collections skip the fork server's objects, whose pages would be copied
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(threads)
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            function, arguments = pickle.loads(message)
            answer = pickle.dumps((True, function(*arguments)))
        except Exception:  # any error of the function is sent to the parent as text
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _describe_exit(code: int | None) -> str:
    if code is None:
        return ""
    if code < 0:
        return f", killed by {signal.Signals(-code).name}"
    return f" with exit code {code}"


def _make_rank_error(failures: list[RankFailure], count: int) -> RankError:
    """The error of the first failure; the other failures follow, one line each."""
    first, *rest = failures
    others = "\n".join(
        f"rank {failure.rank}: {_last_traceback_line(failure.text)}" for failure in rest
    )
    return RankError(
        f"rank {first.rank} of {count} failed: {_last_traceback_line(first.text)}",
        ranks=tuple(failure.rank for failure in failures),
        trace=first.text.strip() if "\n" in first.text.strip() else None,
        others=others or None,
    )


def _last_traceback_line(text: str) -> str:
    """The line of a traceback with the exception."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if lines else text.strip()
