"""The engine: requests in, text out, many requests at once.

Requests come and go between steps (continuous batching); the steps are in engine_core.py. A listener
receives the updates of its request; `stream`, `generate` and `async_engine.py` are built on listeners.
The engine is thread-safe: any thread may call, and one step runs at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral

from fulgurite.errors import ArgumentError
from fulgurite.kernels.common.compile_ahead import compile_ahead
from fulgurite.serve.engine.audit import audit_engine
from fulgurite.serve.engine.captured_step import WARMUPS
from fulgurite.serve.engine.detokenizer import Detokenizer
from fulgurite.serve.engine.engine_core import EngineCore, Listener
from fulgurite.serve.engine.replica_counts import count_engine
from fulgurite.serve.engine.request import (
    Constraint,
    Request,
    RequestOptions,
    Result,
    SamplingParams,
    Update,
)
from fulgurite.serve.engine.stats import EngineStats, measure_memory
from fulgurite.serve.engine.step_preparation import StepPreparation

Prompt = str | Sequence[int]


class Engine(EngineCore):
    """An `EngineCore` with its interface: add and cancel requests, or generate whole replies."""

    preparation: StepPreparation | None = None  # since the engine was idle for the first time

    # ---- requests ----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        listener: Listener | None = None,
        constraint: Constraint | None = None,
        options: RequestOptions | None = None,
    ) -> Request:
        """Add a request to the waiting queue; ArgumentError if its prompt can't run.

        A grammar of the params is compiled in another thread, and the request waits for it. If it can't
        be used, the request ends with an error; `check_grammar` says so before.
        """
        params = self._check_params(SamplingParams() if params is None else params)
        prompt_ids = self.encode(prompt)
        spec = params.grammar_spec
        if spec is not None and constraint is not None:
            raise ArgumentError("a grammar and constraint= are given", next="give one of them")
        grammar = None if spec is None else self.grammars.start(spec)
        with self.lock:
            id = self._new_request_id() if id is None else id
            if id in self.requests:
                raise ArgumentError(f"there is a request {id!r} already")
            stop_ids = frozenset(params.stop_token_ids)
            if not params.ignore_eos:
                stop_ids |= self.eos_token_ids
            request = Request(id, prompt_ids, params, self.context, constraint, stop_ids, options)
            if grammar is not None and grammar.done() and grammar.exception() is None:
                request.set_constraint(grammar.result())
            elif grammar is not None:
                self.grammars.add(request, grammar)
                if self.coordinator is not None and spec is not None:
                    self.coordinator.record_grammar(spec)
            if id not in self.grammars.pending:
                self._start(request)
            self.requests[id] = request
            if self.tokenizer is not None and request.options.detokenize:
                continues = isinstance(prompt, str) or request.options.continues_text
                self.detokenizers[id] = Detokenizer(
                    self.tokenizer,
                    params.stop,
                    params.min_tokens,
                    prompt_ids=prompt_ids if continues else (),
                )
            if listener is not None:
                self.listeners[id] = listener
        return request

    def check_grammar(self, params: SamplingParams) -> None:
        """ArgumentError if the grammar of these params can't be used. Compiles it, if it is new."""
        if params.grammar_spec is not None:
            self.grammars.require_compiler().check(params.grammar_spec)

    def _new_request_id(self) -> str:
        ids = (f"request-{number}" for number in self.request_counter)
        return next(id for id in ids if id not in self.requests)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; ArgumentError if it can't run."""
        if self.failure is not None:
            raise self.failure
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
            raise ArgumentError(
                f"a prompt can't be {prompt!r}", next="give a string or a list of token ids"
            )
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ArgumentError("a text prompt needs a tokenizer", next="give token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        if not ids or prompt == "":
            raise ArgumentError("the prompt is empty", next="give at least one token")
        if len(ids) >= self.context:
            max_positions = self.model.config.max_positions
            longer = f", or use a longer context: the model supports {max_positions}"
            raise ArgumentError(
                f"the prompt has {len(ids)} tokens, but prompt and reply together may have "
                f"{self.context}",
                next="shorten the prompt" + (longer if self.context < max_positions else ""),
            )
        vocab_size = self.model.config.vocab_size
        invalid = [
            token for token in ids if not isinstance(token, Integral) or not 0 <= token < vocab_size
        ]
        if invalid:
            raise ArgumentError(
                f"the prompt has token {invalid[0]!r}",
                next=f"token ids are integers from 0 to {vocab_size - 1}",
            )
        return ids

    def cancel(self, id: str) -> Update | None:
        """End a request now and keep what it generated; None if there is no such request."""
        with self.lock:
            request = self.requests.get(id)
            if request is None:
                return None
            if not self.grammars.remove(request):
                if self._is_local(request):
                    self.scheduler.cancel(request)
                if self.coordinator is not None:
                    self.coordinator.record_end(request, cancelled=True)
            request.finish("cancelled")
            return self._notify(self._build_final_update(request, ""), request)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # ---- whole generations -------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """The updates of one request as they come. Closing the iterator cancels the request."""
        updates: deque[Update] = deque()
        if params is not None:
            self.check_grammar(self._check_params(params))
        request = self.add_request(prompt, params, listener=updates.append)
        stream = self._stream_updates(request, updates)
        next(stream)  # enter its `try`, so that closing an unread stream cancels as well
        return stream

    def _stream_updates(self, request: Request, updates: deque[Update]) -> Iterator[Update]:
        try:
            update = Update(request.id, "", ())
            yield update
            while update.result is None:
                if not updates:
                    self.step()
                while updates:
                    update = updates.popleft()
                    yield update
        finally:
            self.cancel(request.id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Result]:
        """The results of all prompts, in order. All prompts are checked before the first one runs."""
        all_params = self._expand_params(prompts, params)
        encoded = [self.encode(prompt) for prompt in prompts]
        for one in all_params:
            self.check_grammar(one)
        results: dict[str, Result] = {}

        def listen(update: Update) -> None:
            if update.result is not None:
                results[update.id] = update.result

        ids: list[str] = []
        try:
            for prompt, prompt_ids, one in zip(prompts, encoded, all_params, strict=True):
                options = RequestOptions(continues_text=isinstance(prompt, str))
                added = self.add_request(prompt_ids, one, listener=listen, options=options)
                ids.append(added.id)
            while len(results) < len(ids):
                self.step()
        finally:
            for id in ids:
                self.cancel(id)
        return [results[id] for id in ids]

    def _expand_params(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        """One SamplingParams a prompt."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ArgumentError(
                f"{len(prompts)} prompts, but {len(params)} sampling params",
                next="give one SamplingParams for all prompts, or a list with one each",
            )
        return [self._check_params(one) for one in params]

    def _check_params(self, params: SamplingParams) -> SamplingParams:
        """The params if this model supports them; otherwise ArgumentError."""
        if not isinstance(params, SamplingParams):
            raise ArgumentError(f"{params!r} is not a SamplingParams")
        if self.failure is not None:
            raise self.failure
        params.check_token_ids(self.model.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ArgumentError("stop strings need a tokenizer", next="use stop_token_ids")
        return params

    def stats(self) -> EngineStats:
        """What the engine has done so far, and what it is doing."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            recorder, scheduler, runner = self.recorder, self.scheduler, self.runner
            counts = count_engine(self)
            return EngineStats(
                waiting=counts.waiting,
                running=counts.running,
                finished=dict(recorder.finished),
                steps=recorder.steps,
                steps_in_flight=len(self.in_flight),
                prefill_tokens=recorder.prefill_tokens,
                decode_tokens=recorder.decode_tokens,
                sampled_tokens=recorder.sampled_tokens,
                prefix_cached_tokens=recorder.prefix_cached_tokens,
                preemptions=counts.preemptions,
                tokens_per_second=recorder.tokens_per_second(),
                step_seconds=recorder.step_percentiles(),
                cache_blocks=counts.total_blocks,
                used_cache_blocks=counts.used_blocks,
                prefix_cache_blocks=counts.prefix_cache_blocks,
                captured_steps=tuple(runner.captured_sizes),
                no_capture_reason=runner.no_capture_reason or runner.eager_reason,
                max_batched_tokens=scheduler.max_batched_tokens,
                planned_batched_tokens=self.plan.limits.max_batched_tokens,
                out_of_memory=self.memory.num_failures,
                memory=measure_memory(self.model, self.plan, self.kv_cache.num_bytes),
                ranks=() if self.coordinator is None else self.coordinator.read_rank_times(),
                restarts=0 if self.restarter is None else self.restarter.num_restarts,
            )

    def audit(self) -> dict[str, int]:
        """What is held by no request, by kind (audit.py). All are 0 in a healthy engine."""
        with self.lock:
            return audit_engine(self)

    def warm_up(self) -> None:
        """Run one short request, so that kernels are compiled before the first real one."""
        num_tokens = WARMUPS + 2  # of a prefill, and of decode steps up to the captured one
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        self.generate([[0] * max(1, min(4, self.context - num_tokens))], params)
        self.reset_prefix_cache()

    def prepare_step(self) -> bool:
        """Record or capture a step that later requests may need, while there is none
        (step_preparation.py). False: nothing is left to prepare."""
        with self.lock:
            if self.requests:
                return False
            if self.preparation is None:
                self.preparation = StepPreparation(self.runner)
            return self.preparation.run_next()

    @contextmanager
    def compile_ahead(self, threads: int) -> Iterator[None]:
        """Requests of the block compile their kernels side by side; their replies mean nothing.

        On a GPU with one rank. Elsewhere, or with one thread, requests run as always.
        """
        runner = self.runner
        if threads < 2 or runner.graph_pool is None or self.coordinator is not None:
            yield
            return
        reason, runner.no_capture_reason = runner.no_capture_reason, "kernels are compiled first"
        in_flight, self.max_in_flight = self.max_in_flight, 1  # no ids of tokens to be sampled
        try:
            with compile_ahead(threads):
                yield
        finally:
            runner.no_capture_reason, self.max_in_flight = reason, in_flight
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Later requests find no keys of earlier ones."""
        with self.lock:
            if self.coordinator is not None:
                self.coordinator.record_prefix_cache_reset()
            self.block_manager.reset_prefix_cache()
