"""`scripts/fuzz`: many seeds, several worker processes, findings grouped by cause."""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.coverage import all_ops
from tests.fuzz.findings import script_path
from tests.fuzz.op_db import OperatorDatabaseRun
from tests.fuzz.processes import WorkerProcess
from tests.fuzz.templates import KINDS

CHUNK = 48  # seeds that a worker takes at once
CHUNKS_PER_PROCESS = 40  # afterwards a new process starts, because torch's caches grow
OPEN_END = 1 << 40
FOLDER = Path("fuzz-findings")


def parse_seeds(text: str) -> tuple[int, int]:
    """`A:B`, `A` alone, or `A:` without an end → the first seed and the one after the last."""
    first, colon, end = text.partition(":")
    if not colon:
        return int(first), int(first) + 1
    return int(first), int(end) if end else OPEN_END


@dataclass
class Totals:
    """What all workers did."""

    programs: int = 0
    lines: int = 0
    discarded: dict[str, list[int]] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)

    def add(self, report: dict[str, Any]) -> None:
        self.programs += report["programs"]
        self.lines += report["lines"]
        for reason, seeds in report["discarded"].items():
            self.discarded.setdefault(reason, []).extend(seeds)
        self.findings += report["findings"]
        self.ops.update(report["ops"])


class Run:
    """Gives ranges of seeds to workers until the seeds or the time end."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.target = "interpret" if options.interpret else options.device
        self.totals = Totals()
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.progress = FOLDER / f"progress-{self.target}.json"
        self.next, self.end = self._seeds()
        self.last_line = 0.0

    def _seeds(self) -> tuple[int, int]:
        if self.options.seeds:
            return parse_seeds(self.options.seeds)
        known = json.loads(self.progress.read_text()) if self.progress.exists() else {"next": 0}
        return int(known["next"]), OPEN_END

    def take(self, size: int) -> tuple[int, int] | None:
        """The next range of seeds; None at the end."""
        with self.lock:
            late = time.monotonic() - self.started > self.options.time
            if late or self.next >= self.end:
                return None
            first, self.next = self.next, min(self.next + size, self.end)
            return first, self.next

    def work(self, number: int) -> None:
        """One worker after another, until `take` has nothing left."""
        worker = self.make_worker(number)
        while (taken := self.take(CHUNK)) is not None:
            report = worker.ask(taken)
            if report is None:
                self.isolate(worker, taken)
            else:
                self.add(report)
        worker.stop()

    def make_worker(self, number: int) -> WorkerProcess:
        options = self.options
        arguments = ["--target", self.target, "--kinds", options.kinds, "--folder", str(FOLDER)]
        arguments += [f"--optimization={options.optimization}"]
        arguments += ["--batch", str(options.batch)] if options.batch else []
        environment = {"TRITON_INTERPRET": "1"} if self.target == "interpret" else {}
        log = FOLDER / f"worker-{self.target}-{number}.log"
        return WorkerProcess(
            "tests.fuzz.worker", arguments, log, CHUNKS_PER_PROCESS, options.autotune, **environment
        )

    def isolate(self, worker: WorkerProcess, taken: tuple[int, int]) -> None:
        """A worker died: run its seeds one by one, and report the ones that end the process."""
        found = False
        for seed in range(*taken):
            report = worker.ask((seed, seed + 1))
            if report is not None:
                self.add(report)
                continue
            found = True
            path = script_path(seed, self.target, FOLDER)  # its worker wrote it before it died
            self.add(self.death("alone", seed, worker.last_words(), str(path)))
        if not found:
            self.add(self.death(f"with the seeds up to {taken[1]}", taken[0], ""))

    def death(self, what: str, seed: int, words: str, path: str = "") -> dict[str, Any]:
        finding = dict(seed=seed, kind="", category="dies", what=f"{what}: {words}", path=path)
        finding["group"] = f"dies {words}"
        return dict(programs=0, lines=0, discarded={}, findings=[finding], ops={})

    def add(self, report: dict[str, Any]) -> None:
        with self.lock:
            self.totals.add(report)
            for finding in report["findings"]:
                print(
                    f"  {finding['path'] or finding['seed']}: {finding['group']}"[:220], flush=True
                )
            now = time.monotonic()
            if now - self.last_line > 20:
                self.last_line = now
                print(self.summary(), flush=True)

    def summary(self) -> str:
        seconds = time.monotonic() - self.started
        totals = self.totals
        rate = totals.programs / max(seconds, 1e-9)
        return (
            f"{totals.programs} programs, {totals.lines} lines, {seconds:.0f} s, {rate:.1f} programs/s, "
            f"{sum(map(len, totals.discarded.values()))} discarded, {len(totals.findings)} findings"
        )

    def run(self) -> int:
        FOLDER.mkdir(exist_ok=True)
        count = self.options.processes
        threads = [threading.Thread(target=self.work, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if not self.options.seeds:
            self.progress.write_text(json.dumps({"next": self.next}))
        self.print_groups()
        return 1 if self.totals.findings else 0

    def print_groups(self) -> None:
        print(self.summary())
        for reason, seeds in self.totals.discarded.items():
            print(f"  discarded {len(seeds)}: {reason}: {' '.join(map(str, seeds[:9]))}")
        ops = all_ops()
        missing = sorted(ops - self.totals.ops.keys())
        print(f"  {len(ops) - len(missing)} of {len(ops)} ops of the fuser's tables")
        if missing:
            print(f"  without: {' '.join(missing)}")
        groups: dict[str, list[dict[str, Any]]] = {}
        for finding in self.totals.findings:
            groups.setdefault(finding["group"], []).append(finding)
        for group, findings in sorted(groups.items(), key=lambda item: -len(item[1])):
            print(f"{len(findings)} × {group}")
            for finding in findings[:3]:
                print(f"    seed {finding['seed']}  {finding['path']}")
        report = dict(
            programs=self.totals.programs,
            lines=self.totals.lines,
            discarded=self.totals.discarded,
            findings=self.totals.findings,
            ops=self.totals.ops,
        )
        name = f"report-{self.target}-{self.options.seeds or 'continued'}.json".replace(":", "-")
        (FOLDER / name).write_text(json.dumps(report, indent=1))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument(
        "--seeds",
        help="A:B, A (one seed) or A: (until the time ends); without it, continue after the last run",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--interpret", action="store_true", help="Triton's interpreter on the CPU")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--time", type=float, default=1e9, help="seconds")
    parser.add_argument("--kinds", default=",".join(KINDS), help="comma-separated; default: all")
    parser.add_argument("--batch", type=int, help="programs that are compiled as one")
    parser.add_argument(
        "--optimization",
        default="",
        help="more flags of the C++ compiler, for example -O1",
    )
    parser.add_argument(
        "--autotune",
        action="store_true",
        help="time regions as users' calls do; those that are slower than torch fall back",
    )
    database = parser.add_argument_group("the operator database instead of random programs")
    database.add_argument("--opdb", action="store_true")
    database.add_argument(
        "--shard", default="0/1", help="i/n: every n-th operator and dtype from i"
    )
    database.add_argument("--ops", help="comma-separated names of the database; default: all")
    database.add_argument("--output", help="default: fuzz-findings/opdb-DEVICE.json")
    database.add_argument(
        "--known", nargs="*", default=[], help="results of other runs, which go into the output"
    )
    database.add_argument("--fresh", action="store_true", help="forget what the output has")
    options = parser.parse_args(arguments)
    unknown = set(options.kinds.split(",")) - KINDS.keys()
    if unknown:
        parser.error(f"unknown kinds {', '.join(unknown)}; there are {', '.join(KINDS)}")
    try:
        first, end = parse_seeds(options.seeds or "0:")
    except ValueError:
        parser.error(f"--seeds {options.seeds}: write A:B, A or A:, for example 0:1000")
    if first < 0 or end <= first:
        parser.error(f"--seeds {options.seeds} has no seeds; write A:B with 0 <= A < B")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    return OperatorDatabaseRun(options).run() if options.opdb else Run(options).run()


if __name__ == "__main__":
    sys.exit(main())
