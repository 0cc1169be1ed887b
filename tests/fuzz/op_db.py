"""`scripts/fuzz --opdb`: torch's operator database, every operator, dtype and sample, in worker processes.

In: a device and a shard. Out: a JSON file with one entry per operator, dtype and direction: `pass`, `fail`,
`skip` (eager refuses all samples, or there are none), `dies` or `slow`, with the sample and the reason. A
device-side assert ends a process: its samples are then run one by one. The order is random and always the
same, so that any part of the run is a fair sample.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
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
from tests.fuzz.check import CUDA_ERROR, error_line
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
SECONDS_TO_END = 20  # after the time limit, for the units that still run
UNITS_PER_PROCESS = 200
FOLDER = Path("fuzz-findings")
ERRORS = (AssertionError, RuntimeError, TypeError, ValueError, IndexError, KeyError, FulguriteError)


@dataclass(frozen=True)
class Unit:
    """One operator in one dtype, with or without gradients.

    only    one of its samples
    eager   only run it in eager, to see whether that ends the process
    """

    name: str
    dtype: str
    gradient: bool
    only: int | None = None
    eager: bool = False

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
            eager, ours = calls(setting, None), calls(setting, None)
            if unit.eager:
                run_eager(setting, eager[unit.only :][:1])
                eager = []
            for members in groups(len(eager), unit.only):
                run_group(setting, members, eager, ours, outcome)
            exit_if_lost(None)
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


def groups(count: int, only: int | None) -> Iterator[list[int]]:
    if only is not None:
        yield [only] if only < count else []
        return
    for start in range(0, count, GROUP):
        yield list(range(start, min(start + GROUP, count)))


def run_group(
    setting: Setting, members: list[int], eager: list[Call], ours: list[Call], outcome: Outcome
) -> None:
    """Compare these samples as one graph; if that fails, each alone, from fresh samples."""
    if len(members) > 1:
        try:
            compare(setting, [eager[n] for n in members], [ours[n] for n in members])
            outcome.samples += len(members)
            return
        except ERRORS as error:
            exit_if_lost(error)
    fresh = [calls(setting, None) for _ in range(3)]
    for number in members:
        run_sample(setting, number, [samples[number] for samples in fresh], outcome)


def run_eager(setting: Setting, samples: list[Call]) -> None:
    with contextlib.suppress(*ERRORS):
        execute(program(setting.op.op), samples, setting.gradient)
    exit_if_lost(None)


def run_sample(setting: Setting, number: int, copies: list[Call], outcome: Outcome) -> None:
    """Compare one sample, unless eager refuses it. `copies`: three of it, for one run each."""
    alone, eager, ours = copies
    try:
        execute(program(setting.op.op), [alone], setting.gradient)
    except ERRORS as error:  # mostly: not implemented for this dtype or device
        exit_if_lost(error)
        outcome.refused += 1
        return
    outcome.samples += 1
    try:
        graphs = compare(setting, [eager], [ours])
        if not graphs and setting.op.formatted_name not in BREAKING:
            outcome.uncaptured += 1
    except ERRORS as error:
        exit_if_lost(error)
        detail = {"sample": number, "reason": error_line(error), "detail": str(error)[:600]}
        outcome.failures.append(detail)


def exit_if_lost(error: Exception | None) -> None:
    """End this process if it can't use its GPU any more."""
    text = str(error) if error and CUDA_ERROR.search(str(error)) else ""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as lost:
        text = text or str(lost)
    if text:
        print("Fatal: " + text.splitlines()[0], file=sys.stderr, flush=True)
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
        random.Random(0).shuffle(chosen)
        self.path = Path(options.output or FOLDER / f"opdb-{options.device}.json")
        self.outcomes = self.read_outcomes()
        shard = itertools.islice(chosen, int(index), None, int(count))
        self.units = [u for u in shard if (u.name, u.dtype, u.gradient) not in self.outcomes]
        self.left = iter(self.units)
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.saved = 0.0

    def read_outcomes(self) -> dict[Any, dict[str, Any]]:
        """What the output and the files of `--known` have, by unit."""
        files = [Path(name) for name in self.options.known]
        files += [self.path] if self.path.exists() and not self.options.fresh else []
        known = [o for file in files for o in json.loads(file.read_text())["outcomes"]]
        return {(o["name"], o["dtype"], o["gradient"]): o for o in known}

    @property
    def is_late(self) -> bool:
        return time.monotonic() - self.started > self.options.time

    def take(self) -> Unit | None:
        with self.lock:
            return None if self.is_late else next(self.left, None)

    def work(self, process: WorkerProcess) -> None:
        while (unit := self.take()) is not None:
            outcome = process.ask(asdict(unit), 2 * SECONDS_PER_UNIT)
            if outcome is None:
                outcome = self.isolate(process, unit)
            if outcome is not None:
                self.add(outcome)
        process.stop()

    def make_worker(self, number: int) -> WorkerProcess:
        options = self.options
        arguments = ["--device", options.device, f"--optimization={options.optimization}"]
        log = FOLDER / f"opdb-worker-{options.device}-{number}.log"
        return WorkerProcess(
            "tests.fuzz.op_db", arguments, log, UNITS_PER_PROCESS, options.autotune
        )

    def isolate(self, process: WorkerProcess, unit: Unit) -> dict[str, Any] | None:
        """Find the samples that end a process, but not in eager. None if the time ends."""
        whole = asdict(Outcome(unit.name, unit.dtype, unit.gradient, status="dies"))
        whole["failures"].append({"sample": None, "reason": f"dies: {process.last_words()}"})
        for number in range(200):
            if self.is_late:
                return None
            outcome = process.ask(asdict(replace(unit, only=number)), 2 * SECONDS_PER_UNIT)
            if outcome is None:
                reason = process.last_words()
                if process.ask(asdict(replace(unit, only=number, eager=True))) is None:
                    whole["refused"] += 1
                    continue
                whole["failures"].append({"sample": number, "reason": f"dies: {reason}"})
                if len(whole["failures"]) == 5:
                    break
            elif outcome["status"] == "skip" and not outcome["refused"]:
                break  # there are no more samples
            else:
                whole["samples"] += outcome["samples"]
                whole["refused"] += outcome["refused"]
                whole["failures"] += outcome["failures"]
        if whole["refused"] and len(whole["failures"]) == 1:  # only samples that end eager, too
            whole.update(status="pass" if whole["samples"] else "skip", failures=[])
        return whole

    def add(self, outcome: dict[str, Any]) -> None:
        with self.lock:
            self.outcomes[outcome["name"], outcome["dtype"], outcome["gradient"]] = outcome
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
        temporary.write_text(json.dumps({"outcomes": list(self.outcomes.values())}, indent=1))
        temporary.replace(self.path)

    def summary(self) -> str:
        counts = Counter(outcome["status"] for outcome in self.outcomes.values())
        samples = sum(outcome["samples"] for outcome in self.outcomes.values())
        parts = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        seconds = time.monotonic() - self.started
        return f"{parts}; {samples} samples; {len(self.units)} units asked for, {seconds:.0f} s"

    def run(self) -> int:
        FOLDER.mkdir(exist_ok=True)
        workers = [self.make_worker(number) for number in range(self.options.processes)]
        threads = [threading.Thread(target=self.work, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        end = self.started + self.options.time + SECONDS_TO_END
        for thread in threads:
            thread.join(min(max(0, end - time.monotonic()), threading.TIMEOUT_MAX))
        for worker in workers:  # those that still run a unit, which the next call will repeat
            worker.kill()
        for thread in threads:
            thread.join()
        self.save()
        print(self.summary())
        reasons = Counter(
            failure["reason"]
            for outcome in self.outcomes.values()
            if outcome["status"] in ("fail", "dies", "slow")
            for failure in outcome["failures"]
        )
        for reason, count in reasons.most_common(40):
            print(f"{count} × {reason}")
        bad = {"fail", "dies", "slow"} & {outcome["status"] for outcome in self.outcomes.values()}
        return 1 if bad else 0


if __name__ == "__main__":
    main()
