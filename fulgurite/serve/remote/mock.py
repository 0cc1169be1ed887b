"""An engine without a model, to test and measure everything around the engine.

Tokens of a request depend on its prompt and position only, like those of a real model. Limits,
queueing and results have the same form as those of an `LLM`.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from fulgurite.errors import ArgumentError
from fulgurite.models.tokenizer import Tokenizer, find_tokenizer
from fulgurite.serve.engine.request import SamplingParams
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
    PrefixBlocks,
    Progress,
    TokenUpdate,
)

EMBEDDING_SIZE = 8
REPLY = re.compile(r"<reply>(.*?)</reply>", re.DOTALL)  # in a prompt, with `echo`


@dataclass
class MockRequest:
    """A generation in progress; `tokens` are all that it will give."""

    request: Generate
    params: SamplingParams
    listener: Listener
    tokens: list[int]
    finish_reason: str
    arrival: float
    stopped_by: int | None = None
    sent: int = 0
    start: float = field(default=0.0)
    first_token: float = field(default=0.0)


class MockEngine:
    """Gives `tokens_per_step` tokens to each of up to `max_sequences` requests in a step.

    `step_seconds`: how long a step sleeps. `eos_every`: replies without ignore_eos end at about so many
    tokens. `replies`: texts that requests get in turn instead, as tokens of the model `tokenizer`.
    `echo`: a request gets what its prompt has between <reply> and </reply>; the last of these counts.
    `cached_tokens`: what requests report.
    """

    def __init__(
        self,
        vocab_size: int = 49152,
        context: int = 8192,
        max_sequences: int = 256,
        tokens_per_step: int = 16,
        step_seconds: float = 0.0,
        eos_every: int = 1 << 30,
        replies: Sequence[str] = (),
        tokenizer: str = "smollm2",
        echo: bool = False,
        cached_tokens: int = 0,
    ) -> None:
        self.tokens_per_step, self.step_seconds = tokens_per_step, step_seconds
        self.eos_every, self.cached_tokens = eos_every, cached_tokens
        self.replies = [encode_reply(text, tokenizer) for text in replies]
        self.num_replies = 0
        self.tokenizer = tokenizer if echo else None
        self.info = EngineInfo(
            model_type="mock",
            context=context,
            vocab_size=vocab_size,
            max_sequences=max_sequences,
            cache_tokens=context * max_sequences,
            block_size=16,
            device="none",
            plan="mock engine: no weights",
            planned_bytes=0,
            available_bytes=0,
            weights="none",
            start_seconds={},
            prefix_caching=False,
            can_embed=True,
        )
        self.waiting: deque[MockRequest] = deque()
        self.running: dict[int, MockRequest] = {}
        self.steps = self.generated = self.prefilled = 0
        self.step_times: list[float] = []

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def can_continue(self) -> bool:
        return True

    def add(self, request: Generate, listener: Listener) -> None:
        prompt, params = request.prompt_ids, request.read_params()
        if not prompt or len(prompt) >= self.info.context:
            raise ArgumentError(f"a prompt of {len(prompt)} tokens can't run")
        count = min(params.max_tokens, self.info.context - len(prompt))
        reason = "length"
        ends_at = 1 + sum(prompt) % self.eos_every
        if not params.ignore_eos and ends_at < count:
            count, reason = ends_at, "stop"
        reply = self._choose_reply(prompt)
        if reply is not None:
            self._add_reply(reply, request, params, listener)
            return
        seed = (sum(prompt) * 31 + len(prompt)) % (1 << 31)
        tokens = np.random.default_rng(seed).integers(100, self.info.vocab_size - 100, count)
        now = time.perf_counter()
        self.waiting.append(
            MockRequest(request, params, listener, tokens.tolist(), reason, arrival=now)
        )

    def _choose_reply(self, prompt: list[int]) -> list[int] | None:
        """The tokens of a scripted reply; None: there is none."""
        if self.tokenizer is not None:
            text = load_reply_tokenizer(self.tokenizer).decode(prompt, skip_special_tokens=False)
            found = REPLY.findall(text)
            if found:
                return encode_reply(found[-1], self.tokenizer)
        if not self.replies:
            return None
        self.num_replies += 1
        return self.replies[(self.num_replies - 1) % len(self.replies)]

    def _add_reply(
        self, tokens: list[int], request: Generate, params: SamplingParams, listener: Listener
    ) -> None:
        """A request whose reply is known; its own limit may cut it."""
        cut = tokens[: params.max_tokens]
        reason = "stop" if len(cut) == len(tokens) else "length"
        stopped_by = cut[-1] if reason == "stop" else None
        now = time.perf_counter()
        self.waiting.append(MockRequest(request, params, listener, cut, reason, now, stopped_by))

    def cancel(self, id: int) -> None:
        found = self.running.pop(id, None)
        if found is None:
            found = next((one for one in self.waiting if one.request.id == id), None)
            if found is not None:
                self.waiting.remove(found)
        if found is not None:
            self._finish(found, [], "cancelled")

    def step(self) -> None:
        start = time.perf_counter()
        if self.step_seconds:
            time.sleep(self.step_seconds)
        while self.waiting and len(self.running) < self.info.max_sequences:
            one = self.waiting.popleft()
            one.start = start
            self.running[one.request.id] = one
            self.prefilled += len(one.request.prompt_ids)
        for one in [*self.running.values()]:
            self._advance(one)
        self.steps += 1
        self.step_times.append(time.perf_counter() - start)

    def _advance(self, one: MockRequest) -> None:
        tokens = one.tokens[one.sent : one.sent + self.tokens_per_step]
        one.sent += len(tokens)
        one.first_token = one.first_token or time.perf_counter()
        self.generated += len(tokens)
        if one.sent == len(one.tokens):
            del self.running[one.request.id]
            self._finish(one, tokens, one.finish_reason)
        else:
            logprobs, prompt = self._logprobs(one, tokens), self._prompt_logprobs(one)
            one.listener(TokenUpdate(one.request.id, tokens, logprobs, None, prompt))

    def _logprobs(self, one: MockRequest, tokens: list[int]) -> WireLogprobs | None:
        count = one.params.logprobs
        if count is None:
            return None
        return [
            (token, -0.5, [(token + rank, -0.5 - rank) for rank in range(count)])
            for token in tokens
        ]

    def _prompt_logprobs(self, one: MockRequest) -> WirePromptLogprobs | None:
        count = one.params.prompt_logprobs
        if count is None:
            return None
        return [
            (token, -0.5, 1, [(token + rank, -0.5 - rank) for rank in range(count)])
            for token in one.request.prompt_ids[1:]
        ]

    def _finish(self, one: MockRequest, tokens: list[int], reason: str) -> None:
        now = time.perf_counter()
        finish = Finish(
            reason,
            one.stopped_by if reason == "stop" else None,
            None,
            self.cached_tokens,
            max(one.start - one.arrival, 0.0),
            max(one.first_token - one.arrival, 0.0),
            now - one.arrival,
        )
        logprobs, prompt = self._logprobs(one, tokens), self._prompt_logprobs(one)
        one.listener(TokenUpdate(one.request.id, tokens, logprobs, finish, prompt))

    def watch_ranks(self, listener: RestartListener) -> None:
        pass  # it has one rank

    def check_ranks(self) -> None:
        pass

    def prepare_step(self) -> bool:
        return False

    def fail_step(self, reason: str) -> None:
        failed, self.running = self.running, {}
        for one in failed.values():
            finish = Finish("error", None, reason, 0, 0.0, 0.0, time.perf_counter() - one.arrival)
            one.listener(TokenUpdate(one.request.id, [], None, finish))

    def embed(self, prompts: list[list[int]]) -> list[bytes]:
        seeds = (sum(prompt) % (1 << 31) for prompt in prompts)
        rows = (np.random.default_rng(seed).standard_normal(EMBEDDING_SIZE) for seed in seeds)
        return [row.astype(np.float32).tobytes() for row in rows]

    def export_prefix(self, request: ExportPrefix) -> PrefixBlocks:
        return PrefixBlocks([], 0, 0, [], "mock")

    def import_prefix(self, blocks: PrefixBlocks) -> int:
        return 0

    def reset_prefix_cache(self) -> None:
        pass

    def audit(self) -> dict[str, int]:
        return {"requests": 0}

    def read_progress(self) -> Progress:
        times, self.step_times = self.step_times, []
        return Progress(
            steps=self.steps,
            running=len(self.running),
            waiting=len(self.waiting),
            total_blocks=1,
            prefill_tokens=self.prefilled,
            generated_tokens=self.generated,
            step_seconds=times[-100:],
        )

    def close(self) -> None:
        pass


@lru_cache(maxsize=4)
def load_reply_tokenizer(name: str) -> Tokenizer:
    tokenizer = find_tokenizer(name)
    if tokenizer is None:
        raise ArgumentError(f"{name} has no tokenizer", next="choose a model with one")
    return tokenizer


def encode_reply(text: str, tokenizer_name: str) -> list[int]:
    """The tokens of a reply, with the one that ends it."""
    tokenizer = load_reply_tokenizer(tokenizer_name)
    return [*tokenizer.encode(text, add_special_tokens=False), *tokenizer.stop_ids[:1]]
