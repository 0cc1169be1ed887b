"""`scripts/fuzz --opdb`: torch's operator database, every operator, dtype and sample, in worker processes.

In: a device and a shard. Out: a JSON file with one entry per operator, dtype and direction: `pass`, `fail`,
`skip` (eager refuses all samples, or there are none), `dies` or `slow`, with the sample and the reason. A
device-side assert ends a process: its samples are then run one by one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fulgurite.errors import FulguriteError
from tests.fuzz.check import error_line
from tests.fuzz.processes import WorkerProcess
from tests.fuzz.worker import TookTooLong, set_up, time_limit
from tests.suites.operator_database import (
    BREAKING,
    GROUP,
    OPS,
    Call,
    Setting,
    calls,
    compare,
    differentiable,
    execute,
    program,
)

EXECUTORS = ["fuser", "torch"]
SECONDS_PER_UNIT = 150
UNITS_PER_PROCESS = 200
FOLDER = Path("fuzz-findings")
ERRORS = (AssertionError, RuntimeError, TypeError, ValueError, IndexError, KeyError, FulguriteError)


@dataclass(frozen=True)
class Unit:
    """One operator in one dtype, with or without gradients. `only` is one of its samples."""

    name: str
    dtype: str
    gradient: bool
    only: int | None = None

    def setting(self, device: str) -> Setting:
        return Setting(OPS[self.name], getattr(torch, self.dtype), self.gradient, EXECUTORS, device)

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{' gradient' if self.gradient else ''}"


@dataclass
class Outcome:
    """What became of a unit."""

    name: str
    dtype: str
    gradient: bool
    status: str = "pass"
    samples: int = 0
    refused: int = 0
    uncaptured: int = 0
    failures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0


def all_units(device: str) -> Iterator[Unit]:
    """Every operator, dtype and direction that the database knows for a device."""
    for name in sorted(OPS):
        op = OPS[name]
        for dtype in sorted(op.supported_dtypes(device), key=str):
            text = str(dtype).removeprefix("torch.")
            yield Unit(name, text, False)
            if differentiable(op, dtype, device):
                yield Unit(name, text, True)


def run_unit(unit: Unit, device: str) -> Outcome:
    """Compare all samples of a unit, in groups; a group that fails, one by one."""
    started = time.perf_counter()
    outcome = Outcome(unit.name, unit.dtype, unit.gradient)
    setting = unit.setting(device)
    try:
        with time_limit(SECONDS_PER_UNIT):
            for members in groups(setting, unit.only):
                run_group(setting, members, outcome)
    except TookTooLong:
        outcome.failures.append({"sample": None, "reason": f"more than {SECONDS_PER_UNIT} s"})
        outcome.status = "slow"
    except ERRORS as error:  # of the database itself, which can't make its samples
        outcome.status = "skip"
        outcome.failures.append({"sample": None, "reason": error_line(error)})
    if outcome.status == "pass" and outcome.failures:
        outcome.status = "fail"
    elif outcome.status == "pass" and not outcome.samples:
        outcome.status = "skip"
    outcome.seconds = round(time.perf_counter() - started, 2)
    return outcome


def groups(setting: Setting, only: int | None) -> Iterator[list[int]]:
    count = len(calls(setting, None))
    if only is not None:
        yield [only] if only < count else []
        return
    for start in range(0, count, GROUP):
        yield list(range(start, min(start + GROUP, count)))


def run_group(setting: Setting, members: list[int], outcome: Outcome) -> None:
    def make() -> list[Call]:
        found = calls(setting, None)
        return [found[number] for number in members]

    if len(members) > 1:
        try:
            compare(setting, make(), make())
            outcome.samples += len(members)
            return
        except ERRORS as error:
            exit_if_lost(error)
    for number in members:
        run_sample(setting, number, outcome)


def run_sample(setting: Setting, number: int, outcome: Outcome) -> None:
    try:
        execute(program(setting.op.op), [calls(setting, None)[number]], setting.gradient)
    except ERRORS as error:  # mostly: not implemented for this dtype or device
        exit_if_lost(error)
        outcome.refused += 1
        return
    outcome.samples += 1
    try:
        ones, twos = calls(setting, None)[number], calls(setting, None)[number]
        graphs = compare(setting, [ones], [twos])
        if not graphs and setting.op.formatted_name not in BREAKING:
            outcome.uncaptured += 1
    except ERRORS as error:
        exit_if_lost(error)
        detail = {"sample": number, "reason": error_line(error), "detail": str(error)[:600]}
        outcome.failures.append(detail)


def exit_if_lost(error: Exception) -> None:
    """End this process if it can't use its GPU any more."""
    if "device-side assert" in str(error) or "CUDA error" in str(error):
        print("Fatal: " + str(error).splitlines()[0], file=sys.stderr, flush=True)
        os._exit(3)


