"""A worker: `StepMessage`s of rank 0 in, the same steps of the model out (see coordinator.py)."""

from __future__ import annotations

from fulgurite.errors import RankError
from fulgurite.serve.engine.coordinator import (
    Coordinator,
    Event,
    PrefixCacheReset,
    RequestAdded,
    StepMessage,
    TokenSampled,
    count_scheduled,
    decode_step,
)
from fulgurite.serve.engine.engine import Engine
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
        chunks = engine.agree_on_chunks(chunks, self.coordinator)
        samples = mesh.data.size > 1 and mesh.tensor.index == 0
        requests = [chunk.request for chunk in chunks if chunk.needs_sampling and samples]
        step = engine.execute(chunks, requests)
        engine.scheduler.mark_computed(chunks)
        engine.memory.record_success(chunks)
        engine.scheduler.cache_blocks(chunks)
        if samples:
            tokens = [] if step is None else step.read()[0]
            numbers = (self.number_of[request.id] for request in requests)
            sampled = dict(zip(numbers, tokens, strict=True))
            self.coordinator.gather_tokens(sampled, engine.plan.limits.max_sequences)

    def _apply(self, event: Event) -> None:
        engine = self.engine
        if isinstance(event, PrefixCacheReset):
            engine.block_manager.reset_prefix_cache()
        elif isinstance(event, RequestAdded):
            if event.replica == self.coordinator.replica:
                self._add(event)
        elif event.id in engine.requests:
            request = engine.requests[event.id]
            if isinstance(event, TokenSampled):
                request.append(event.token)
            else:
                self._end(request, event.cancelled)

    def _add(self, event: RequestAdded) -> None:
        request = Request(
            event.id,
            event.prompt_ids,
            event.params,
            self.engine.context,
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
