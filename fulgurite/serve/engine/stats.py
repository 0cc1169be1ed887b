"""What an engine is doing: finished steps and requests in, `EngineStats` and log records out.

`StepRecorder` is called by the engine: once a step and once a request. `Engine.stats` combines its
counts with the state of scheduler, blocks and memory. Logs (logs.py): a debug record a step, an info
record a request. Their fields are attributes of `FULGURITE_LOG_FORMAT=json` lines.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fulgurite.logs import LOG
from fulgurite.models.layers import CausalLM
from fulgurite.parallel.health import RankTime
from fulgurite.plan.memory import MemoryPlan
from fulgurite.quant import QuantTensor
from fulgurite.serve.engine.request import Request, Result
from fulgurite.serve.engine.scheduler import ScheduledChunk
from fulgurite.units import format_bytes

RECENT_STEPS = 1000  # of which percentiles and rates are computed
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class MemoryStats:
    """Bytes that were planned, and that are held.

    planned, held         of weights and KV cache; on a GPU held is all that torch has allocated there
    peak                  the most that was allocated on the GPU; 0 on a CPU
    weight_formats        number format (or dtype) -> bytes of the parameters in it
    """

    planned_weights: int
    planned_kv_cache: int
    planned_activations: int
    planned_total: int
    held: int
    peak: int
    weight_formats: dict[str, int]


@dataclass(frozen=True)
class EngineStats:
    """What an engine has done, and what it is doing.

    finished                requests by `finish_reason`
    prefill_tokens          tokens of prompts that were computed, also again after a preemption
    decode_tokens           tokens that were computed one at a time
    prefix_cached_tokens    tokens of prompts that were found in the prefix cache
    tokens_per_second       sampled tokens per second of recent steps
    step_seconds            percentile -> duration of recent steps
    captured_steps          batch sizes of captured decode steps
    no_capture_reason       why decode steps, or some of them, are not captured; None: they are
    max_batched_tokens      the most tokens of a step now; planned_batched_tokens before failures
    out_of_memory           steps that ran out of memory
    ranks                   the times of each rank's steps, and how slow it is (parallel/health.py)
    restarts                how often all ranks were restarted after one was lost

    On rank 0, requests, tokens, blocks and preemptions are those of all replicas.
    """

    waiting: int
    running: int
    finished: dict[str, int]
    steps: int
    steps_in_flight: int
    prefill_tokens: int
    decode_tokens: int
    sampled_tokens: int
    prefix_cached_tokens: int
    preemptions: int
    tokens_per_second: float
    step_seconds: dict[int, float]
    cache_blocks: int
    used_cache_blocks: int
    prefix_cache_blocks: int
    captured_steps: tuple[int, ...]
    no_capture_reason: str | None
    max_batched_tokens: int
    planned_batched_tokens: int
    out_of_memory: int
    memory: MemoryStats
    ranks: tuple[RankTime, ...] = ()
    restarts: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, for JSON."""
        return dataclasses.asdict(self)

    def _describe_captures(self) -> str:
        if self.no_capture_reason is not None and not self.captured_steps:
            return self.no_capture_reason
        sizes = ", ".join(map(str, self.captured_steps)) or "none yet"
        rest = f"; {self.no_capture_reason}" if self.no_capture_reason else ""
        return f"decode steps of {sizes} requests{rest}"

    def __str__(self) -> str:
        """One line a subject, for people."""
        ended = ", ".join(f"{count} {reason}" for reason, count in self.finished.items())
        times = ", ".join(f"p{p} {1e3 * s:.1f} ms" for p, s in self.step_seconds.items())
        reduced = self.max_batched_tokens != self.planned_batched_tokens
        formats = self.memory.weight_formats.items()
        rows = [
            (
                "requests",
                f"{self.running} running, {self.waiting} waiting, {ended or 'none'} ended",
            ),
            ("tokens", f"{self.prefill_tokens:,} prefill, {self.decode_tokens:,} decode"),
            ("speed", f"{self.tokens_per_second:.1f} tokens/s"),
            ("steps", f"{self.steps}, {times}" if times else "0"),
            ("KV cache", f"{self.used_cache_blocks:,} of {self.cache_blocks:,} blocks used"),
            ("prefix", f"{self.prefix_cached_tokens:,} prompt tokens found"),
            ("preemptions", str(self.preemptions)),
            ("captured", self._describe_captures()),
            (
                "step size",
                f"{self.max_batched_tokens} tokens"
                + (f", planned {self.planned_batched_tokens}" if reduced else "")
                + (f"; out of memory {self.out_of_memory} times" if self.out_of_memory else ""),
            ),
            (
                "memory",
                f"{format_bytes(self.memory.held)} held, "
                f"{format_bytes(self.memory.planned_total)} planned with activations",
            ),
            ("weights", ", ".join(f"{name} {format_bytes(count)}" for name, count in formats)),
        ]
        if self.ranks:
            times = ", ".join(f"{1e3 * one.work_seconds:.1f}" for one in self.ranks)
            slow = "".join(f"; {one}" for one in self.ranks if one.is_slow)
            rows.append(("ranks", f"{times} ms a step{slow}"))
        if self.restarts:
            rows.append(("restarts", str(self.restarts)))
        return "\n".join(f"{name:<12} {text}" for name, text in rows)


