"""Ranks on one machine: N processes that run a function together, and end together.

    results = launch(train, 4, config)          one call, a list with one result a rank

    with Ranks(4) as ranks:                      the same processes for several calls
        first = ranks.run(step, 1)
        second = ranks.run(step, 2)

A function is named by its module, so it must be importable; arguments and results are pickled. If one
rank fails, the others get `grace` seconds to fail on their own (they usually can say why), then all are
killed, and the error has what each of them said. Rank processes end when their parent does.

Processes come from a fork server that has imported torch once, so that the second rank costs no import.
The store they meet at lives in the parent: it outlasts any rank.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
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

PRELOAD = ["torch", "torch.distributed", "fulgurite.parallel.launch"]
GRACE = 15.0


def launch(
    function: Callable[..., Any], ranks: int, *arguments: Any, threads: int = 1
) -> list[Any]:
    """Call a function on `ranks` new processes; their results, by rank."""
    with Ranks(ranks, threads=threads) as running:
        return running.run(function, *arguments)


@dataclass(frozen=True)
class Failure:
    """What a rank said last, or how its process ended."""

    rank: int
    text: str


class Ranks:
    """Processes with RANK, WORLD_SIZE and a store set up, waiting for functions to run."""

    def __init__(self, count: int, *, threads: int = 1, grace: float = GRACE) -> None:
        if count < 1:
            raise ArgumentError(f"{count} ranks can't be started", next="start at least one")
        self.count, self.grace = count, grace
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            environment = dict(os.environ) | rank_environment(rank, count, self.store.port)
            process = context.Process(
                target=_serve, args=(theirs, environment, threads), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a function on every rank; RankError if any of them fails, after all have ended."""
        if not self.alive:
            raise RankError("these ranks have ended", next="start new ones: Ranks(count)")
        message = _message(function, arguments)
        for pipe in self.pipes:
            pipe.send_bytes(message)
        results, failures = self._collect()
        if failures:
            self.kill()
            raise _error(failures, self.count)
        return [results[rank] for rank in range(self.count)]

    def _collect(self) -> tuple[dict[int, Any], list[Failure]]:
        """Answers until all are there, or until `grace` seconds after the first failure."""
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = dict(enumerate(self.pipes))
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else deadline - time.monotonic()
            ready = wait(list(waiting.values()), left)
            if not ready:
                failures += [Failure(rank, "still running; killed") for rank in waiting]
                break
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                answer = self._receive(rank)
                del waiting[rank]
                if isinstance(answer, Failure):
                    failures.append(answer)
                    deadline = deadline or time.monotonic() + self.grace
                else:
                    results[rank] = answer[0]
        return results, failures

    def _receive(self, rank: int) -> tuple[Any] | Failure:
        try:
            answer = self.pipes[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            process = self.processes[rank]
            process.join(5)
            return Failure(rank, f"its process ended{_how(process.exitcode)}")
        try:
            worked, value = pickle.loads(answer)
        except Exception:  # a result's own code runs here, and may raise anything
            return Failure(rank, f"its result can't be read here\n{traceback.format_exc()}")
        return (value,) if worked else Failure(rank, value)

    def kill(self) -> None:
        """End every process, now."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        self.processes, self.pipes = [], []

    def close(self) -> None:
        """Let every process end; kill what has not after a moment."""
        for pipe in self.pipes:
            pipe.close()  # the end of its input
        deadline = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def __enter__(self) -> Ranks:
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


def rank_environment(rank: int, count: int, port: int) -> dict[str, str]:
    """What a mesh wants to find: this rank's place, and the store of the process that starts them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the parent's, no rank starts one
    }


def _message(function: Callable[..., Any], arguments: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # as pickle has them
        raise ArgumentError(
            f"{getattr(function, '__qualname__', function)} can't be sent to ranks: {error}",
            next="a function at the top of a module, and arguments that pickle",
        ) from error


def _end_with_parent() -> None:
    """However the parent ends: what a rank is in the middle of, nobody waits for any more."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a rank was started by somebody"
    parent.join()
    os._exit(1)


def _serve(pipe: Connection, environment: dict[str, str], threads: int) -> None:
    """What a rank's process does: functions in, results out, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, name="fulgurite-parent", daemon=True).start()
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
        except Exception:  # whatever a user's function raises travels to the parent as text
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _how(code: int | None) -> str:
    if code is None:
        return ""
    if code < 0:
        return f", killed by {signal.Signals(-code).name}"
    return f" with exit code {code}"


def _error(failures: list[Failure], count: int) -> RankError:
    """The failure that came first names the error; the others follow, a line each."""
    first, *rest = failures
    others = "\n".join(f"rank {failure.rank}: {_summary(failure.text)}" for failure in rest)
    return RankError(
        f"rank {first.rank} of {count} failed: {_summary(first.text)}",
        ranks=tuple(failure.rank for failure in failures),
        trace=first.text.strip() if "\n" in first.text.strip() else None,
        others=others or None,
    )


def _summary(text: str) -> str:
    """The line of a traceback that says what was raised."""
    lines = [line for line in text.strip().splitlines() if line and not line.startswith(" ")]
    return lines[-1] if lines else text.strip()
