"""What an `EngineLoop` drives: an `LLM` behind the messages' vocabulary (token ids, integers as ids).

`LLMEngine` is the real one; mock.py has one without a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fulgurite.device import resolve_device
from fulgurite.errors import ArgumentError
from fulgurite.plan.limits import SERVED_MIXED_TOKENS
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.prefix_blocks import export_prefix, import_prefix
from fulgurite.serve.engine.request import Request, TokenLogprob, Update
from fulgurite.serve.llm import LLM
from fulgurite.serve.remote.messages import (
    EngineInfo,
    ExportPrefix,
    Finish,
    Generate,
    PrefixBlocks,
    Progress,
    TokenUpdate,
)
from fulgurite.serve.structured.compiler import GrammarCompiler

Listener = Callable[[TokenUpdate], None]
RestartListener = Callable[[str], None]
WireLogprobs = list[tuple[int, float, list[tuple[int, float]]]]


class ServedEngine(Protocol):
    """An engine that a loop can drive. Methods raise ArgumentError for requests that can't run."""

    info: EngineInfo

    @property
    def has_unfinished_requests(self) -> bool: ...

    @property
    def can_continue(self) -> bool:
        """Whether other requests can run after a step has failed."""
        ...

    def add(self, request: Generate, listener: Listener) -> None: ...

    def cancel(self, id: int) -> None: ...

    def step(self) -> None: ...

    def fail_step(self, reason: str) -> None: ...

    def watch_ranks(self, listener: RestartListener) -> None:
        """Call this with the reason before ranks are restarted, and with "" afterwards."""
        ...

    def check_ranks(self) -> None:
        """Restart ranks that were lost while nothing ran."""
        ...

    def embed(self, prompts: list[list[int]]) -> list[bytes]: ...

    def export_prefix(self, request: ExportPrefix) -> PrefixBlocks: ...

    def import_prefix(self, blocks: PrefixBlocks) -> int: ...

    def reset_prefix_cache(self) -> None: ...

    def audit(self) -> dict[str, int]: ...

    def read_progress(self) -> Progress:
        """Counters, and the steps since the last call."""
        ...

    def close(self) -> None: ...


class LLMEngine:
    """The engine of an `LLM`. Requests give token ids only: the server makes text of them."""

    def __init__(self, llm: LLM, load_seconds: float) -> None:
        self.llm = llm
        self.engine: Engine = llm.engine
        self.info = describe_engine(llm, load_seconds)
        self.prompt_tokens = 0
        self.requests: dict[int, Request] = {}

    @property
    def has_unfinished_requests(self) -> bool:
        return self.engine.has_unfinished_requests

    @property
    def can_continue(self) -> bool:
        # Otherwise ranks are no longer in step with each other, or lost for good.
        return self.llm.mesh is None and self.engine.failure is None

    def add(self, request: Generate, listener: Listener) -> None:
        sent_logprobs = 0

        def listen(update: Update) -> None:
            nonlocal sent_logprobs
            logprobs = None
            if added.params.logprobs is not None:
                logprobs = to_wire_logprobs(added.logprobs[sent_logprobs:])
                sent_logprobs = len(added.logprobs)
            finish = None
            if update.result is not None:
                finish = describe_finish(added, update)
                self.requests.pop(request.id, None)
            listener(TokenUpdate(request.id, list(update.token_ids), logprobs, finish))

        added = self.engine.add_request(
            request.prompt_ids,
            request.read_params(),
            id=str(request.id),
            listener=listen,
            options=request.read_options(),
        )
        self.requests[request.id] = added
        self.prompt_tokens += len(request.prompt_ids)

    def cancel(self, id: int) -> None:
        self.engine.cancel(str(id))

    def step(self) -> None:
        self.engine.step()

    def fail_step(self, reason: str) -> None:
        self.engine.fail_step(reason)

    def watch_ranks(self, listener: RestartListener) -> None:
        if self.engine.restarter is not None:
            self.engine.restarter.listeners.append(listener)

    def check_ranks(self) -> None:
        if self.engine.restarter is not None:
            self.engine.step()

    def embed(self, prompts: list[list[int]]) -> list[bytes]:
        rows = self.llm.embed(prompts).to(torch.float32).contiguous()
        return [row.numpy().tobytes() for row in rows]

    def export_prefix(self, request: ExportPrefix) -> PrefixBlocks:
        with self.engine.lock:
            return export_prefix(
                self.engine,
                request.prompt_ids,
                request.cache_salt,
                hashes=request.hashes,
                start=request.start,
                max_bytes=request.max_bytes,
            )

    def import_prefix(self, blocks: PrefixBlocks) -> int:
        with self.engine.lock:
            return import_prefix(self.engine, blocks)

    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    def audit(self) -> dict[str, int]:
        return self.engine.audit()

    def read_progress(self) -> Progress:
        engine = self.engine
        recorder, scheduler, pools = engine.recorder, engine.scheduler, engine.block_manager.pools
        total = sum(pool.num_blocks for pool in pools)
        step_seconds, step_tokens = recorder.take_recent_steps()
        return Progress(
            steps=recorder.steps,
            running=len(scheduler.running),
            waiting=len(engine.requests) - len(scheduler.running),
            used_blocks=total - sum(len(pool.free_blocks) for pool in pools),
            total_blocks=total,
            prefill_tokens=recorder.prefill_tokens,
            generated_tokens=recorder.sampled_tokens,
            prefix_queries=self.prompt_tokens,
            prefix_hits=recorder.prefix_cached_tokens,
            preemptions=scheduler.num_preemptions,
            forced_tokens=recorder.forced_tokens,
            mask_seconds=engine.sampler.take_mask_seconds(),
            rank_restarts=0 if engine.restarter is None else engine.restarter.num_restarts,
            step_seconds=step_seconds,
            step_tokens=step_tokens,
        )

    def close(self) -> None:
        self.llm.close()


