"""A worker: `StepMessage`s of rank 0 in, the same steps of the model out (see coordinator.py)."""

from __future__ import annotations

from fulgurite.errors import RankError
from fulgurite.serve.engine.agreement import propose_step
from fulgurite.serve.engine.coordinator import Coordinator, count_scheduled, has_posted_prompt
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.grammar import GrammarSpec
from fulgurite.serve.engine.replica_counts import count_replica
from fulgurite.serve.engine.reply import accept_token
from fulgurite.serve.engine.request import Request, RequestState
from fulgurite.serve.engine.step_messages import (
    Event,
    GrammarStarted,
    LoadSaved,
    PrefixCacheReset,
    RequestAdded,
    StepMessage,
    StepsDropped,
    TokenSampled,
    decode_step,
    encode_row,
)


class Worker:
    """Runs the engine of a rank other than 0 until rank 0 stops it."""

    def __init__(self, engine: Engine, coordinator: Coordinator) -> None:
        self.engine, self.coordinator = engine, coordinator
        self.number_of: dict[str, int] = {}
        self.unposted: set[str] = (
            set()
        )  # requests whose log-probabilities of the prompt rank 0 awaits

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
        """Schedule as rank 0 does, launch the step unless some rank can't, and read the oldest one if
        rank 0 does."""
        engine, samples = self.engine, self.coordinator.samples
        chunks = engine.schedule()
        self._check_counts(count_scheduled(chunks or []), message)
        is_launched = False
        if message.can_launch:
            own = propose_step(engine, chunks, samples)
            proposal = own._replace(
                variant=message.variant.union(own.variant),
                can_replay=message.can_replay and own.can_replay,
            )
            is_launched = engine.launch_step(chunks or [], proposal, samples)
        if not is_launched or len(engine.in_flight) == engine.max_in_flight:
            self._read(message.num_logprobs)

    def _read(self, num_logprobs: int) -> None:
        """Read the oldest step in flight; rank 0 gathers the tokens of requests that go on."""
        step, tokens, logprobs = self.engine.read_step()
        if not self.coordinator.samples:
            return
        rows = [
            encode_row(self.number_of[request.id], request, token, logprob, num_logprobs)
            for request, token, logprob in zip(step.requests, tokens, logprobs, strict=True)
            if request.state is not RequestState.FINISHED
        ]
        for request in step.requests:
            if request.id in self.unposted:
                self.unposted.discard(request.id)
                self.coordinator.post_prompt_logprobs(self.number_of[request.id], request)
        limit, counts = (
            self.engine.plan.limits.max_sequences,
            count_replica(self.engine, step.chunks),
        )
        self.coordinator.gather_tokens(counts, rows, limit, num_logprobs)

    def _check_counts(self, found: tuple[int, int], message: StepMessage) -> None:
        """RankError if this rank of rank 0's replica would run something else than rank 0."""
        expected = (message.num_requests, message.num_tokens)
        if self.coordinator.replica == 0 and found != expected:
            raise RankError(
                f"rank 0 runs {message.num_tokens} tokens of {message.num_requests} requests, and "
                f"this rank would run {found[1]} of {found[0]}",
                where=f"rank {self.coordinator.mesh.rank}",
                next="start all ranks with the same model and options; if they were, this is a bug "
                "in fulgurite",
            )

    def _apply(self, event: Event) -> None:
        engine = self.engine
        if isinstance(event, PrefixCacheReset):
            engine.block_manager.reset_prefix_cache()
        elif isinstance(event, StepsDropped):
            engine.in_flight.clear()
        elif isinstance(event, LoadSaved):
            engine.require_load_file().collect()
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
        if self.coordinator.samples and has_posted_prompt(event.params, event.prompt_ids):
            self.unposted.add(event.id)
        self.engine.scheduler.add(request)

    def _end(self, request: Request, cancelled: bool) -> None:
        if cancelled:
            self.engine.scheduler.cancel(request)
        else:
            self.engine.scheduler.finish(request)
        request.finish("ended by rank 0")
        del self.engine.requests[request.id], self.number_of[request.id]
        self.unposted.discard(request.id)
