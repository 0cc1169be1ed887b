"""How fast text is generated on a GPU: decode and prefill as percent of the machine's floor.

In: the shapes of published models, with random weights. Out, for each: milliseconds of a decode step at
several batches, whole (`engine.step()`) and without the host (its CUDA graph alone), and of a prompt; each
beside the least time there could be: the larger of bytes that must be read over the copy bandwidth and
operations over what a large matmul reaches, both measured in the same run. transformers' forward of the same
shape, with its cache, runs beside it for some of the batches.

Bytes of a decode step: every weight that a token meets once (of the experts those that so many tokens are
expected to meet) and the keys and values of all requests.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fulgurite import device as hardware
from fulgurite.bench import results
from fulgurite.errors import ArgumentError
from fulgurite.models.layers import Decoder
from fulgurite.models.published import published, published_fields
from fulgurite.models.weights import build_model, random_model
from fulgurite.plan.memory import make_plan
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import Request, SamplingParams
from fulgurite.serve.engine.sampler import Draws, choose
from fulgurite.serve.llm import BLOCK_SIZES, make_limits

SHAPES = ("qwen3-0.6b", "llama-3.1-8b", "qwen3-30b-a3b")
BATCHES = (1, 4, 16, 64, 256)
THEIR_BATCHES = (1, 64)
PROMPT, NEW = 256, 24  # tokens in front of a timed decode step, and how many steps are timed
LONG_PROMPT = 4096
DRAWS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}


@dataclass(frozen=True)
class Limits:
    """What the machine can do: bytes and operations a second."""

    bandwidth: float
    flops: float

    def floor(self, bytes: float, operations: float) -> float:
        """The least seconds for so much."""
        return max(bytes / self.bandwidth, operations / self.flops)


@dataclass(frozen=True)
class Work:
    """What a model's steps have to move and to compute."""

    dense_bytes: int  # of the weights that every token meets
    expert_bytes: int  # of one expert, in all layers
    experts: int
    chosen: int
    token_bytes: int  # keys and values of one token
    active: int  # weights that one token is multiplied with, the head's among them
    head: int
    attention: int  # operations of one query with one key, in all layers

    def decode(self, batch: int, context: int) -> tuple[float, float]:
        """Bytes and operations of a step of `batch` requests that see `context` tokens each."""
        met = 0.0
        if self.experts:
            met = self.experts * (1 - (1 - self.chosen / self.experts) ** batch)
        bytes = self.dense_bytes + met * self.expert_bytes + batch * context * self.token_bytes
        return bytes, batch * (2.0 * self.active + self.attention * context)

    def prefill(self, tokens: int) -> tuple[float, float]:
        """The same of one prompt; its logits are asked for at its last token only."""
        bytes, _ = self.decode(tokens, 0)
        layers = 2.0 * (self.active - self.head) + self.attention * (tokens + 1) / 2
        return bytes, tokens * layers + 2.0 * self.head


def work_of(model: Decoder) -> Work:
    """Counted from the model's own parameters."""
    config, experts = model.config, model.config.experts
    dense = expert = 0
    for name, parameter in model.named_parameters():
        if name == "embedding.weight" and not config.tied:
            continue  # a row a token
        if ".experts." in name:
            expert += parameter.nbytes
        else:
            dense += parameter.nbytes
    size = model.norm.weight.element_size()
    count = 0 if experts is None else experts.count
    chosen = 0 if experts is None else experts.per_token
    each = expert // count if count else 0
    specs = model.attention_specs
    return Work(
        dense_bytes=dense,
        expert_bytes=each,
        experts=count,
        chosen=chosen,
        token_bytes=size * sum(
            s.kv_heads * (s.key_dim if s.latent else s.key_dim + s.value_dim) for s in specs
        ),
        active=(dense + chosen * each) // size,
        head=config.vocabulary * config.hidden,
        attention=sum(2 * s.heads * (s.key_dim + s.value_dim) for s in specs),
    )  # fmt: skip


def generate_cuda(options: argparse.Namespace) -> None:
    """Suite `generate` on a GPU."""
    if not torch.cuda.is_available():
        raise ArgumentError("there is no GPU here", next="use --device cpu")
    limits = Limits(hardware.measure_cuda_copy_bandwidth(), matmul_flops())
    print(f"copy {limits.bandwidth / 1e9:.0f} GB/s, matmul {limits.flops / 1e12:.0f} TFLOP/s")
    extra = {"copy_gb_s": limits.bandwidth / 1e9, "matmul_tflop_s": limits.flops / 1e12}
    rows: list[dict[str, Any]] = []
    for shape in SHAPES[:1] if options.quick else SHAPES:
        found = measure(shape, limits, (1, 64) if options.quick else BATCHES)
        print(table(found), flush=True)
        rows += [{**row, **extra} for row in found]
        path = results.save("generate", "cuda", rows, options.output)  # as far as it is
    print(f"written to {path}")


def measure(
    shape: str,
    limits: Limits,
    batches: Sequence[int],
    *,
    device: str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    prompt: int = PROMPT,
    long_prompt: int = LONG_PROMPT,
    new: int = NEW,
) -> list[dict[str, Any]]:
    """All rows of one shape; the model is gone afterwards."""
    family, config = published(shape)
    model = random_model(config, family, dtype=dtype, device=device)
    shapes, work = build_model(config, family, dtype).to("meta"), work_of(model)
    with _engine(model, shapes, batches, prompt, long_prompt, new) as engine:
        rows = [_prefill(engine, long_prompt, work, limits)]
        for batch in batches:
            rows.append(_decode(engine, batch, prompt, new, work, limits))
        rows += [_draw(engine, how, max(batches)) for how in DRAWS]
    del model, engine
    _free()
    for batch in set(THEIR_BATCHES) & set(batches):
        seconds = their_decode(shape, batch, device, dtype, prompt, new)
        for row in rows:
            if seconds is not None and row["what"] == "decode" and row["batch"] == batch:
                row["transformers_ms"] = 1e3 * seconds
    return [{"shape": shape, **row} for row in rows]


