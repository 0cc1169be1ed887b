"""Suite `generate` on a GPU: decode and prefill as percent of the roofline.

In: shapes of well-known models, with random weights. Out, for each: milliseconds of a decode step at several batch
sizes, as `engine.step()` and as its CUDA graph alone, and of a prefill; each with the percentage of the roofline: the
larger of bytes over copy bandwidth and FLOPs over GEMM throughput, both measured in the same run. The forward of
transformers with its cache is measured for some batch sizes.

Bytes of a decode step: every weight that a token uses is read once (for experts: the expected number of distinct ones),
and the KV cache of all requests.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fulgurite import device as hardware
from fulgurite.bench import results
from fulgurite.bench.generate.costs import Limits, ModelCost, count_model_cost
from fulgurite.bench.generate.transformers_model import TransformersDecoder
from fulgurite.errors import ArgumentError
from fulgurite.models.families.presets import find_preset, load_preset
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.loader import build_model, build_random_model
from fulgurite.plan.limits import BLOCK_SIZES, make_engine_limits
from fulgurite.plan.memory import plan_memory
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import Request, SamplingParams
from fulgurite.serve.engine.sampler import Sampler

MODELS = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")
BATCHES = (1, 4, 16, 64, 256)
TRANSFORMERS_BATCHES = (1, 64)
PROMPT_TOKENS, DECODE_STEPS = (
    256,
    24,
)  # context before a timed decode step, and the number of timed steps
PREFILL_TOKENS = 4096
SAMPLING_SETTINGS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}
STEP_GROUPS = 5  # groups of decode steps, of which the median counts
PENALTIES_BATCH = 64  # requests of the decode step that is also measured with penalties


def run_generate_gpu(options: argparse.Namespace) -> None:
    """Suite `generate` on a GPU."""
    if not torch.cuda.is_available():
        raise ArgumentError("no CUDA device is available", next="use --device cpu")
    limits = Limits(hardware.measure_cuda_copy_bandwidth(), measure_gemm_flops())
    print(f"copy {limits.bandwidth / 1e9:.0f} GB/s, matmul {limits.flops / 1e12:.0f} TFLOP/s")
    extra = {"copy_gb_s": limits.bandwidth / 1e9, "matmul_tflop_s": limits.flops / 1e12}
    rows: list[dict[str, Any]] = []
    for shape in MODELS[:1] if options.quick else MODELS:
        found = measure_model(shape, limits, (1, 64) if options.quick else BATCHES)
        print(format_table(found), flush=True)
        rows += [{**row, **extra} for row in found]
        path = results.save_results(
            "generate", "cuda", rows, options.output
        )  # partial results survive an interrupt
    print(f"written to {path}")


def measure_model(
    shape: str,
    limits: Limits,
    batches: Sequence[int],
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    prompt: int = PROMPT_TOKENS,
    long_prompt: int = PREFILL_TOKENS,
    new: int = DECODE_STEPS,
) -> list[dict[str, Any]]:
    """All rows of one model; its memory is freed afterwards."""
    family, config = load_preset(shape)
    model = build_random_model(config, family, dtype=dtype, device=device)
    shapes, work = build_model(config, family, dtype).to("meta"), count_model_cost(model)
    with _open_engine(model, shapes, batches, prompt, long_prompt, new) as engine:
        rows = [_measure_prefill(engine, long_prompt, work, limits)]
        for batch in batches:
            rows.append(_measure_decode(engine, batch, prompt, new, work, limits))
            if batch == PENALTIES_BATCH:
                row = _measure_decode(engine, batch, prompt, new, work, limits, "penalties")
                rows.append(row)
        rows += [_time_sampling(engine, how, max(batches)) for how in SAMPLING_SETTINGS]
    del model, engine
    _empty_cache()
    for batch in set(TRANSFORMERS_BATCHES) & set(batches):
        seconds = time_transformers_decode(shape, batch, device, dtype, prompt, new)
        for row in rows:
            if seconds is not None and row["what"] == "decode" and row["batch"] == batch:
                row["transformers_ms"] = 1e3 * seconds
    return [{"shape": shape, **row} for row in rows]


@contextmanager
def _open_engine(
    model: CausalLM,
    shapes: CausalLM,
    batches: Sequence[int],
    prompt: int,
    long_prompt: int,
    new: int,
) -> Iterator[Engine]:
    place = model.norm.weight.device
    limits = make_engine_limits(
        model.config.max_positions,
        model.norm.weight.dtype,
        context=max(long_prompt, prompt + 4 * new) + 64,
        max_sequences=max(batches),
        max_batched_tokens=max(long_prompt, max(batches)),
        cache_tokens=max(long_prompt + 128, max(batches) * (prompt + 4 * new + 64)),
        block_size=BLOCK_SIZES[place.type],
    )
    plan = plan_memory(shapes, limits, place, available=1 << 40)
    engine = Engine(model, None, plan, prefix_caching=False)
    try:
        yield engine
    finally:
        for id in list(engine.requests):
            engine.cancel(id)


def _random_tokens(engine: Engine, count: int) -> list[int]:
    return [random.randrange(engine.model.config.vocab_size) for _ in range(count)]


def _measure_prefill(engine: Engine, count: int, work: ModelCost, limits: Limits) -> dict[str, Any]:
    """One prompt, from `add_request` to its first token."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    times = []
    for _ in range(4):
        engine.add_request(_random_tokens(engine, count), params)
        times.append(_time(lambda: _run_until_idle(engine)))
    seconds, floor = min(times[1:]), limits.floor(*work.prefill(count))
    return _row("prefill", 1, seconds, floor, tokens=count)


