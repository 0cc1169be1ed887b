"""`LLMEngine`: an `LLM` behind the messages' vocabulary (token ids, integers as ids).

It is the `ServedEngine` (engine_interface.py) with a model.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from fulgurite.device import is_out_of_memory, resolve_device
from fulgurite.errors import ArgumentError, CapacityError, FulguriteError
from fulgurite.option_values import SERVED_MIXED_TOKENS
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.prefix_blocks import export_prefix, import_prefix
from fulgurite.serve.engine.replica_counts import count_engine
from fulgurite.serve.engine.request import Request, TokenLogprob, Update
from fulgurite.serve.llm import LLM
from fulgurite.serve.remote.engine_interface import (
    Listener,
    RestartListener,
    WireLogprobs,
    WirePromptLogprobs,
)
from fulgurite.serve.remote.messages import (
    EngineInfo,
    ExportPrefix,
    Finish,
    Generate,
    LoadModel,
    PrefixBlocks,
    Progress,
    TokenUpdate,
)
from fulgurite.serve.structured.compiler import GrammarCompiler


class LLMEngine:
    """The engine of an `LLM`. Requests give token ids only: the server makes text of them."""

    def __init__(self, llm: LLM, start_seconds: dict[str, float]) -> None:
        self.llm = llm
        self.engine: Engine = llm.engine
        self.info = describe_engine(llm, start_seconds)
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
        sent_prompt_logprobs = False

        def listen(update: Update) -> None:
            nonlocal sent_logprobs, sent_prompt_logprobs
            logprobs = prompt_logprobs = None
            if added.params.prompt_logprobs is not None and not sent_prompt_logprobs:
                prompt_logprobs = to_wire_prompt_logprobs(added.prompt_logprobs)
                sent_prompt_logprobs = True  # the first token comes after the whole prompt
            if added.params.logprobs is not None:
                logprobs = to_wire_logprobs(added.logprobs[sent_logprobs:])
                sent_logprobs = len(added.logprobs)
            finish = None
            if update.result is not None:
                finish = describe_finish(added, update)
                self.requests.pop(request.id, None)
            tokens = list(update.token_ids)
            listener(TokenUpdate(request.id, tokens, logprobs, finish, prompt_logprobs))

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

    def prepare_step(self) -> bool:
        return self.engine.prepare_step()

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
        recorder, counts = engine.recorder, count_engine(engine)
        step_seconds, step_tokens = recorder.take_recent_steps()
        return Progress(
            steps=recorder.steps,
            running=counts.running,
            waiting=counts.waiting,
            used_blocks=counts.used_blocks,
            total_blocks=counts.total_blocks,
            prefill_tokens=recorder.prefill_tokens,
            generated_tokens=recorder.sampled_tokens,
            prefix_queries=self.prompt_tokens,
            prefix_hits=recorder.prefix_cached_tokens,
            preemptions=counts.preemptions,
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


def to_wire_prompt_logprobs(logprobs: list[TokenLogprob | None]) -> WirePromptLogprobs:
    """Those of the tokens after the first, which has none."""
    return [
        (one.token_id, one.logprob, one.rank or 0, list(one.top))
        for one in logprobs
        if one is not None
    ]


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


def describe_engine(llm: LLM, start_seconds: dict[str, float]) -> EngineInfo:
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
        start_seconds=start_seconds,
        prefix_caching=engine.block_manager.prefix_caching,
        can_embed=llm.mesh is None,
    )


def load_engine(request: LoadModel, import_seconds: float = 0.0) -> LLMEngine:
    """Load and warm up the model. Dtypes are given by name."""
    try:
        return _load_engine(request, import_seconds)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, FulguriteError) or not is_out_of_memory(error):
            raise
        raise CapacityError(
            f"there is not enough memory to load the model: {str(error).splitlines()[0]}",
            next="use fewer --cache-tokens, --max-sequences or --max-batched-tokens, or --quantize",
        ) from error


def _load_engine(request: LoadModel, import_seconds: float) -> LLMEngine:
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    start = time.perf_counter()
    llm = LLM(request.name, **read_llm_options(request.options))
    loaded = time.perf_counter()
    if llm.is_driver:
        llm.engine.warm_up()
        if isinstance(llm.engine.grammars.compiler, GrammarCompiler):
            llm.engine.grammars.compiler.start_warm_up()
    parts = {
        "imports": import_seconds,
        "weights": loaded - start,
        "warm-up": time.perf_counter() - loaded,
    }
    return LLMEngine(llm, parts)


def read_llm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of `LLMConfig`, with the defaults of a server."""
    dtype = options.get("dtype")
    if isinstance(dtype, str):
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ArgumentError(f"dtype={dtype!r} is not a dtype", next="use float32 or bfloat16")
        options = {**options, "dtype": found}
    mixed = SERVED_MIXED_TOKENS[resolve_device(options.get("device")).type]
    return {"max_mixed_tokens": mixed, **options}