class StepRecorder:
    """Counts steps, tokens and requests of one engine, and logs them."""

    def __init__(self) -> None:
        self.steps = self.prefill_tokens = self.decode_tokens = self.sampled_tokens = 0
        self.prefix_cached_tokens = 0
        self.forced_tokens = 0  # by grammars, without a step
        self.finished: Counter[str] = Counter()
        self.recent_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self.recent_tokens: deque[int] = deque(maxlen=RECENT_STEPS)
        self.unread_steps: deque[tuple[float, int]] = deque(maxlen=RECENT_STEPS)

    def record_step(
        self, chunks: Sequence[ScheduledChunk], sampled_tokens: int, seconds: float
    ) -> None:
        prefill, decode = count_tokens(chunks)
        self.steps += 1
        self.prefill_tokens += prefill
        self.decode_tokens += decode
        self.sampled_tokens += sampled_tokens
        self.recent_seconds.append(seconds)
        self.recent_tokens.append(sampled_tokens)
        self.unread_steps.append((seconds, prefill + decode))
        if LOG.isEnabledFor(logging.DEBUG):
            fields = {
                "event": "step",
                "step": self.steps,
                "requests": len(chunks),
                "prefill_tokens": prefill,
                "decode_tokens": decode,
                "milliseconds": round(1e3 * seconds, 3),
            }
            text = describe_step(self.steps, chunks)
            LOG.debug("%s, %.2f ms", text, 1e3 * seconds, extra={"fields": fields})

    def record_replicas(self, prefill: int, decode: int, sampled_tokens: int) -> None:
        """Add what other replicas did in the step that was recorded last."""
        self.prefill_tokens += prefill
        self.decode_tokens += decode
        self.sampled_tokens += sampled_tokens
        self.recent_tokens[-1] += sampled_tokens
        seconds, tokens = self.unread_steps[-1]
        self.unread_steps[-1] = seconds, tokens + prefill + decode

    def record_result(self, request: Request, result: Result) -> None:
        self.finished[result.finish_reason] += 1
        self.prefix_cached_tokens += result.cached_tokens
        level = logging.WARNING if result.finish_reason == "error" else logging.INFO
        if not LOG.isEnabledFor(level):
            return
        fields = {
            "event": "request",
            "request": result.id,
            "finish_reason": result.finish_reason,
            "prompt_tokens": len(result.prompt_ids),
            "cached_tokens": result.cached_tokens,
            "output_tokens": len(result.token_ids),
            "preemptions": request.num_preemptions,
            "first_token_milliseconds": round(1e3 * result.first_token_seconds, 3),
            "milliseconds": round(1e3 * result.seconds, 3),
        }
        LOG.log(
            level,
            "%s: %s after %d of prompt (%d cached) and %d tokens, first token %.1f ms, %.1f tokens/s%s",
            result.id,
            result.finish_reason,
            len(result.prompt_ids),
            result.cached_tokens,
            len(result.token_ids),
            1e3 * result.first_token_seconds,
            result.tokens_per_second,
            f": {request.error}" if request.error else "",
            extra={"fields": fields},
        )

    def take_recent_steps(self) -> tuple[list[float], list[int]]:
        """Seconds and tokens of each step since the last call."""
        steps, self.unread_steps = [*self.unread_steps], deque(maxlen=RECENT_STEPS)
        return [seconds for seconds, _ in steps], [tokens for _, tokens in steps]

    def tokens_per_second(self) -> float:
        busy = sum(self.recent_seconds)
        return sum(self.recent_tokens) / busy if busy else 0.0

    def step_percentiles(self) -> dict[int, float]:
        if not self.recent_seconds:
            return {}
        values = np.percentile(np.array(self.recent_seconds), PERCENTILES)
        return dict(zip(PERCENTILES, values.tolist(), strict=True))


def count_tokens(chunks: Sequence[ScheduledChunk]) -> tuple[int, int]:
    """Tokens of prompts, and tokens of replies."""
    decode = sum(is_decode(chunk) for chunk in chunks)
    return sum(chunk.num_tokens for chunk in chunks) - decode, decode


def is_decode(chunk: ScheduledChunk) -> bool:
    """Whether a chunk is one token of a reply."""
    return chunk.num_tokens == 1 and chunk.start >= chunk.request.prompt_length


def describe_step(number: int, chunks: Sequence[ScheduledChunk]) -> str:
    """`step 12: prefill 3 x 512 + 1 x 100, decode 5`."""
    sizes = Counter(chunk.num_tokens for chunk in chunks if not is_decode(chunk))
    decode = sum(map(is_decode, chunks))
    parts = []
    if sizes:
        counted = (f"{count} x {size}" for size, count in sorted(sizes.items(), reverse=True))
        parts.append("prefill " + " + ".join(counted))
    if decode:
        parts.append(f"decode {decode}")
    return f"step {number}: {', '.join(parts) or 'no tokens'}"


def measure_memory(model: CausalLM, plan: MemoryPlan, kv_cache_bytes: int) -> MemoryStats:
    """What was planned, and what is held now."""
    formats: Counter[str] = Counter()
    for parameter in model.parameters():
        is_quantized = isinstance(parameter, QuantTensor)
        dtype = str(parameter.dtype).removeprefix("torch.")
        formats[parameter.format.name if is_quantized else dtype] += parameter.nbytes
    held, peak = sum(formats.values()) + kv_cache_bytes, 0
    if plan.device.type == "cuda":
        held = torch.cuda.memory_allocated(plan.device)
        peak = torch.cuda.max_memory_allocated(plan.device)
    return MemoryStats(
        planned_weights=plan.weights,
        planned_kv_cache=plan.kv_cache,
        planned_activations=plan.activations,
        planned_total=plan.total,
        held=held,
        peak=peak,
        weight_formats=dict(formats),
    )
