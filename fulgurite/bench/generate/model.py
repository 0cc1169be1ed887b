"""`fulgurite bench generate --model NAME --format F`: one model, any format, on CPU or GPU.

In: a preset (random weights) or a checkpoint, and modes. Out, a row for each mode: seconds to load,
milliseconds to the first token, decode tokens per second of 1 and of N requests, each as percent
of the floor, and memory beside the plan.

    fulgurite       `LLM` with the checkpoint, packed
    eager           transformers with dense weights in 16 bits (float32 on a CPU), static cache
    torch.compile   the same, its decode step compiled

The floor of a decode step is the bytes that must be read (weights that a token uses once, and the
KV cache) over the measured copy bandwidth. Two more rows of `fulgurite` show what penalties cost N
requests, and what `deterministic=True` costs on a GPU. Each part of a run is a line on stderr.
"""

from __future__ import annotations

import argparse
import gc
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fulgurite import device as hardware
from fulgurite.bench import results
from fulgurite.bench.generate.costs import ModelCost, count_model_cost
from fulgurite.bench.generate.progress import Progress
from fulgurite.bench.generate.random_checkpoint import write_random_checkpoint
from fulgurite.bench.generate.transformers_model import TransformersDecoder
from fulgurite.bench.generate.workload import (
    PENALTIES,
    Workload,
    choose_compile_threads,
    compile_kernels,
    time_decode,
    time_first_token,
)
from fulgurite.device import resolve_device
from fulgurite.errors import ArgumentError
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.presets import find_preset
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import read_config_file
from fulgurite.quant.files.compressed_tensors_writer import SCHEMES, get_scheme
from fulgurite.serve.command import peak_bytes
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.expert_options import add_expert_arguments, given_expert_options
from fulgurite.serve.llm import LLM

MODES = ("eager", "torch.compile", "fulgurite")
DENSE = ("bf16", "dense")
REQUESTS = {"cpu": 8, "cuda": 64}  # N, the second batch size