def _run_until_idle(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


def _measure_decode(
    engine: Engine,
    batch: int,
    prompt: int,
    new: int,
    work: ModelCost,
    limits: Limits,
    how: str = "greedy",
) -> dict[str, Any]:
    """A decode step of `batch` requests: with the host, and its CUDA graph alone."""
    settings = SAMPLING_SETTINGS[how]
    params = SamplingParams(max_tokens=4 * new, ignore_eos=True, **settings)  # type: ignore[arg-type]
    for _ in range(batch):
        engine.add_request(_random_tokens(engine, prompt), params)
    while any(request.length == prompt for request in engine.requests.values()):
        engine.step()
    for _ in range(3):  # warm up: the step of this batch size is captured
        engine.step()
    # Steps overlap with the host's work, so that several are timed at once.
    group = max(1, new // STEP_GROUPS)

    def run_steps() -> None:
        for _ in range(group):
            engine.step()

    times = [_time(run_steps) / group for _ in range(STEP_GROUPS)]
    context = prompt + 4 + new // 2
    floor = limits.floor(*work.decode(batch, context))
    what = "decode" if how == "greedy" else f"decode, {how}"
    row = _row(what, batch, statistics.median(times), floor, tokens=batch)
    step = engine.runner.captured_steps.get(batch)
    if step is not None and step.graphs:
        replay = list(step.graphs.values())[-1]
        graph = statistics.median(_time(replay) for _ in range(new))
        row |= {"graph_ms": 1e3 * graph, "graph_percent": 100 * floor / graph}
    for id in list(engine.requests):
        engine.cancel(id)
    return row


def _time_sampling(engine: Engine, how: str, batch: int) -> dict[str, Any]:
    """Sampling from given logits until the host has the tokens."""
    params = SamplingParams(seed=1, **SAMPLING_SETTINGS[how])  # type: ignore[arg-type]
    requests = [Request(f"{i}", [1, 2], params, 16) for i in range(batch)]
    for row, request in enumerate(requests):
        request.block_table_row = row
    device, vocab_size = engine.plan.device, engine.model.config.vocab_size
    logits = torch.randn(batch, vocab_size, device=device)
    sampler, times = Sampler(batch, vocab_size, device), []

    def sample() -> None:
        inputs = sampler.prepare(requests)
        tokens_R = sampler.run_eagerly(logits, inputs)
        sampler.finish(inputs)
        sampler.collect(logits, tokens_R, requests).read()

    for _ in range(6):
        times.append(_time(sample))
        for request in requests:
            request.append(0)
    return {"what": f"sampling: {how}", "batch": batch, "ms": 1e3 * statistics.median(times[2:])}


def _row(what: str, batch: int, seconds: float, floor: float, tokens: int) -> dict[str, Any]:
    return {
        "what": what,
        "batch": batch,
        "ms": 1e3 * seconds,
        "tokens_s": tokens / seconds,
        "floor_ms": 1e3 * floor,
        "percent": 100 * floor / seconds,
    }


def _time(call: Callable[[], Any]) -> float:
    _synchronize()
    start = time.perf_counter()
    call()
    _synchronize()
    return time.perf_counter() - start


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _empty_cache() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_gemm_flops(size: int = 8192) -> float:
    """FLOP/s of a large bfloat16 GEMM."""
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    times = [_time(lambda: a @ b) for _ in range(8)]
    return 2 * size**3 / min(times)


def time_transformers_decode(
    shape: str, batch: int, device: str, dtype: torch.dtype, prompt: int, new: int
) -> float | None:
    """Seconds of a decode step of the same model in transformers; None if it is not installed."""
    fields = find_preset(shape)
    assert fields is not None, f"{shape} is published"
    decoder = TransformersDecoder.build(fields, torch.device(device), dtype=dtype)
    if decoder is None:
        return None
    seconds = decoder.time_decode(batch, prompt, max(3, new // 3))
    del decoder
    _empty_cache()
    return seconds


def format_table(rows: list[dict[str, Any]]) -> str:
    head = ["", "batch", "ms", "tokens/s", "of floor", "graph", "of floor", "transformers"]
    body = []
    for row in rows:
        body.append([
            row["what"],
            str(row["batch"]),
            f"{row['ms']:.3f}",
            f"{row['tokens_s']:,.0f}" if "tokens_s" in row else "",
            f"{row['percent']:.0f}%" if "percent" in row else "",
            f"{row['graph_ms']:.3f}" if "graph_ms" in row else "",
            f"{row['graph_percent']:.0f}%" if "graph_percent" in row else "",
            f"{row['transformers_ms']:.1f} ms" if "transformers_ms" in row else "",
        ])  # fmt: skip
    return f"{rows[0]['shape']}\n" + results.format_table([head, *body])