@contextmanager
def _engine(
    model: Decoder,
    shapes: Decoder,
    batches: Sequence[int],
    prompt: int,
    long_prompt: int,
    new: int,
) -> Iterator[Engine]:
    place = model.norm.weight.device
    limits = make_limits(
        model.config.max_positions,
        model.norm.weight.dtype,
        context=max(long_prompt, prompt + 4 * new) + 64,
        max_sequences=max(batches),
        step_tokens=max(long_prompt, max(batches)),
        cache_tokens=max(long_prompt + 128, max(batches) * (prompt + 4 * new + 64)),
        block_size=BLOCK_SIZES[place.type],
    )
    plan = make_plan(shapes, limits, place, available=1 << 40)
    engine = Engine(model, None, plan, reuse=False)
    try:
        yield engine
    finally:
        for id in list(engine.requests):
            engine.cancel(id)


def _tokens(engine: Engine, count: int) -> list[int]:
    return [random.randrange(engine.model.config.vocabulary) for _ in range(count)]


def _prefill(engine: Engine, count: int, work: Work, limits: Limits) -> dict[str, Any]:
    """One prompt, from its arrival to its first token."""
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    times = []
    for _ in range(4):
        engine.add(_tokens(engine, count), params)
        times.append(_seconds(lambda: _until_done(engine)))
    seconds, floor = min(times[1:]), limits.floor(*work.prefill(count))
    return _row("prefill", 1, seconds, floor, tokens=count)


def _until_done(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def _decode(
    engine: Engine, batch: int, prompt: int, new: int, work: Work, limits: Limits
) -> dict[str, Any]:
    """A step of `batch` requests: whole, and its CUDA graph alone."""
    params = SamplingParams(max_tokens=4 * new, ignore_eos=True)
    for _ in range(batch):
        engine.add(_tokens(engine, prompt), params)
    while any(request.length == prompt for request in engine.requests.values()):
        engine.step()
    for _ in range(3):  # the step for so many requests is prepared
        engine.step()
    times = [_seconds(engine.step) for _ in range(new)]
    context = prompt + 4 + new // 2
    floor = limits.floor(*work.decode(batch, context))
    row = _row("decode", batch, statistics.median(times), floor, tokens=batch)
    step = engine.runner.fixed.get(batch)
    if step is not None:
        graph = statistics.median(_seconds(step.run) for _ in range(new))
        row |= {"graph_ms": 1e3 * graph, "graph_percent": 100 * floor / graph}
    for id in list(engine.requests):
        engine.cancel(id)
    return row


def _draw(engine: Engine, how: str, batch: int) -> dict[str, Any]:
    """Choosing tokens from logits that are there, until the host has them, step after step."""
    params = SamplingParams(seed=1, **DRAWS[how])  # type: ignore[arg-type]
    requests = [Request(f"{i}", [1, 2], params, 16) for i in range(batch)]
    logits = torch.randn(batch, engine.model.config.vocabulary, device=engine.plan.device)
    draws, times = Draws(), []
    for _ in range(6):
        times.append(_seconds(lambda: choose(logits, requests, draws)))
        for request in requests:
            request.append(0)
    return {"what": f"draw: {how}", "batch": batch, "ms": 1e3 * statistics.median(times[2:])}


def _row(what: str, batch: int, seconds: float, floor: float, tokens: int) -> dict[str, Any]:
    return {
        "what": what,
        "batch": batch,
        "ms": 1e3 * seconds,
        "tokens_s": tokens / seconds,
        "floor_ms": 1e3 * floor,
        "percent": 100 * floor / seconds,
    }


def _seconds(call: Callable[[], Any]) -> float:
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def matmul_flops(size: int = 8192) -> float:
    """Operations a second of a large bfloat16 matmul."""
    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    times = [_seconds(lambda: a @ b) for _ in range(8)]
    return 2 * size**3 / min(times)


def their_decode(
    shape: str, batch: int, device: str, dtype: torch.dtype, prompt: int, new: int
) -> float | None:
    """Seconds of a decode step of transformers' model of this shape, random weights; None without it."""
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers
    from transformers.initialization import no_init_weights

    fields = published_fields(shape)
    assert fields is not None, f"{shape} is published"
    architecture = str(fields.sequence("architectures")[0])
    config_class = getattr(transformers, architecture.removesuffix("ForCausalLM") + "Config")
    values = {k: v for k, v in fields.values.items() if k not in ("architectures", "torch_dtype")}
    config = config_class(**values)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), no_init_weights():
            model = getattr(transformers, architecture)(config).eval()
    finally:
        torch.set_default_dtype(before)
    with torch.inference_mode():
        ids = torch.randint(0, config.vocab_size, (batch, prompt), device=device)
        out = model(ids, use_cache=True, logits_to_keep=1)
        cache, times = out.past_key_values, []
        token = ids[:, :1]
        for _ in range(max(3, new // 3)):
            start = time.perf_counter()
            out = model(token, past_key_values=cache, use_cache=True)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            _wait()
            times.append(time.perf_counter() - start)
    del model, out, cache
    _free()
    return statistics.median(times[1:])


def table(rows: list[dict[str, Any]]) -> str:
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
    return f"{rows[0]['shape']}\n" + results.table([head, *body])
