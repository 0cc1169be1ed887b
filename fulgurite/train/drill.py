"""The fault drill: the same run undisturbed and with random `kill -9`, and the hashes of both.

    report = run_drill(config, 2, train, kills=4, seed=0)

In: a deterministic configuration, a number of ranks, the function that trains. Out: `DrillReport`: the
hashes of the final weights and of the whole final state, the kills, and whether all losses are equal.

A kill hits a random rank at a random moment after a (re)start: also while ranks start, load, save or wait
for each other. The ranks and the moments follow the seed; at which instruction a moment falls does not.
"""

from __future__ import annotations

import json
import math
import os
import random
import select
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from fulgurite.errors import ArgumentError, RankError
from fulgurite.train.checkpoint import hash_state, list_checkpoints, read_checkpoint
from fulgurite.train.config import TrainConfig
from fulgurite.train.rank_group import RankGroup, RunFunction
from fulgurite.train.receipt import LINES, parse_lines, read_lines, summarize
from fulgurite.train.supervisor import supervise

DEFAULT_KILLS = 4
START_SHARE = 0.25  # of the kills come before the first step: in the start or the load of a rank
POLL = 0.001  # seconds between two looks at a heartbeat


@dataclass(frozen=True)
class Kill:
    """One kill: which rank, when after the (re)start, and what was done by then."""

    rank: int
    seconds: float
    step: int | None

    def describe(self) -> str:
        done = "before its first step" if self.step is None else f"after step {self.step}"
        return f"rank {self.rank}, {self.seconds:.1f} s after a start, {done}"


@dataclass(frozen=True)
class Pace:
    """How fast the undisturbed run was: seconds to its first step and of a step, and its steps."""

    first_step: float
    step: float
    steps: int


@dataclass(frozen=True)
class FinalState:
    """Hashes of a finished run, which do not depend on ranks or files."""

    step: int
    weights: str
    everything: str
    losses: dict[str, str]


@dataclass(frozen=True)
class DrillReport:
    """What a drill found."""

    undisturbed: FinalState
    disturbed: FinalState
    kills: tuple[Kill, ...]

    @property
    def differing_steps(self) -> list[int]:
        """Steps whose losses differ in a bit, or that only one run has."""
        first, second = self.undisturbed.losses, self.disturbed.losses
        steps = first.keys() | second.keys()
        return sorted(int(step) for step in steps if first.get(step) != second.get(step))

    @property
    def has_passed(self) -> bool:
        first, second = self.undisturbed, self.disturbed
        is_equal = first.everything == second.everything and not self.differing_steps
        return is_equal and bool(self.kills)

    def describe(self) -> str:
        lines = [f"{len(self.kills)} kills:"]
        lines += [f"  {kill.describe()}" for kill in self.kills]
        lines.append(
            f"undisturbed   step {self.undisturbed.step}, weights {self.undisturbed.weights}"
        )
        lines.append(f"disturbed     step {self.disturbed.step}, weights {self.disturbed.weights}")
        if self.has_passed:
            count = len(self.undisturbed.losses)
            lines.append(f"passed: weights, optimizer and {count} losses are equal to the bit")
        elif self.differing_steps:
            lines.append(f"FAILED: losses differ from step {self.differing_steps[0]} on")
        elif not self.kills:
            lines.append("FAILED: no rank was killed; the run is too short for a drill")
        else:
            lines.append("FAILED: the final states differ")
        return "\n".join(lines)


class Stopwatch:
    """Times an undisturbed run: until its first step, and a step. `watch` is an `on_start`."""

    def __init__(self) -> None:
        self.first_step = 0.0  # seconds from the start of the processes
        self.started = 0.0

    def watch(self, group: RankGroup) -> None:
        self.started = time.monotonic()
        threading.Thread(target=self._measure, args=(group,), daemon=True).start()

    def _measure(self, group: RankGroup) -> None:
        if wait_for_step(group, 0, 1):
            self.first_step = time.monotonic() - self.started

    def seconds_a_step(self, steps: int) -> float:
        return max(0.0, time.monotonic() - self.started - self.first_step) / max(1, steps)


def wait_for_step(group: RankGroup, rank: int, step: int, seconds: float = math.inf) -> bool:
    """Wait until a rank has done a step, but not longer; False if its process ended before."""
    process, deadline = os.pidfd_open(group.pids[rank]), time.monotonic() + seconds
    try:
        while True:
            beat = group.beats()[rank]
            if (beat is not None and beat.step >= step) or time.monotonic() >= deadline:
                return True
            has_ended, _, _ = select.select([process], [], [], POLL)
            if has_ended:
                return False
    finally:
        os.close(process)