Row = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `bench generate --model`."""
    group = parser.add_argument_group("one model")
    group.add_argument("--model", metavar="NAME", help="preset (random weights), folder or file")
    group.add_argument(
        "--format", metavar="NAME", help=f"of a preset: bf16 (default), {', '.join(SCHEMES)}"
    )
    group.add_argument("--mode", metavar="NAMES", help=f"one or more of {','.join(MODES)}")
    group.add_argument("--first-layers", type=int, metavar="N", help="of a preset: no others")
    for name in ("tensor", "expert", "pipeline", "context-parallel"):
        group.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{name} ranks")
    add_expert_arguments(group)
    group.add_argument("--requests", type=int, metavar="N", help="the second batch size")
    group.add_argument("--prompt", type=int, default=256, metavar="N", help="tokens of a prompt")
    group.add_argument("--steps", type=int, default=24, metavar="N", help="timed decode steps")
    group.add_argument(
        "--compile-threads", type=int, metavar="N",
        help="kernels that are compiled at once on a GPU; 1: at their first launch",
    )  # fmt: skip


def run_generate_model(options: argparse.Namespace) -> None:
    """Measure one model in all modes, print a table, and save it if `--output` is given."""
    modes = read_modes(options.mode)
    device = resolve_device(options.device)
    requests = options.requests or REQUESTS[device.type]
    if min(requests, options.prompt, options.steps) < 1:
        raise ArgumentError("--requests, --prompt and --steps must be 1 or more")
    workload = Workload(options.prompt, options.steps, tuple(sorted({1, requests})))
    progress = Progress()
    with progress.part("copy bandwidth"):
        bandwidth = measure_bandwidth(device)
    rows: list[Row] = []
    model = options.model, options.format, options.first_layers
    with open_checkpoint_folder(*model, device, progress) as path:
        fields = ConfigFields({}, "") if path.suffix == ".gguf" else read_config_file(path)
        for mode in modes:
            if mode == "fulgurite":
                rows += measure_fulgurite(path, device, workload, bandwidth, options, progress)
            else:
                rows.append(measure_transformers(mode, fields, device, workload, progress))
    default = "as stored" if find_preset(options.model) is None else "bf16"
    facts: Row = {"model": options.model, "format": options.format or default}
    if options.first_layers is not None:
        facts["layers"] = options.first_layers
    rows = [{**facts, **row} for row in rows]
    of_layers = "" if options.first_layers is None else f" · {options.first_layers} layers"
    print(f"{options.model} · {facts['format']}{of_layers} · copy {bandwidth / 1e9:.0f} GB/s")
    print(format_table(rows))
    if options.output:
        print(f"written to {results.save_results('generate', device.type, rows, options.output)}")


def read_modes(text: str | None) -> list[str]:
    """The modes of `--mode a,b`; all by default."""
    modes = list(MODES) if text is None else [mode.strip() for mode in text.split(",")]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown:
        raise ArgumentError(f"--mode {unknown[0]!r} is unknown", next=f"one of {', '.join(MODES)}")
    return modes


def measure_bandwidth(device: torch.device) -> float:
    if device.type == "cuda":
        return hardware.measure_cuda_copy_bandwidth()
    return hardware.measure_copy_bandwidth(torch.get_num_threads())


@contextmanager
def open_checkpoint_folder(
    name: str, format: str | None, layers: int | None, device: torch.device, progress: Progress
) -> Iterator[Path]:
    """The folder of a checkpoint; a preset is written to a temporary one, with random weights."""
    fields = None if Path(name).exists() else find_preset(name)
    if fields is None:
        if format is not None:
            raise ArgumentError(
                "--format is for presets; a checkpoint runs in its own format",
                next=f"fulgurite quantize {name} --format {format} --output FOLDER",
            )
        if layers is not None:
            raise ArgumentError(
                "--first-layers is for presets; a checkpoint runs with all its layers"
            )
        yield hub.resolve_model_path(name)
        return
    if layers is not None:
        fields = keep_first_layers(fields, layers)
    scheme = None if format is None or format in DENSE else get_scheme(format)
    with tempfile.TemporaryDirectory(prefix="fulgurite-bench-") as folder:
        path = Path(folder) / "checkpoint"
        with progress.part("random weights"):
            share_layers = device.type != "cpu"  # see random_checkpoint.py
            write_random_checkpoint(fields, path, scheme, share_layers=share_layers)
        yield path


def keep_first_layers(fields: ConfigFields, layers: int) -> ConfigFields:
    """A preset with fewer layers; lists with one entry a layer are cut as well."""
    whole = fields.get_positive_int("num_hidden_layers")
    if not 1 <= layers <= whole:
        raise ArgumentError(f"--first-layers {layers} is out of range", next=f"1 to {whole}")
    values = {
        key: value[:layers] if isinstance(value, list) and len(value) == whole else value
        for key, value in fields.values.items()
    }
    return ConfigFields({**values, "num_hidden_layers": layers}, fields.where)


# ---- our engine ----------------------------------------------------------------------------------


def measure_fulgurite(
    path: Path,
    device: torch.device,
    workload: Workload,
    bandwidth: float,
    options: argparse.Namespace,
    progress: Progress,
) -> list[Row]:
    """The engine as it is, with penalties, and on a GPU with `deterministic=True`."""
    rows = _measure_llm(path, device, workload, bandwidth, options, progress)
    if device.type == "cuda":
        rows += _measure_llm(path, device, workload, bandwidth, options, progress, True)
    return rows


def _measure_llm(
    path: Path,
    device: torch.device,
    workload: Workload,
    bandwidth: float,
    options: argparse.Namespace,
    progress: Progress,
    is_deterministic: bool = False,
) -> list[Row]:
    """The row of an engine; without deterministic mode also that with penalties."""
    choices: dict[str, Any] = {"deterministic": True} if is_deterministic else {}
    mode = "fulgurite, deterministic" if is_deterministic else "fulgurite"
    before = _start_memory(device)
    start = time.perf_counter()
    progress.say(f"{mode}: loading")
    llm = LLM(
        path,
        device=device,
        context=workload.context,
        max_sequences=max(workload.batches),
        max_batched_tokens=max(workload.prompt, *workload.batches, 512),
        cache_tokens=max(workload.batches) * workload.context,
        prefix_caching=False,
        tensor=options.tensor,
        expert=options.expert,
        pipeline=options.pipeline,
        context_parallel=options.context_parallel,
        **given_expert_options(options),
        **choices,
    )
    with llm:
        load_seconds = time.perf_counter() - start
        threads = choose_compile_threads(options.compile_threads, device)
        if threads > 1:
            with progress.part(f"{mode}: kernels"):
                compile_kernels(llm.engine, workload, threads)
        with progress.part(f"{mode}: warm-up"):
            llm.engine.warm_up()
        cost = count_model_cost(llm.model)
        row: Row = {"mode": mode, "load_s": load_seconds}
        with progress.part(f"{mode}: first token"):
            row["first_token_ms"] = 1e3 * time_first_token(llm.engine, workload.prompt)
        for size in workload.batches[:-1]:
            with progress.part(f"{mode}: decode of {size}"):
                (seconds,) = time_decode(llm.engine, size, workload, SamplingParams())
            row |= _decode_figures(size, seconds, cost, workload, bandwidth)
        batch, rows = workload.batches[-1], [row]
        params = (SamplingParams(),) if is_deterministic else (SamplingParams(), PENALTIES)
        with progress.part(f"{mode}: decode of {batch}"):
            seconds, *penalized = time_decode(llm.engine, batch, workload, *params)
        row |= _decode_figures(batch, seconds, cost, workload, bandwidth)
        row |= {"memory_bytes": _used_memory(device) - before, "plan_bytes": llm.plan.total}
        for seconds in penalized:
            figures = _decode_figures(batch, seconds, cost, workload, bandwidth)
            rows.append({"mode": f"{mode}, penalties", **figures})
    del llm
    _free_memory()
    return rows


def _start_memory(device: torch.device) -> int:
    """Memory in use before a model is loaded."""
    _free_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    return _used_memory(device)


def _used_memory(device: torch.device) -> int:
    """The peak of a GPU's tensors; on a CPU the memory of the process without mapped files."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        return peak_bytes(device)
    found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    return int(found.group(1)) * 1024 if found else peak_bytes(device)