def to_wire_logprobs(logprobs: list[TokenLogprob]) -> WireLogprobs:
    return [(one.token_id, one.logprob, list(one.top)) for one in logprobs]


def describe_finish(request: Request, update: Update) -> Finish:
    result = update.result
    assert result is not None, "only the last update of a request has a result"
    return Finish(
        result.finish_reason,
        result.stopped_by,
        result.error,
        result.cached_tokens,
        max(request.first_step_time - request.arrival_time, 0.0),
        result.first_token_seconds,
        result.seconds,
        result.restarts,
        request.error_cause,
    )


def describe_engine(llm: LLM, load_seconds: float) -> EngineInfo:
    plan, engine = llm.plan, llm.engine
    formats = engine.stats().memory.weight_formats
    return EngineInfo(
        model_type=llm.architecture,
        context=engine.context,
        vocab_size=llm.model.config.vocab_size,
        max_sequences=plan.limits.max_sequences,
        cache_tokens=plan.cache_tokens,
        block_size=plan.limits.block_size,
        device=str(llm.device),
        plan=plan.format_table(),
        planned_bytes=plan.total,
        available_bytes=plan.available,
        weights=max(formats, key=lambda name: formats[name]),
        load_seconds=load_seconds,
        prefix_caching=engine.block_manager.prefix_caching,
        can_embed=llm.mesh is None,
    )


def load_engine(name: str, options: dict[str, Any]) -> LLMEngine:
    """Load and warm up the model. `options` are fields of `LLMConfig`; dtypes by name."""
    start = time.perf_counter()
    dtype = options.get("dtype")
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ArgumentError(f"dtype={dtype!r} is not a dtype", next="use float32 or bfloat16")
        options = {**options, "dtype": found}
    mixed = SERVED_MIXED_TOKENS[resolve_device(options.get("device")).type]
    llm = LLM(name, **{"max_mixed_tokens": mixed, **options})
    if llm.is_driver:
        llm.engine.warm_up()
        if isinstance(llm.engine.grammars.compiler, GrammarCompiler):
            llm.engine.grammars.compiler.start_warm_up()
    return LLMEngine(llm, time.perf_counter() - start)