# ---- the worker process --------------------------------------------------------------------------


def main() -> None:
    """Units on stdin, outcomes on stdout."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--optimization", default="")
    parser.add_argument("--cache", required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    set_up(options.device, options.optimization, options.cache)
    for line in sys.stdin:
        outcome = run_unit(Unit(**json.loads(line)), options.device)
        answers.write(json.dumps(asdict(outcome)) + "\n")
        answers.flush()


# ---- the command ---------------------------------------------------------------------------------


class OperatorDatabaseRun:
    """Gives units to workers until they or the time end, and writes the outcomes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        index, _, count = options.shard.partition("/")
        wanted = options.ops.split(",") if options.ops else None
        chosen = [u for u in all_units(options.device) if wanted is None or u.name in wanted]
        self.path = Path(options.output or FOLDER / f"opdb-{options.device}.json")
        self.outcomes: list[dict[str, Any]] = []
        if self.path.exists() and not options.fresh:
            self.outcomes = json.loads(self.path.read_text())["outcomes"]
        known = {(o["name"], o["dtype"], o["gradient"]) for o in self.outcomes}
        shard = itertools.islice(chosen, int(index), None, int(count))
        self.units = [u for u in shard if (u.name, u.dtype, u.gradient) not in known]
        self.left = iter(self.units)
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.saved = 0.0

    def take(self) -> Unit | None:
        with self.lock:
            late = time.monotonic() - self.started > self.options.time
            return None if late else next(self.left, None)

    def work(self, number: int) -> None:
        options = self.options
        arguments = ["--device", options.device, f"--optimization={options.optimization}"]
        log = FOLDER / f"opdb-worker-{options.device}-{number}.log"
        process = WorkerProcess("tests.fuzz.op_db", arguments, log, UNITS_PER_PROCESS)
        while (unit := self.take()) is not None:
            outcome = process.ask(asdict(unit))
            if outcome is None:
                outcome = self.isolate(process, unit)
            self.add(outcome)
        process.stop()

    def isolate(self, process: WorkerProcess, unit: Unit) -> dict[str, Any]:
        """Find the samples that end a process."""
        whole = asdict(Outcome(unit.name, unit.dtype, unit.gradient, status="dies"))
        for number in range(200):
            outcome = process.ask(asdict(replace(unit, only=number)))
            if outcome is None:
                reason = process.last_words()
                whole["failures"].append({"sample": number, "reason": f"dies: {reason}"})
                if len(whole["failures"]) == 5:
                    break
            elif outcome["status"] == "skip" and not outcome["refused"]:
                break  # there are no more samples
            else:
                whole["samples"] += outcome["samples"]
                whole["failures"] += outcome["failures"]
        return whole

    def add(self, outcome: dict[str, Any]) -> None:
        with self.lock:
            self.outcomes.append(outcome)
            for failure in outcome["failures"][:2] if outcome["status"] != "skip" else ():
                unit = Unit(outcome["name"], outcome["dtype"], outcome["gradient"])
                where = f"sample {failure['sample']}"
                print(
                    f"  {outcome['status']} {unit}, {where}: {failure['reason']}"[:200], flush=True
                )
            if time.monotonic() - self.saved > 20:
                self.saved = time.monotonic()
                self.save()
                print(self.summary(), flush=True)

    def save(self) -> None:
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({"outcomes": self.outcomes}, indent=1))
        temporary.replace(self.path)

    def summary(self) -> str:
        counts = Counter(outcome["status"] for outcome in self.outcomes)
        samples = sum(outcome["samples"] for outcome in self.outcomes)
        parts = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        seconds = time.monotonic() - self.started
        return f"{parts}; {samples} samples; {len(self.units)} units asked for, {seconds:.0f} s"

    def run(self) -> int:
        FOLDER.mkdir(exist_ok=True)
        threads = [
            threading.Thread(target=self.work, args=(number,))
            for number in range(self.options.processes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.save()
        print(self.summary())
        reasons = Counter(
            failure["reason"]
            for outcome in self.outcomes
            if outcome["status"] in ("fail", "dies", "slow")
            for failure in outcome["failures"]
        )
        for reason, count in reasons.most_common(40):
            print(f"{count} × {reason}")
        bad = {"fail", "dies", "slow"} & {outcome["status"] for outcome in self.outcomes}
        return 1 if bad else 0


if __name__ == "__main__":
    main()
