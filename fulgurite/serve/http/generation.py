"""One prompt → n choices of text. Every endpoint that generates stands on this.

    GenerationRequest ─ admission: a turn ─▶ router: n token streams ─ detokenize, stop strings ─▶ Deltas

Leaving a generation early, for whatever reason, cancels its streams and gives its places back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.detokenizer import Detokenizer
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.admission import Admission, Ticket
from fulgurite.serve.http.errors import finish_error, too_late
from fulgurite.serve.http.metrics import Metrics
from fulgurite.serve.http.router import Router
from fulgurite.serve.remote.client import TokenStream
from fulgurite.serve.remote.handle import EngineHandle
from fulgurite.serve.remote.messages import Finish, TokenUpdate

WireLogprob = tuple[int, float, list[tuple[int, float]]]
WirePromptLogprob = tuple[int, float, int, list[tuple[int, float]]]
MAX_SEED = (1 << 64) - 1


@dataclass(frozen=True)
class GenerationRequest:
    """What to generate.

    skip_special_tokens   special tokens have no text
    hidden_ids            tokens without text if special tokens are not skipped
    continues_text        the reply goes on from the prompt, in the same text
    """

    prompt_ids: list[int]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    cache_salt: str = ""
    skip_special_tokens: bool = True
    hidden_ids: frozenset[int] = frozenset()
    continues_text: bool = False


class ChoiceFinish(msgspec.Struct, frozen=True):
    """How a choice ended: `stop` or `length`.

    `stopped_by`: the stop string or token of the request; None for the model's own end token.
    """

    reason: str
    stopped_by: str | int | None = None


class Delta(msgspec.Struct, frozen=True):
    """New text of one choice. Tokens may have no text yet; `finish` comes with the last delta.

    `prompt_logprobs`: of the prompt's tokens after the first; with the first delta of choice 0.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[WireLogprob] | None = None
    finish: ChoiceFinish | None = None
    prompt_logprobs: list[WirePromptLogprob] | None = None