def _decode_figures(
    batch: int, seconds: float, cost: ModelCost, workload: Workload, bandwidth: float
) -> Row:
    bytes, _ = cost.decode(batch, workload.prompt + workload.steps // 2)
    floor = bytes / bandwidth
    return {
        f"decode_{batch}": batch / seconds,
        f"percent_{batch}": 100 * floor / seconds,
    }


# ---- baselines -----------------------------------------------------------------------------------


def measure_transformers(
    mode: str, fields: ConfigFields, device: torch.device, workload: Workload, progress: Progress
) -> Row:
    """The same shape in transformers, with dense random weights."""
    row: Row = {"mode": mode}
    if not fields.values:
        return row | {"note": "transformers reads no GGUF file here"}
    before = _start_memory(device)
    decoder = TransformersDecoder.build(fields, device, is_compiled=mode == "torch.compile")
    if decoder is None:
        return row | {"note": "transformers is not installed, or lacks this model"}
    with progress.part(f"{mode}: first token"):
        row["first_token_ms"] = 1e3 * decoder.time_first_token(workload.prompt)
    for batch in workload.batches:
        with progress.part(f"{mode}: decode of {batch}"):
            seconds = decoder.time_decode(batch, workload.prompt, workload.steps)
        row[f"decode_{batch}"] = batch / seconds
    row["memory_bytes"] = _used_memory(device) - before
    del decoder
    _free_memory()
    return row


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def format_table(rows: Sequence[Row]) -> str:
    batches = sorted({int(k.removeprefix("decode_")) for r in rows for k in r if "decode_" in k})
    head = ["mode", "load", "first token", *(
        title for batch in batches for title in (f"decode of {batch}", "of floor")
    ), "memory", "plan", ""]  # fmt: skip
    body = []
    for row in rows:
        cells = [row["mode"], _cell(row, "load_s", "{:.1f} s")]
        cells.append(_cell(row, "first_token_ms", "{:.1f} ms"))
        for batch in batches:
            cells.append(_cell(row, f"decode_{batch}", "{:,.1f}/s"))
            cells.append(_cell(row, f"percent_{batch}", "{:.0f}%"))
        for key in ("memory_bytes", "plan_bytes"):
            cells.append(f"{row[key] / 1e6:,.0f} MB" if key in row else "")
        body.append([*cells, row.get("note", "")])
    return results.format_table([head, *body])


def _cell(row: Row, key: str, format: str) -> str:
    return format.format(row[key]) if key in row else ""
