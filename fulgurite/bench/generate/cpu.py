"""Suite `generate` on the CPU, against llama.cpp and transformers. The GPU part is in `gpu.py`.

In: the file of the embedded model. Out, for each engine and number of threads: prefill and decode tokens per second,
time to first token and peak memory; and decode with several concurrent requests.

Each engine runs in its own process with the same file, threads, prompt and number of tokens; they take turns.
llama.cpp is measured through llama-cpp-python, in this interpreter or the one that FULGURITE_LLAMA_PYTHON names.
transformers runs a model of the same shape in float32 with random weights, which take the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from typing import Any

from rich.progress import Progress

from fulgurite.bench import results
from fulgurite.bench.generate import engines
from fulgurite.bench.generate.gpu import run_generate_gpu
from fulgurite.bench.generate.model import run_generate_model
from fulgurite.config import read_env
from fulgurite.errors import ArgumentError
from fulgurite.models.loading import hub

PROMPT_TOKENS, NEW_TOKENS = 256, 48
ROUNDS = 2
BATCHES = (1, 4, 16)
ENGINES = ("fulgurite", "llama.cpp", "transformers")


def run_generate(options: argparse.Namespace) -> None:
    """Suite `generate`."""
    if options.model is not None:
        return run_generate_model(options)
    if options.device != "cpu":
        return run_generate_gpu(options)
    rounds = 1 if options.quick else ROUNDS
    cores = len(os.sched_getaffinity(0))
    work = [(n, e) for n in sorted({1, min(2, cores)}) for _ in range(rounds) for e in ENGINES]
    seen: dict[tuple[int, str], list[dict[str, Any]]] = {}
    with Progress(transient=True) as progress:
        bar = progress.add_task("generate", total=len(work))
        for threads, engine in work:
            progress.update(bar, description=f"{engine}, threads: {threads}")
            if engine != "transformers" or (threads, engine) not in seen:
                found = _run_engine_process(engine, threads)
                if found is not None:
                    seen.setdefault((threads, engine), []).append(found)
            progress.advance(bar)
    rows = [_best_of_rounds(threads, engine, found) for (threads, engine), found in seen.items()]
    _add_ratios(rows)
    print(
        f"{hub.resolve_model_path('smollm2').name} · {PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new tokens"
    )
    print(format_table(rows))
    print(f"written to {results.save_results('generate', options.device, rows, options.output)}")


def _run_engine_process(engine: str, threads: int) -> dict[str, Any] | None:
    """The figures of one engine; None if it is not installed."""
    interpreter = sys.executable
    if engine == "llama.cpp":
        interpreter = read_env("FULGURITE_LLAMA_PYTHON") or interpreter
    wanted = {"engine": engine, "threads": threads, "prompt": PROMPT_TOKENS, "new": NEW_TOKENS,
              "batches": BATCHES, "file": str(hub.resolve_model_path("smollm2"))}  # fmt: skip
    one = {**os.environ, "OMP_NUM_THREADS": str(threads), "FULGURITE_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [interpreter, engines.__file__, json.dumps(wanted)],
        capture_output=True,
        text=True,
        env=one,
    )
    if done.returncode == engines.NOT_INSTALLED:
        return None
    if done.returncode:
        how = f"exit status {done.returncode}"
        if done.returncode < 0:
            how = signal.Signals(-done.returncode).name
        raise ArgumentError(f"{engine} could not be measured: {how}", where=done.stderr[-1500:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _best_of_rounds(threads: int, engine: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The best of the rounds for each figure: interference only makes a run slower."""
    row: dict[str, Any] = {"engine": engine, "threads": threads}
    for key in found[0]:
        values = [one[key] for one in found]
        row[key] = min(values) if key in ("first_token_ms", "peak_mib") else max(values)
    return row


def _add_ratios(rows: list[dict[str, Any]]) -> None:
    """Add our throughput over llama.cpp's with the same number of threads."""
    theirs = {row["threads"]: row for row in rows if row["engine"] == "llama.cpp"}
    for row in rows:
        other = theirs.get(row["threads"])
        if row["engine"] == "fulgurite" and other is not None:
            for key in ("prefill", "decode", *(f"decode_{batch}" for batch in BATCHES[1:])):
                if key in row and key in other:
                    row[f"{key}_times_llama"] = row[key] / other[key]


def format_table(rows: list[dict[str, Any]]) -> str:
    head = ["engine", "threads", "prefill", "decode", "first token", "peak", *(
        f"decode of {batch}" for batch in BATCHES[1:]
    ), "× llama.cpp"]  # fmt: skip
    body = []
    for row in rows:
        ratio = ""
        if "decode_times_llama" in row:
            ratio = f"{row['prefill_times_llama']:.2f}, {row['decode_times_llama']:.2f}"
        batches = [row.get(f"decode_{batch}") for batch in BATCHES[1:]]
        body.append([
            row["engine"],
            str(row["threads"]),
            f"{row['prefill']:.0f}/s",
            f"{row['decode']:.1f}/s",
            f"{row['first_token_ms']:.0f} ms",
            f"{row['peak_mib']:.0f} MiB",
            *("" if speed is None else f"{speed:.0f}/s" for speed in batches),
            ratio,
        ])  # fmt: skip
    return results.format_table([head, *body])
