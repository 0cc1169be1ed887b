"""Suite `zoo`: models that nobody here chose, inference and a training step, against eager.

In: a device, and which models (`--only`, `--shard`, `--quick`). Out: a row per model and mode. Each row is measured in
its own process with a time limit and a memory limit: a crash is a row. Rows are saved as they come; `--resume` keeps
the rows of the file that passed, and measures the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fulgurite.bench import results
from fulgurite.bench.measure import geomean
from fulgurite.bench.zoo.catalog import MODES, ZooModel, missing_packages, select
from fulgurite.bench.zoo.worker import Job, Row, run_job

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_LIMIT = 12 << 30
# rows that --resume does not measure again; all but `pass` say nothing about the compiler
SETTLED = ("pass", "unavailable", "eager fails", "eager varies", "eager inexact")
LOG_CHARACTERS = 600  # of a crashed process's output, in its row


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("suite zoo")
    group.add_argument(
        "--only", metavar="PATTERN", help="models whose package/name or family matches"
    )
    group.add_argument("--shard", metavar="I/N", help="every N-th model, from the I-th")
    group.add_argument("--resume", action="store_true", help="keep passed rows of the output file")
    group.add_argument("--mode", choices=MODES, help="only inference, or only the training step")
    group.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    group.add_argument(
        "--compare", action="append", default=[], choices=["torch_compile"], help="time it as well"
    )
    group.add_argument(
        "--time-limit", type=float, default=300.0, metavar="S", help="seconds for a model and mode"
    )


def run_zoo(options: argparse.Namespace) -> None:
    """Measure the chosen models, print and save the rows."""
    models = select(options.only, options.shard, options.quick)
    missing = missing_packages(models)
    for package, reason in missing.items():
        print(f"{package}: its models are left out: {reason}")
    path = results.default_path("zoo", options.device, options.output)
    rows = _settled_rows(path) if options.resume else []
    done = {(row["package"], row["model"], row["mode"]) for row in rows}
    server = start_server()
    for model in models:
        for mode in [options.mode] if options.mode else MODES:
            if model.package in missing or (model.package, model.name, mode) in done:
                continue
            row = measure_row(_make_job(model, mode, options), options.time_limit, server)
            print(format_row(row), flush=True)
            rows.append(row)
            results.save_results("zoo", options.device, rows, str(path))
    print(format_summary(rows))
    print(f"written to {path}")


def _settled_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["status"] in SETTLED]


def _make_job(model: ZooModel, mode: Any, options: argparse.Namespace) -> Job:
    on_gpu = options.device.startswith("cuda")
    return Job(
        model=model,
        mode=mode,
        device=options.device,
        dtype=DTYPES[options.dtype],
        compare=tuple(options.compare),
        timing_budget=0.2 if options.quick else 1.0,
        memory_limit=0 if on_gpu else MEMORY_LIMIT,  # CUDA reserves address space
        log=os.path.join(tempfile.gettempdir(), f"fulgurite-zoo-{os.getpid()}.log"),
    )


# ---- processes -----------------------------------------------------------------------------------


def start_server() -> Any:
    """A context whose processes are forked from one that has imported the packages."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fulgurite.bench.zoo.preload"])
    return context


def measure_row(job: Job, time_limit: float, context: Any, run: Any = run_job) -> Row:
    """The row of a job from a process of its own; its end without a row is a row as well."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(job, sender))
    start = time.perf_counter()
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(time_limit) else None
        status = "timeout"
    except EOFError:  # it ended without a row
        row, status = None, "crashed"
    finally:
        _end(process)
    if row is None:
        about = (
            f"after {time_limit:.0f} s" if status == "timeout" else _crash_reason(process.exitcode)
        )
        model = job.model
        row = {"package": model.package, "family": model.family, "model": model.name}
        row |= {"mode": job.mode, "status": status, "error": f"{about}: {_log_tail(job)}"}
    row["seconds"] = time.perf_counter() - start
    return row


def _end(process: Any) -> None:
    """Wait shortly, then kill the process and the compilers that it started."""
    process.join(2)
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # before its setsid
            process.kill()
        process.join()


def _crash_reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"signal {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


def _log_tail(job: Job) -> str:
    log = Path(job.log)
    if not log.exists():
        return ""
    return log.read_text(encoding="utf-8", errors="replace")[-LOG_CHARACTERS:].strip()


# ---- tables --------------------------------------------------------------------------------------


def format_row(row: Row) -> str:
    """One line, printed as the row comes."""
    line = f"{row['package']}/{row['model']} {row['mode']}: {row['status']}"
    if "first_s" in row:
        line += f", first call {row['first_s']:.1f} s, {row.get('graph_breaks', 0)} graph breaks"
    if row.get("fallbacks"):
        line += f", {len(row['fallbacks'])} fallbacks"
    if "fulgurite_ms" in row:
        line += f", {row['eager_ms'] / row['fulgurite_ms']:.2f}x eager"
    if row.get("error"):
        line += f"\n    {row['error']}"
    return line


def format_summary(rows: list[Row]) -> str:
    """Counts by group and mode, and the geometric mean of the times against eager."""
    head = ["group", "mode", "models", "eager runs", "pass", "fail", "graph breaks", "fallbacks"]
    head += ["first call", "× eager", "× compile"]
    body = []
    for group in dict.fromkeys(map(group_of, rows)):
        for mode in MODES:
            if chosen := [r for r in rows if group_of(r) == group and r["mode"] == mode]:
                body.append([group, mode, *_summarize(chosen)])
    body.append(["all", "", *_summarize(rows)])
    return results.format_table([head, *body])


def group_of(row: Row) -> str:
    """`timm`, `torchvision`, or `transformers TASK`."""
    package = row["package"]
    return f"{package} {row['family']}" if package == "transformers" else package


def _summarize(rows: list[Row]) -> list[str]:
    counts = Counter(row["status"] for row in rows)
    checked = len(rows) - sum(counts[one] for one in SETTLED if one != "pass")
    firsts = sorted(row["first_s"] for row in rows if "first_s" in row)
    line = [len(rows), checked, counts["pass"], checked - counts["pass"]]
    line += [sum(row.get("graph_breaks", 0) for row in rows)]
    line += [sum(len(row.get("fallbacks", [])) for row in rows)]
    return [
        *map(str, line),
        f"{firsts[len(firsts) // 2]:.1f} s" if firsts else "",
        _format_speed(rows, "eager_ms"),
        _format_speed(rows, "torch_compile_ms"),
    ]


def _format_speed(rows: list[Row], baseline: str) -> str:
    ratios = [row[baseline] / row["fulgurite_ms"] for row in rows if row.get(baseline)]
    return f"{geomean(ratios):.2f}" if ratios else ""
