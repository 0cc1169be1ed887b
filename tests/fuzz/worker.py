"""A worker process of the fuzzer: ranges of seeds on stdin, results on stdout, as JSON lines.

Programs of one mode are merged and compiled as one; if that fails, each runs alone, and the ones that
fail are shrunk and saved. `command.py` starts workers, and restarts those that die.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.guards

from fulgurite import native
from fulgurite.executors import fuser as fuser_executor
from tests.fuzz.check import COVERAGE, Discard, Failure, check
from tests.fuzz.findings import Finding, save, script_path
from tests.fuzz.generate import draw_program
from tests.fuzz.oracle import Reference
from tests.fuzz.program import Program, merge
from tests.fuzz.shrink import shrink

BATCH = {"cpu": 12, "interpret": 4, "cuda": 6}  # programs that are compiled as one
DYNAMIC_BATCH = 3
VERIFIED_EVERY = 8  # traces of every eighth range of seeds are verified after every pass
GRAPH_BREAK = re.compile(r"masked_select|unique|bincount|nonzero|one_hot\([^,]*\)|\[[a-z]\d+ > 0\]")
SECONDS_PER_CHECK = 100
MAX_SHRUNK_PER_ERROR = 2  # findings with one error text that a worker shrinks


class TookTooLong(BaseException):
    """A check ran past its time limit."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise `TookTooLong` after so many seconds."""

    def stop(*_: Any) -> None:
        raise TookTooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@dataclass
class Report:
    """What became of a range of seeds."""

    first: int
    last: int
    programs: int = 0
    lines: int = 0
    seconds: float = 0.0
    discarded: dict[str, list[int]] = field(default_factory=dict)  # seeds, by the reason
    findings: list[Finding] = field(default_factory=list)
    ops: Counter[str] = field(default_factory=Counter)

    def discard(self, reason: str, seed: int) -> None:
        self.discarded.setdefault(reason, []).append(seed)


class Worker:
    """Checks ranges of seeds on one target."""

    def __init__(self, target: str, kinds: Sequence[str], folder: Path, batch: int | None) -> None:
        self.target, self.kinds, self.folder = target, kinds, folder
        self.batch = batch
        self.seen: Counter[str] = Counter()

    def run(self, first: int, last: int) -> Report:
        started = time.perf_counter()
        is_verified = last - first == 1 or first // (last - first) % VERIFIED_EVERY == 0
        os.environ["FULGURITE_VERIFY"] = str(int(is_verified))
        report = Report(first, last)
        groups: dict[Any, list[Program]] = {}
        for seed in range(first, last):
            program = draw_program(seed, self.kinds)
            if program is None:
                report.discard("nothing drawn", seed)
                continue
            if program.raises and self.target == "cuda":
                report.discard("an assert would end the process", seed)
                continue
            groups.setdefault(self.mode(program), []).append(program)
        if last - first == 1:  # the process may die: leave a script behind
            for (program,) in groups.values():
                save(program, Failure("dies", "the process ends", ""), self.target, self.folder)
        for programs in groups.values():
            size = self.batch_size(programs[0])
            for start in range(0, len(programs), size):
                self.check_batch(programs[start : start + size], report)
        report.seconds = time.perf_counter() - started
        report.ops.update(COVERAGE)
        COVERAGE.clear()
        if last - first == 1 and not report.findings:
            script_path(first, self.target, self.folder).unlink(missing_ok=True)
        return report

    def mode(self, program: Program) -> Any:
        """Programs of equal mode may be merged. Graph breaks make the capture of a merged one slow."""
        breaks = any(GRAPH_BREAK.search(line.text) for line in program.lines)
        alone = program.seed if program.raises or breaks else 0
        return program.dynamic, program.gradient, program.kind == "subclass", alone

    def batch_size(self, program: Program) -> int:
        usual = self.batch or BATCH[self.target]
        return usual if program.dynamic is False else min(usual, DYNAMIC_BATCH)

    def check_batch(self, programs: list[Program], report: Report) -> None:
        merged = merge(programs)
        try:
            failure = self.check(merged)
        except Discard:
            failure = Failure("discarded", "", "")
        if failure is None:
            self.count(programs, report)
            return
        if len(programs) == 1:
            self.check_alone(programs[0], report)
            return
        before = len(report.findings)
        for program in programs:
            self.check_alone(program, report)
        if len(report.findings) == before and failure.category != "discarded":
            self.report_failure(merged, failure, report)  # only together

    def check_alone(self, program: Program, report: Report) -> None:
        try:
            failure = self.check(program)
        except Discard as reason:
            report.discard(str(reason), program.seed)
            return
        self.count([program], report)
        if failure is not None:
            self.report_failure(program, failure, report)

    def count(self, programs: list[Program], report: Report) -> None:
        report.programs += len(programs)
        report.lines += sum(len(program.lines) for program in programs)

    def check(self, program: Program) -> Failure | None:
        """Check with a time limit."""
        try:
            with time_limit(SECONDS_PER_CHECK):
                return check(program, self.target)
        except TookTooLong:
            return Failure("hangs", f"more than {SECONDS_PER_CHECK} s", "")

    def report_failure(self, program: Program, failure: Failure, report: Report) -> None:
        self.seen[failure.what] += 1
        is_new = self.seen[failure.what] <= MAX_SHRUNK_PER_ERROR or failure.category != "raises"
        if is_new and failure.category != "hangs":
            save(program, failure, self.target, self.folder)  # the process may die while shrinking
            program, failure = shrink(program, failure, self.check_smaller)
        report.findings.append(save(program, failure, self.target, self.folder))

    def check_smaller(self, program: Program) -> Failure | None:
        """Check a program that the shrinker made: its indices may be out of range.

        On a GPU eager would end the process then. On the CPU it raises, and there is nothing to check.
        """
        if self.target == "cuda":
            for numbers in program.calls:
                Reference(replace(program, gradient=False), numbers, "cpu").run()
        return self.check(program)