class Killer:
    """Kills random ranks at random moments; `watch` is the `on_start` of a supervisor.

    A moment is in the time before the first step, or in the step after a random one that is left. It
    comes at the latest when that step is done: these ranks may be faster than the undisturbed ones.
    """

    def __init__(self, count: int, seed: int, pace: Pace) -> None:
        self.left, self.pace = count, pace
        self.random = random.Random(seed)
        self.kills: list[Kill] = []

    def watch(self, group: RankGroup) -> None:
        """Plan one kill for these processes, unless all kills are done."""
        if self.left <= 0:
            return
        done = find_newest_step(group.folder)
        rank = self.random.randrange(group.count)
        step, seconds = 0, self.random.uniform(0.0, self.pace.first_step)
        if self.random.random() >= START_SHARE:
            step = self.random.randint(done + 1, max(done + 1, self.pace.steps - 1))
            seconds = self.random.uniform(0.0, self.pace.step)
        threading.Thread(
            target=self._kill,
            args=(group, rank, step, seconds),
            name="fulgurite-drill",
            daemon=True,
        ).start()

    def _kill(self, group: RankGroup, rank: int, step: int, seconds: float) -> None:
        """Kill a process, given by its descriptor: a number could belong to another one by then."""
        process, started = os.pidfd_open(group.pids[rank]), time.monotonic()
        try:
            if step and not wait_for_step(group, rank, step):
                return
            if not wait_for_step(group, rank, step + 1, seconds):
                return
            beat = group.beats()[rank]
            signal.pidfd_send_signal(process, signal.SIGKILL)
            self.left -= 1
            done = None if beat is None else beat.step
            self.kills.append(Kill(rank, time.monotonic() - started, done))
        finally:
            os.close(process)


def find_newest_step(folder: Path) -> int:
    checkpoints = list_checkpoints(folder / "checkpoints")
    return checkpoints[-1][0] if checkpoints else 0


def run_drill(
    config: TrainConfig,
    ranks: int,
    run: RunFunction,
    *,
    kills: int = DEFAULT_KILLS,
    seed: int = 0,
) -> DrillReport:
    """Run a configuration twice, in `undisturbed/` and `disturbed/` of its folder, and compare."""
    config = _prepare(config, kills)
    assert config.output is not None, "_prepare has checked it"
    folder = Path(config.output)
    stopwatch = Stopwatch()
    undisturbed = _run(config, folder / "undisturbed", ranks, run, stopwatch.watch)
    steps = undisturbed.step
    killer = Killer(kills, seed, Pace(stopwatch.first_step, stopwatch.seconds_a_step(steps), steps))
    disturbed = _run(config, folder / "disturbed", ranks, run, killer.watch)
    report = DrillReport(undisturbed, disturbed, tuple(killer.kills))
    _write_report(folder / "drill.json", report)
    return report


def _prepare(config: TrainConfig, kills: int) -> TrainConfig:
    if config.output is None:
        raise ArgumentError("a drill has no folder", next="set output")
    if kills < 1:
        raise ArgumentError(f"a drill with {kills} kills is none", next="kill at least once")
    if not config.deterministic:
        raise ArgumentError(
            "a drill compares bits, and this run is not deterministic",
            next="set deterministic = true",
        )
    restarts = max(config.checkpoint.max_restarts, kills + 1)
    return replace(config, checkpoint=replace(config.checkpoint, max_restarts=restarts))


def _run(
    config: TrainConfig,
    folder: Path,
    ranks: int,
    run: RunFunction,
    on_start: Callable[[RankGroup], None],
) -> FinalState:
    shutil.rmtree(folder, ignore_errors=True)
    own = replace(config, output=str(folder))
    status = supervise(own, ranks, run, on_start)
    if status:
        raise RankError(f"the drill was stopped with status {status}", next="run it again")
    return read_final_state(folder)


def read_final_state(folder: Path) -> FinalState:
    """The hashes of the newest checkpoint of a run, and its losses."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    if not checkpoints:
        raise ArgumentError(f"{folder} has no checkpoint", next="let the run save at its end")
    step, path = checkpoints[-1]
    state = read_checkpoint(path)
    weights = {name: value for name, value in state.items() if name.startswith("model.")}
    losses: dict[str, str] = {}
    if (folder / LINES).exists():
        losses = summarize(parse_lines(read_lines(folder)))["losses"]
    return FinalState(step, hash_state(weights), hash_state(state), losses)


def _write_report(path: Path, report: DrillReport) -> None:
    fields = {
        "has_passed": report.has_passed,
        "weights": [report.undisturbed.weights, report.disturbed.weights],
        "states": [report.undisturbed.everything, report.disturbed.everything],
        "differing_steps": report.differing_steps,
        "kills": [kill.describe() for kill in report.kills],
    }
    path.write_text(json.dumps(fields, indent=1), encoding="utf-8")
