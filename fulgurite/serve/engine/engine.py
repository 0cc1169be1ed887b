"""The engine: requests in, text out, many requests at once.

    step():  schedule ─▶ execute ─▶ postprocess

One step computes a chunk of every scheduled request, and samples one token for each request whose
prompt is complete. Requests come and go between steps (continuous batching). A listener receives the
updates of its request; `stream`, `generate` and `async_engine.py` are built on listeners. The engine
is thread-safe: any thread may call, and one step runs at a time.

If a step is interrupted, or a grammar raises, all requests stay as they were and run again. A
listener that raises does not affect the other listeners.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from numbers import Integral
from typing import NamedTuple

from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.models.layers import CausalLM
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.plan.kv_cache import group_layers
from fulgurite.plan.memory import MemoryPlan
from fulgurite.serve.engine.block_manager import BlockManager, BlockPool
from fulgurite.serve.engine.coordinator import NO_CAPTURE_REASON, Coordinator
from fulgurite.serve.engine.detokenizer import Detokenizer
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.request import (
    Constraint,
    Request,
    RequestState,
    Result,
    SamplingParams,
    TokenLogprob,
    Update,
)
from fulgurite.serve.engine.runner import ModelRunner
from fulgurite.serve.engine.sampler import Sampler, compute_logprobs
from fulgurite.serve.engine.scheduler import ScheduledChunk, Scheduler

Prompt = str | Sequence[int]
Listener = Callable[[Update], None]


class SampledToken(NamedTuple):
    """A token that was sampled for a request in this step."""

    request: Request
    token: int
    logprob: TokenLogprob | None = None


class Engine:
    """A model with its KV cache and unfinished requests.

    Without a tokenizer prompts are token ids and results have no text. With a `coordinator` this
    engine drives the engines of other ranks.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None,
        plan: MemoryPlan,
        *,
        prefix_caching: bool = True,
        coordinator: Coordinator | None = None,
    ) -> None:
        if tokenizer is not None:
            tokenizer.check_vocab_size(model.config.vocab_size)
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        limits, specs = plan.limits, model.attention_specs
        groups = group_layers(specs)
        self.block_manager = BlockManager(
            groups,
            [BlockPool(count) for count in plan.group_blocks],
            limits,
            # Keys that depend on the sequence length differ between requests of the same prefix.
            prefix_caching=prefix_caching and not model.needs_sequence_lengths,
        )
        self.kv_cache = PagedKVCache(
            specs, groups, plan.group_blocks, limits.block_size, limits.kv_dtype, plan.device
        )
        self.scheduler = Scheduler(
            self.block_manager,
            limits.max_sequences,
            limits.max_batched_tokens,
            model.recompute_after,
        )
        self.coordinator = coordinator
        no_capture_reason = None if coordinator is None else NO_CAPTURE_REASON
        self.runner = ModelRunner(model, self.kv_cache, self.block_manager, no_capture_reason)
        self.sampler = Sampler()
        self.context = min(limits.context, self.block_manager.max_request_tokens())
        self.requests: dict[str, Request] = {}
        self.detokenizers: dict[str, Detokenizer] = {}
        self.listeners: dict[str, Listener] = {}
        self.request_counter = itertools.count()
        self.lock = threading.RLock()
        self.eos_token_ids = frozenset(model.config.eos_token_ids)
        if tokenizer is not None:
            self.eos_token_ids |= frozenset(tokenizer.stop_ids)

    # ---- requests ----------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        listener: Listener | None = None,
        constraint: Constraint | None = None,
    ) -> Request:
        """Add a request to the waiting queue; ArgumentError if its prompt can't run."""
        params = self._check_params(SamplingParams() if params is None else params)
        prompt_ids = self.encode(prompt)
        with self.lock:
            id = self._new_request_id() if id is None else id
            if id in self.requests:
                raise ArgumentError(f"there is a request {id!r} already")
            request = Request(id, prompt_ids, params, self.context, constraint)
            if self.coordinator is not None:
                self.coordinator.add_request(request, prompt_ids)
            self.requests[id] = request
            if self.tokenizer is not None:
                self.detokenizers[id] = Detokenizer(self.tokenizer, params.stop)
            if listener is not None:
                self.listeners[id] = listener
            if self._is_local(request):
                self.scheduler.add(request)
        return request

    def _new_request_id(self) -> str:
        ids = (f"request-{number}" for number in self.request_counter)
        return next(id for id in ids if id not in self.requests)

    def _is_local(self, request: Request) -> bool:
        """Whether the request runs on this rank's replica."""
        return self.coordinator is None or self.coordinator.is_local(request)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt; ArgumentError if it can't run."""
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
            if self._is_local(request):
                self.scheduler.cancel(request)
            if self.coordinator is not None:
                self.coordinator.record_end(request, cancelled=True)
            request.finish("cancelled")
            return self._notify(self._build_final_update(request, ""), request)

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    # ---- one step ----------------------------------------------------------------------------------

    def step(self) -> list[Update]:
        """Run one step of the model and return an update for every new token."""
        with self.lock:
            chunks = self.scheduler.schedule()
            if self._is_idle(chunks):
                return []
            sampled = self._execute(chunks)
            return self._postprocess(chunks, sampled)

    def _is_idle(self, chunks: Sequence[ScheduledChunk]) -> bool:
        if chunks or not all(self._is_local(request) for request in self.requests.values()):
            return False
        assert not self.requests, "there are requests, but none can run"
        return True

    def _execute(self, chunks: Sequence[ScheduledChunk]) -> list[SampledToken]:
        """Run the model and sample. Requests don't change, so that an interrupted step can rerun."""
        if self.coordinator is not None:
            self.coordinator.begin_step(chunks)
        logits_RO = self.runner.execute(chunks)
        requests = [chunk.request for chunk in chunks if chunk.needs_sampling]
        tokens = self.sampler.sample(logits_RO, requests) if requests else []
        return [
            SampledToken(request, token, _maybe_logprobs(logits_RO, row, request, token))
            for row, (request, token) in enumerate(zip(requests, tokens, strict=True))
        ]

    def _postprocess(
        self, chunks: Sequence[ScheduledChunk], sampled: list[SampledToken]
    ) -> list[Update]:
        """Append the tokens of all replicas, finish requests and notify listeners."""
        self.scheduler.mark_computed(chunks)
        for request, token, logprob in sampled:
            request.append(token)
            if logprob is not None:
                request.logprobs.append(logprob)
        if self.coordinator is not None:
            for remote in self.coordinator.gather_remote_tokens(self.plan.limits.max_sequences):
                request = self.requests[remote.id]
                request.append(remote.token)
                sampled.append(SampledToken(request, remote.token))
            for request, token, _ in sampled:
                self.coordinator.record_token(request, token)
        updates: list[Update] = []
        remaining = iter(sampled)
        try:
            for request, token, _ in remaining:
                self._process_token(request, token, updates)
        finally:  # if a listener or grammar raises, the other requests still get their tokens
            with ExitStack() as stack:
                for request, token, _ in reversed(list(remaining)):
                    stack.callback(self._process_token, request, token, updates)
        return updates

    def _process_token(self, request: Request, token: int, updates: list[Update]) -> None:
        if request.state is RequestState.FINISHED:  # a listener has cancelled it in this step
            return
        if request.constraint is not None:
            request.constraint.accept_token(token)
        update = self._advance(request, token)
        updates.append(self._notify(update, request) if request.id in self.listeners else update)

    def _advance(self, request: Request, token: int) -> Update:
        """Detokenize a new token and finish the request if it stops."""
        params, detokenizer = request.params, self.detokenizers.get(request.id)
        is_eos = not params.ignore_eos and token in self.eos_token_ids
        is_stop = is_eos or token in params.stop_token_ids
        new_text = "" if is_stop or detokenizer is None else detokenizer.push(token)
        if is_stop:
            request.finish("stop", token)
        elif detokenizer is not None and detokenizer.stopped_by is not None:
            request.finish("stop", detokenizer.stopped_by)
        elif request.length == request.max_length:
            request.finish("length")
        else:
            return Update(request.id, new_text, (token,))
        if self._is_local(request):
            self.scheduler.finish(request)
        if self.coordinator is not None:
            self.coordinator.record_end(request)
        return self._build_final_update(request, new_text, (token,))

    def _build_final_update(
        self, request: Request, new_text: str, token_ids: tuple[int, ...] = ()
    ) -> Update:
        """The last update of a finished request, which leaves the engine."""
        detokenizer = self.detokenizers.pop(request.id, None)
        if detokenizer is not None:
            new_text += detokenizer.finish()
            if detokenizer.stopped_by is not None and request.finish_reason == "length":
                request.finish("stop", detokenizer.stopped_by)
        del self.requests[request.id]
        result = request.build_result(detokenizer.text if detokenizer is not None else "")
        return Update(request.id, new_text, token_ids, result)

    def _notify(self, update: Update, request: Request) -> Update:
        listener = self.listeners.get(request.id)
        if listener is not None:
            if update.result is not None:
                del self.listeners[request.id]
            listener(update)
        return update

    # ---- whole generations -------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Update]:
        """The updates of one request as they come. Closing the iterator cancels the request."""
        updates: deque[Update] = deque()
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
        results: dict[str, Result] = {}

        def listen(update: Update) -> None:
            if update.result is not None:
                results[update.id] = update.result

        ids: list[str] = []
        try:
            for prompt_ids, prompt_params in zip(encoded, all_params, strict=True):
                ids.append(self.add_request(prompt_ids, prompt_params, listener=listen).id)
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
        params.check_token_ids(self.model.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise ArgumentError("stop strings need a tokenizer", next="use stop_token_ids")
        return params

    def warm_up(self) -> None:
        """Run one short request, so that kernels are compiled before the first real one."""
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        self.generate([[0] * max(1, min(4, self.context - 2))], params)
        self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Later requests find no keys of earlier ones."""
        with self.lock:
            if self.coordinator is not None:
                self.coordinator.record_prefix_cache_reset()
            self.block_manager.reset_prefix_cache()


def _maybe_logprobs(
    logits_RO: Tensor, row: int, request: Request, token: int
) -> TokenLogprob | None:
    count = request.params.logprobs
    return None if count is None else compute_logprobs(logits_RO[row], token, count)