def ignore_seeds_of_missing_devices(target: str) -> None:
    """torch.manual_seed keeps every seed of a device that is not in use, with a stack trace."""
    for kind in ("cuda", "xpu", "mtia"):
        if kind != target:
            getattr(torch, kind).manual_seed_all = lambda _: None


def set_up(target: str, optimization: str, cache: str) -> None:
    """Settings of this process: one thread, quiet, kernels in memory."""
    os.environ.update(
        FULGURITE_CACHE_DIR=cache,
        FULGURITE_REPRO_DIR=os.path.join(cache, "repro"),
        FULGURITE_STRICT="1",
        FULGURITE_VERIFY="0",
        TRITON_CACHE_DIR=os.path.join(cache, "triton"),
    )
    # TorchDynamo flushes the CPU's caches to measure the latency of guards
    torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    ignore_seeds_of_missing_devices(target)
    gc.freeze()  # what is imported is not searched for garbage again
    gc.set_threshold(20_000, 20, 50)
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if optimization:
        flags: Any = (*native.FLAGS, *optimization.split())
        native.FLAGS = flags
    if target == "interpret":
        from tests.fuser import triton_interpreter

        triton_interpreter.patch()
        fuser = fuser_executor.fuser
        fuser.can_fuse = functools.partial(fuser.can_fuse, use_triton=True)
        fuser.lower_region = functools.partial(fuser.lower_region, use_triton=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--optimization", default="")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what programs print is not an answer
    set_up(options.target, options.optimization, options.cache)
    worker = Worker(options.target, options.kinds.split(","), options.folder, options.batch)
    for line in sys.stdin:
        first, last = json.loads(line)
        report = vars(worker.run(first, last))
        report["findings"] = [asdict(finding) for finding in report["findings"]]
        answers.write(json.dumps(report) + "\n")
        answers.flush()
        torch._dynamo.reset()
        shutil.rmtree(os.path.join(options.cache, "cpp"), ignore_errors=True)


if __name__ == "__main__":
    main()
