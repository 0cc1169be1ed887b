"""The functions that ranks run in test_health.py."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from fulgurite.errors import RankError
from fulgurite.parallel import Mesh, health
from fulgurite.parallel.collectives import all_reduce
from fulgurite.parallel.processes.workers import read_arguments, report_error

SECONDS_LATE = 0.01


def lose_rank(victim: int, how: str) -> tuple[str, float]:
    """One rank is killed or stopped between two collectives. The others: the error, and when."""
    health.HEARTBEAT_TIMEOUT = 2.0
    with Mesh(tensor=2, timeout=10) as mesh:  # its close waits so long for a stopped rank
        assert mesh.health is not None
        mesh.health.diagnosis_timeout = 2.0
        all_reduce(torch.ones(1), mesh.world)
        if mesh.rank == victim:
            time.sleep(0.7)  # its last heartbeat knows of the first collective
            os.kill(os.getpid(), getattr(signal, how))
        start = time.monotonic()
        try:
            all_reduce(torch.ones(1), mesh.world, "second sum")
        except RankError as error:
            return str(error), time.monotonic() - start
    return "no error", 0.0


def lose_rank_at_start(call: str, number: int) -> None:
    """Rank 1 is killed in a call of torch.distributed. Rank 0 raises what it knew, and makes new groups."""
    if os.environ["RANK"] == "1":
        real, calls = getattr(dist, call), itertools.count(1)

        def die(*arguments: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        setattr(dist, call, die)
    start = time.monotonic()
    try:
        Mesh(tensor=2, timeout=60)
    except RankError as error:
        seconds, text = time.monotonic() - start, error.what
        # While the call that was given up still waits in its thread.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(1), group=dist.new_group([0]))
        dist.destroy_process_group()
        raise ValueError(f"soon: {seconds < 20}; {text}") from None


def work_for_long(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def get_stuck(victim: int) -> tuple[str, float]:
    """One rank computes for longer than the timeout; its heartbeats go on."""
    with Mesh(tensor=2, timeout=2) as mesh:
        all_reduce(torch.ones(1), mesh.world)
        start = time.monotonic()
        if mesh.rank == victim:
            work_for_long(6.0)
        try:
            all_reduce(torch.ones(1), mesh.world, "second sum")
        except RankError as error:
            return str(error), time.monotonic() - start
    return "no error", 0.0


def come_late(victim: int) -> tuple[list[health.RankTime], list[str], str]:
    """One rank works longer in every step. Rank 0: times, warnings, and times before any step."""
    health.COMPARE_INTERVAL = 0.5
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("fulgurite").addHandler(handler)
    with Mesh(tensor=2, timeout=30) as mesh:
        assert mesh.health is not None
        before = str(mesh.health.read_times())
        for _ in range(2 * health.SLOW_STEPS + 20):
            mesh.health.run_collective("begin", Done, on_host=True, begins_step=True)
            time.sleep(SECONDS_LATE if mesh.rank == victim else 0.0)
            all_reduce(torch.ones(1), mesh.world)
        time.sleep(2.0)  # a comparison, at the latest
        times = [*mesh.health.read_times()]
        all_reduce(torch.ones(1), mesh.world)  # nobody leaves before
    return times, warnings, before


class Done:
    """A collective that is complete."""

    def wait(self, timeout: object) -> None:
        return None


def exit_before_the_mesh(victim: int) -> tuple[str, float]:
    """A rank ends before it opens its mesh; the other waits in the start."""
    start = time.monotonic()
    if int(os.environ["RANK"]) == victim:
        os._exit(3)
    try:
        with Mesh(tensor=2, timeout=60):
            return "no error", 0.0
    except RankError as error:
        return str(error), time.monotonic() - start


def main() -> None:
    """A worker process: it raises the error that its arguments name, or sleeps."""
    arguments = read_arguments().decode()
    if arguments == "sleep":
        time.sleep(120)
    try:
        raise ValueError(arguments)
    except ValueError as error:
        report_error(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