class Usage(msgspec.Struct):
    """Tokens of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class Backend(Protocol):
    """What a generation needs of the server."""

    tokenizer: Tokenizer | None
    router: Router
    admission: Admission
    metrics: Metrics


class Choice:
    """One of the n replies: its token stream and its text so far."""

    def __init__(self, index: int, request: GenerationRequest, backend: Backend) -> None:
        params = request.params
        self.index, self.hidden_ids = index, request.hidden_ids
        self.params = params
        if index and params.seed is not None:
            self.params = replace(params, seed=(params.seed + index) & MAX_SEED)
        if index and params.prompt_logprobs is not None:  # choice 0 has the same prompt
            self.params = replace(self.params, prompt_logprobs=None)
        self.detokenizer: Detokenizer | None = None
        if backend.tokenizer is not None:
            self.detokenizer = Detokenizer(
                backend.tokenizer,
                params.stop,
                params.min_tokens,
                request.skip_special_tokens,
                request.prompt_ids if request.continues_text else (),
            )
        self.stream: TokenStream | None = None
        self.num_tokens = 0
        self.last_token_time = 0.0

    def advance(self, update: TokenUpdate, usage: Usage) -> Delta:
        """The text of new tokens. Ends the choice at a stop string."""
        tokens, logprobs = update.token_ids, update.logprobs
        finish = update.finish
        detokenizer = self.detokenizer
        text = ""
        if detokenizer is not None:
            text, tokens = self._detokenize(detokenizer, tokens, finish)
        if logprobs is not None:
            logprobs = logprobs[: len(tokens) - has_stop_token(finish)]
        self.num_tokens += len(tokens)
        usage.completion_tokens += len(tokens)
        ended = None
        if detokenizer is not None and detokenizer.stopped_by is not None:
            ended = ChoiceFinish("stop", detokenizer.stopped_by)
            if self.stream is not None:
                self.stream.cancel()
        elif finish is not None:
            is_end = has_stop_token(finish) and finish.stopped_by not in self.params.stop_token_ids
            ended = ChoiceFinish(finish.reason, None if is_end else finish.stopped_by)
        return Delta(self.index, text, tokens, logprobs, ended, update.prompt_logprobs)

    def _detokenize(
        self, detokenizer: Detokenizer, tokens: list[int], finish: Finish | None
    ) -> tuple[str, list[int]]:
        """The text of new tokens, and the tokens up to a stop string."""
        before = len(detokenizer.token_ids)
        visible = tokens
        if has_stop_token(finish):
            visible = tokens[:-1]
        if self.hidden_ids:
            visible = [token for token in visible if token not in self.hidden_ids]
        text = detokenizer.push_all(visible)
        if detokenizer.stopped_by is not None:
            unread = len(visible) - (len(detokenizer.token_ids) - before)
            return text, tokens[: len(tokens) - unread]
        if finish is not None:
            text += detokenizer.finish()
        return text, tokens


def has_stop_token(finish: Finish | None) -> bool:
    """Whether the last token ended the reply. It has neither text nor log-probabilities."""
    return finish is not None and isinstance(finish.stopped_by, int)


class Generation:
    """Runs one `GenerationRequest` for the holder of a ticket."""

    def __init__(self, backend: Backend, request: GenerationRequest, ticket: Ticket) -> None:
        self.backend, self.request, self.ticket = backend, request, ticket
        self.usage = Usage(prompt_tokens=len(request.prompt_ids))
        self.choices = [Choice(index, request, backend) for index in range(request.n)]
        self.first_token_time = 0.0
        self.finished_choices = 0

    async def deltas(self) -> AsyncIterator[Delta]:
        """The deltas of all choices as they come; each choice ends with one that has a `finish`."""
        request = self.request
        cost = float(request.n * (len(request.prompt_ids) + request.params.max_tokens))
        await self.backend.admission.acquire(self.ticket, request.n, cost, request.priority)
        try:
            options: dict[str, Any] = {
                "priority": request.priority,
                "cache_salt": request.cache_salt,
            }
            client = await self._prepare(options)
            for choice in self.choices:  # on one replica: they share the prompt's blocks
                choice.stream = client.generate(request.prompt_ids, choice.params, **options)
            merged = self._read_one(self.choices[0]) if request.n == 1 else self._read_all()
            async for delta in merged:
                yield delta
        finally:
            for choice in self.choices:
                if choice.stream is not None:
                    choice.stream.cancel()

    async def _prepare(self, options: dict[str, Any]) -> EngineHandle:
        """The replica that runs the request, once the prompt is handed over to it."""
        request, backend = self.request, self.backend
        prepared = backend.router.prepare(request.prompt_ids, count=request.n, **options)
        try:
            return await asyncio.wait_for(prepared, self.ticket.remaining_seconds())
        except TimeoutError:
            raise too_late("the deadline passed while the prompt was computed") from None

    async def _read_one(self, choice: Choice) -> AsyncIterator[Delta]:
        stream = choice.stream
        assert stream is not None, "choices are read after they were started"
        while True:
            update = await self._next(stream)
            self._check_finish(update.finish)
            if update.token_ids:
                self._observe_tokens(choice, len(update.token_ids))
            delta = choice.advance(update, self.usage)
            if delta.finish is not None:
                self._observe_finish(choice, delta.finish, update.finish)
            yield delta
            if delta.finish is not None:
                return

    async def _next(self, stream: TokenStream) -> TokenUpdate:
        remaining = self.ticket.remaining_seconds()
        if remaining is None:
            return await stream.next()
        try:
            return await asyncio.wait_for(stream.next(), remaining)
        except TimeoutError:
            backend = self.backend
            backend.metrics.deadline_exceeded.inc()
            count = self.usage.completion_tokens
            raise too_late(f"the deadline passed after {count} tokens of the reply") from None

    async def _read_all(self) -> AsyncIterator[Delta]:
        """The deltas of several choices, each as soon as it is there."""
        queue: asyncio.Queue[Delta | Exception] = asyncio.Queue()

        async def read(choice: Choice) -> None:
            try:
                async for delta in self._read_one(choice):
                    queue.put_nowait(delta)
            except Exception as error:  # handed to the reader of the queue
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(read(choice)) for choice in self.choices]
        try:
            unfinished = len(self.choices)
            while unfinished:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                unfinished -= item.finish is not None
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _check_finish(self, finish: Finish | None) -> None:
        if finish is not None and finish.reason not in ("stop", "length"):
            raise finish_error(finish)

    # ---- observations ------------------------------------------------------------------------------

    def _observe_tokens(self, choice: Choice, count: int) -> None:
        now, metrics = time.monotonic(), self.backend.metrics
        if not self.first_token_time:
            self.first_token_time = now
            metrics.observe_first_token(now - self.ticket.arrival)
            self.backend.admission.observe_first_token(now - self.ticket.submitted)
        elif choice.last_token_time:
            metrics.inter_token.observe((now - choice.last_token_time) / count)
        choice.last_token_time = now

    def _observe_finish(self, choice: Choice, finish: ChoiceFinish, ended: Finish | None) -> None:
        now, metrics = time.monotonic(), self.backend.metrics
        self.backend.admission.release(self.ticket, 1)
        queue_seconds = self.ticket.submitted - self.ticket.arrival
        if ended is not None:
            self.usage.cached_tokens = max(self.usage.cached_tokens, ended.cached_tokens)
            queue_seconds += ended.queue_seconds
            decode_seconds = max(ended.seconds - ended.first_token_seconds, 0.0)
            metrics.prefill_time.observe(max(ended.first_token_seconds - ended.queue_seconds, 0.0))
            metrics.decode_time.observe(decode_seconds)
            metrics.inference_time.observe(max(ended.seconds - ended.queue_seconds, 0.0))
            if choice.num_tokens > 1:
                metrics.token_time.observe(decode_seconds / (choice.num_tokens - 1))
        metrics.success.labels(metrics.model_name, finish.reason).inc()
        metrics.latency.observe(now - self.ticket.arrival)
        metrics.queue_time.observe(queue_seconds)
        metrics.generation_tokens.inc(choice.num_tokens)
        metrics.request_generation_tokens.observe(choice.num_tokens)
        if choice.index == 0:
            metrics.prompt_tokens.inc(self.usage.prompt_tokens)
            metrics.request_prompt_tokens.observe(self.usage.prompt_tokens)
            metrics.params_n.observe(self.request.n)
            metrics.params_max_tokens.observe(self.request.params.max_tokens)
        self.finished_choices += 1
        if self.finished_choices == self.request.n:
            longest = max(one.num_tokens for one in self.choices)
            metrics.max_generation_tokens.observe(longest)
