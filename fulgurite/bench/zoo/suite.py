"""Suite `zoo`: models that nobody here chose, inference and a training step, against eager.

In: a device, and which models (`--only`, `--shard`, `--quick`), of which size and batch. Out: a row per model and mode.
Each row is measured in its own process with a time limit and a memory limit: a crash is a row. Rows are saved as they
come; `--resume` keeps the rows of the file that passed, and measures the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from fulgurite.bench import results
from fulgurite.bench.zoo.candidates import COMPILERS
from fulgurite.bench.zoo.catalog import MODES, missing_packages, select
from fulgurite.bench.zoo.pool import measure_rows, start_server
from fulgurite.bench.zoo.sizes import SIZES, choose_sizes
from fulgurite.bench.zoo.tables import SETTLED, format_row, format_summary, row_key
from fulgurite.bench.zoo.worker import Job, Row
from fulgurite.errors import ArgumentError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MEMORY_LIMIT = 12 << 30


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        metavar="PATTERN",
        help="models whose package/name or family matches",
    )
    parser.add_argument("--shard", metavar="I/N", help="every N-th model, from the I-th")
    parser.add_argument("--resume", action="store_true", help="keep passed rows of the output file")
    parser.add_argument("--mode", metavar="MODE", help=f"only one of {', '.join(MODES)}")
    parser.add_argument("--size", choices=list(SIZES), default="small", help="of the models")
    parser.add_argument(
        "--batch", type=int, action="append", metavar="N", help="batch size; may be repeated"
    )
    parser.add_argument(
        "--layers", type=int, metavar="N", help="at most, of transformers models (default: 12)"
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="default: float32; bfloat16 at the default size"
    )
    parser.add_argument(
        "--compare", action="append", default=[], choices=list(COMPILERS), help="time it as well"
    )
    parser.add_argument(
        "--check-only", action="store_true", help="compare results, time nothing but first calls"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes; each times alone"
    )
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="S", help="seconds for a model and mode"
    )
    parser.add_argument(
        "--timing-budget", type=float, default=1.0, metavar="S", help="seconds for a candidate"
    )
    parser.add_argument(
        "--budget", type=float, default=math.inf, metavar="S", help="stop after so many seconds"
    )
    parser.add_argument("--print-json", action="store_true", help="print each row as a JSON line")
    parser.add_argument(
        "--merge", metavar="FILE", nargs="+", help="only add rows printed by --print-json"
    )


def run_zoo(options: argparse.Namespace) -> None:
    """Measure the chosen models, print and save the rows."""
    if options.mode not in (None, *MODES):
        raise ArgumentError(f"--mode {options.mode} is unknown", next=f"one of {', '.join(MODES)}")
    path = results.default_path("zoo", options.device, options.output)
    if options.merge:
        return _merge(options, path)
    deadline = time.perf_counter() + options.budget
    rows = _read_rows(path) if options.resume else []
    rows = [row for row in rows if row["status"] in SETTLED]
    jobs = make_jobs(options, {row_key(row) for row in rows})
    if options.print_json:
        machine = results.describe_machine(options.device)
        print(json.dumps({"machine": machine, "device": options.device}))
    for row in measure_rows(jobs, options.workers, options.time_limit, deadline, start_server()):
        print(json.dumps(row) if options.print_json else format_row(row), flush=True)
        rows.append(row)
        results.save_results("zoo", options.device, rows, str(path))
    print(format_summary(rows))
    print(f"written to {path}")


def make_jobs(options: argparse.Namespace, done: set[tuple[Any, ...]]) -> list[Job]:
    """The jobs of the chosen models, modes and batch sizes, without the rows that are done."""
    models = select(options.only, options.shard, options.quick)
    missing = missing_packages(models)
    for package, reason in missing.items():
        print(f"{package}: its models are left out: {reason}")
    modes = [options.mode] if options.mode else MODES
    folder = Path(tempfile.mkdtemp(prefix="fulgurite-zoo-"))
    chosen = [model for model in models if model.package not in missing]
    jobs = [
        Job(
            model=model,
            mode=mode,
            device=options.device,
            dtype=_choose_dtype(options),
            compare=tuple(options.compare),
            timing_budget=0.0 if options.check_only else options.timing_budget,
            # CUDA reserves address space
            memory_limit=0 if options.device.startswith("cuda") else MEMORY_LIMIT,
            log=os.path.join(folder, f"{model.name}-{mode}-{batch}.log"),
            sizes=choose_sizes(options.size, batch, options.layers),
        )
        for model, mode, batch in itertools.product(chosen, modes, options.batch or [None])
    ]
    return [job for job in jobs if row_key(job.describe()) not in done]


def _choose_dtype(options: argparse.Namespace) -> torch.dtype:
    if options.dtype:
        return DTYPES[options.dtype]
    on_gpu = options.device.startswith("cuda")
    return torch.bfloat16 if on_gpu and options.size == "default" else torch.float32


def _read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _merge(options: argparse.Namespace, path: Path) -> None:
    """Add rows that a run elsewhere printed; a row replaces the one of the same model, mode and sizes."""
    rows = {row_key(row): row for row in _read_rows(path)}
    machine: dict[str, Any] = {}
    for source in options.merge:
        for line in Path(source).read_text(encoding="utf-8", errors="replace").splitlines():
            content = json.loads(line) if line.startswith(('{"machine":', '{"package":')) else {}
            if content.get("device") != options.device:
                continue
            machine = content.get("machine", machine)
            if "package" in content:
                rows[row_key(content)] = content
    if not machine:
        raise ArgumentError(
            f"no output of --print-json with --device {options.device}",
            next="give files with the saved output of such a run",
        )
    chosen = sorted(rows.values(), key=row_key)
    results.write_content(path, {"machine": machine, "rows": chosen})
    print(format_summary(chosen))
    print(f"written to {path}")
