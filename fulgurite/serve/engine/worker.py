"""A worker: `StepMessage`s of rank 0 in, the same steps of the model out (see coordinator.py)."""

from __future__ import annotations

from fulgurite.errors import RankError
from fulgurite.serve.engine.coordinator import (
    Coordinator,
    Event,
    GrammarStarted,
    LoadSaved,
    PrefixCacheReset,
    RequestAdded,
    StepMessage,
    TokenSampled,
    count_scheduled,
    decode_step,
    encode_token,
)
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.engine_core import sampled_requests
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.engine.reply import accept_token
from fulgurite.serve.engine.request import Request


class Worker:
    """Runs the engine of a rank other than 0 until rank 0 stops it."""

    def __init__(self, engine: Engine, coordinator: Coordinator) -> None:
        self.engine, self.coordinator = engine, coordinator
        self.number_of: dict[str, int] = {}

    def run(self) -> None:
        while True:
            message = decode_step(self.coordinator.channel.receive())
            for event in message.events:
                self._apply(event)
            if message.is_last:
                return
            if message.has_step:
                self._step(message)

    def _step(self, message: StepMessage) -> None:
        engine, mesh = self.engine, self.coordinator.mesh
        chunks = engine.scheduler.schedule()
        expected = (message.num_requests, message.num_tokens)
        if self.coordinator.replica == 0 and count_scheduled(chunks) != expected:
            raise RankError(
                f"rank 0 runs {message.num_tokens} tokens of {message.num_requests} requests, and "
                f"this rank would run {count_scheduled(chunks)[1]} of {len(chunks)}",
                where=f"rank {mesh.rank}",
                next="start all ranks with the same model and options; if they were, this is a bug "
                "in fulgurite",
            )
        requests = sampled_requests(chunks) if self.coordinator.samples else []
        variant = message.variant.union(engine.sampler.find_variant(requests))
        can_replay = message.can_replay and engine.runner.no_capture_reason is None
        chunks, shape = engine.agree_on_step(chunks, variant, can_replay, self.coordinator)
        requests = sampled_requests(chunks) if self.coordinator.samples else []
        step = engine.execute(chunks, requests, shape)
        engine.scheduler.mark_computed(chunks)
        engine.memory.record_success(chunks)
        engine.scheduler.cache_blocks(chunks)
        tokens, logprobs = step.read()
        engine.check_communication()
        if self.coordinator.samples:
            wanted = message.num_logprobs
            rows = [
                [self.number_of[request.id], *encode_token(token, logprob, wanted)]
                for request, token, logprob in zip(requests, tokens, logprobs, strict=True)
            ]
            self.coordinator.gather_tokens(rows, engine.plan.limits.max_sequences, wanted)

    def _apply(self, event: Event) -> None:
        engine = self.engine
        if isinstance(event, PrefixCacheReset):
            engine.block_manager.reset_prefix_cache()
        elif isinstance(event, LoadSaved):
            engine.require_load_saver()()
        elif isinstance(event, GrammarStarted):
            if self.coordinator.samples:
                engine.grammars.start(GrammarSpec(event.kind, event.source))
        elif isinstance(event, RequestAdded):
            if event.replica == self.coordinator.replica:
                self._add(event)
        elif event.id in engine.requests:
            request = engine.requests[event.id]
            if isinstance(event, TokenSampled):
                request.append(event.token)
                accept_token(
                    request, event.token
                )  # if it raises, it did on rank 0: the end follows
            else:
                self._end(request, event.cancelled)

    def _add(self, event: RequestAdded) -> None:
        spec, constraint = event.params.grammar_spec, None
        if spec is not None and self.coordinator.samples:
            constraint = self.engine.grammars.require_compiler().compile(spec)
        request = Request(
            event.id,
            event.prompt_ids,
            event.params,
            self.engine.context,
            constraint,
            stop_ids=event.stop_ids,
            options=event.options,
        )
        request.seed = event.seed
        self.engine.requests[event.id] = request
        self.number_of[event.id] = event.number
        self.engine.scheduler.add(request)

    def _end(self, request: Request, cancelled: bool) -> None:
        if cancelled:
            self.engine.scheduler.cancel(request)
        else:
            self.engine.scheduler.finish(request)
        request.finish("ended by rank 0")
        del self.engine.requests[request.id], self.number_of[request.id]
