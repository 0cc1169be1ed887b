"""`POST /v1/completions`: text or token ids in, text out.

A list of prompts gives `n` choices each, in the order of the prompts. With `echo` choices begin with the
prompt; with `logprobs` as well, they have the log-probabilities of its tokens.
"""

from __future__ import annotations

import asyncio
import codecs
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from fulgurite.serve.http.admission import Ticket
from fulgurite.serve.http.api.sampling import (
    ResponseFormat,
    SamplingFields,
    refuse_unsupported,
)
from fulgurite.serve.http.asgi import (
    DONE_EVENT,
    JsonResponse,
    encode_event,
    start_stream,
    while_connected,
)
from fulgurite.serve.http.body import parse_body, read_body
from fulgurite.serve.http.config import Limits
from fulgurite.serve.http.errors import invalid, to_api_error
from fulgurite.serve.http.generation import (
    Delta,
    Generation,
    GenerationRequest,
    Usage,
    WireLogprob,
    WirePromptLogprob,
)
from fulgurite.serve.http.server import Server, new_id
from fulgurite.serve.http.token_texts import TokenTexts

Prompt = str | list[int]
MIN_LOGPROB = -9999.0  # OpenAI's value for impossible tokens; JSON has no infinity


class CompletionRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The body of a text completion."""

    prompt: str | list[str | int | list[int]] | None = None
    model: str | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    response_format: ResponseFormat | None = None
    add_special_tokens: bool | None = None  # True

    @property
    def echoes_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None

    @property
    def has_no_reply(self) -> bool:
        """Whether only the prompt is wanted: `max_tokens` is 0."""
        return self.max_tokens == 0 and (bool(self.echo) or self.prompt_logprobs is not None)

    def count_prompt_logprobs(self, limits: Limits) -> int | None:
        count = super().count_prompt_logprobs(limits)
        if not self.echoes_logprobs:
            return count
        return max(count or 0, self.logprobs or 0)


class Logprobs(Struct, kw_only=True):
    """Log-probabilities in the form of text completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass
class Batch:
    """The generations of one request, one a prompt; choices are numbered across prompts.

    prompts        the texts to echo; empty: none
    has_no_reply   only prompts are wanted: the reply's one token is dropped
    """

    generations: list[Generation]
    prompts: list[str]
    n: int
    has_no_reply: bool = False

    @property
    def usage(self) -> Usage:
        parts = [generation.usage for generation in self.generations]
        return Usage(
            sum(one.prompt_tokens for one in parts),
            0 if self.has_no_reply else sum(one.completion_tokens for one in parts),
            sum(one.cached_tokens for one in parts),
        )


async def create_completion(request: Request, server: Server) -> Response:
    """Handle a request."""
    limits = server.config.limits
    raw = await read_body(request, limits)
    body = parse_body(raw, CompletionRequest, limits)
    model = server.check_model(body.model)
    check_body(body)
    ticket = server.enter(request, len(raw), body.deadline)
    try:
        batch = await build_batch(server, body, ticket)
        id = new_id("cmpl-", body.request_id)
        if body.stream:
            events = stream_events(server, body, batch, id, model, ticket)
            return await start_stream(request, events)
        return JsonResponse(
            await while_connected(request, complete(server, body, batch, id, model))
        )
    except BaseException:  # also a cancelled task: the place is given back, then it goes on
        ticket.close()
        raise
    finally:
        if not body.stream:
            ticket.close()


def check_body(body: CompletionRequest) -> None:
    body.check_stream()
    if body.prompt is None:
        raise invalid("Missing required parameter: 'prompt'.", "prompt")
    refuse_unsupported(body, {"suffix": ("",), "best_of": (1, body.n)})


def split_prompts(prompt: str | list[Any], limit: int, param: str) -> list[Prompt]:
    """A list with one prompt, or the prompts of a batch: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid(f"'{param}' is empty", param)
    if all(isinstance(one, int) for one in prompt):
        return [prompt]
    if len({type(one) for one in prompt}) > 1 or isinstance(prompt[0], int):
        raise invalid(f"'{param}' must be a text, texts, token ids, or lists of token ids", param)
    if len(prompt) > limit:
        raise invalid(f"'{param}' has {len(prompt)} entries; the limit is {limit}", param)
    return list(prompt)


async def build_batch(server: Server, body: CompletionRequest, ticket: Ticket) -> Batch:
    """Tokenize and check all prompts before the first one runs."""
    limits = server.config.limits
    n = body.count(limits)
    prompts = split_prompts(body.prompt or [], limits.batch, "prompt")
    if n * len(prompts) > limits.batch:
        raise invalid(
            f"{n * len(prompts)} choices in one request; the limit is {limits.batch}", "n"
        )
    if body.logprobs is not None and not 0 <= body.logprobs <= limits.logprobs:
        raise invalid(f"'logprobs' must be 0 to {limits.logprobs}", "logprobs")
    constraint = body.grammar_fields(body.response_format)
    generations, texts = [], []
    for prompt in prompts:
        ids = prompt
        if isinstance(ids, str):
            ids = await server.encode(ids, body.add_special_tokens is not False)
        left = server.check_prompt(ids, "prompt")
        asked = 16 if body.max_tokens is None else body.max_tokens
        asked = 1 if body.has_no_reply else asked  # the engine samples a token in any case
        max_tokens = server.choose_max_tokens(asked, left, "max_tokens")
        defaults = server.sampling_defaults
        params = body.build_params(limits, max_tokens, body.logprobs, constraint, defaults)
        await server.check_params(params)
        generation = GenerationRequest(
            ids,
            params,
            n,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            skip_special_tokens=body.skip_special_tokens is not False,
            continues_text=True,
        )
        generations.append(server.generate(generation, ticket))
        if body.echo:
            texts.append(
                prompt if isinstance(prompt, str) else server.require_tokenizer().decode(ids)
            )
    return Batch(generations, texts, n, body.has_no_reply)


# ---- replies --------------------------------------------------------------------------------------


def describe_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class TextOffsets:
    """Where tokens begin in a choice's text: in characters, of which a token may be a part.

    `text`: the choice's text begins so; a tokenizer may have put a space before it.
    """

    def __init__(self, texts: TokenTexts | None, text: str = " ") -> None:
        self.texts, self.next = texts, 0
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.has_added_space = not text.startswith(" ")

    def add(self, token: int) -> int:
        """The offset of the next token."""
        assert self.texts is not None, "there are texts"
        offset = self.next
        data = b"" if self.texts.is_special(token) else bytes(self.texts[token][1])
        if data and self.has_added_space:
            data, self.has_added_space = data.removeprefix(b" "), False
        self.next += len(self.decoder.decode(data))
        return offset


def describe_logprobs(
    server: Server, logprobs: Sequence[WireLogprob | int] | None, offsets: TextOffsets
) -> Logprobs | None:
    """Entries of these tokens; an integer is a token without a log-probability."""
    if logprobs is None or server.token_texts is None:
        return None
    texts = server.token_texts
    described = Logprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for entry in logprobs:
        token = entry if isinstance(entry, int) else entry[0]
        described.tokens.append(texts.name(token))
        described.text_offset.append(offsets.add(token))
        if isinstance(entry, int):
            described.token_logprobs.append(None)
            described.top_logprobs.append(None)
            continue
        _, own, top = entry
        described.token_logprobs.append(max(own, MIN_LOGPROB))
        described.top_logprobs.append(
            {texts.name(one): max(value, MIN_LOGPROB) for one, value in (*top, (token, own))}
        )
    return described


def list_prompt_logprobs(
    prompt_ids: Sequence[int], logprobs: Sequence[WirePromptLogprob], count: int
) -> list[WireLogprob | int]:
    """The prompt's tokens in the form of a reply's, with `count` alternatives; the first has none."""
    return [prompt_ids[0], *((token, own, top[:count]) for token, own, _, top in logprobs)]


def describe_prompt_logprobs(
    server: Server, logprobs: Sequence[WirePromptLogprob] | None, count: int
) -> list[dict[str, Any] | None]:
    """vLLM's form: by token id, of the prompt's own token and of the `count` likeliest."""
    texts = server.token_texts

    def entry(token: int, value: float, rank: int) -> dict[str, Any]:
        text = None if texts is None else texts[token][0]
        return {"logprob": max(value, MIN_LOGPROB), "rank": rank, "decoded_token": text}

    described: list[dict[str, Any] | None] = [None]
    for token, own, rank, top in logprobs or ():
        values = {str(token): entry(token, own, rank)}
        for place, (one, value) in enumerate(top[:count], 1):
            values.setdefault(str(one), entry(one, value, place))
        described.append(values)
    return described


async def complete(
    server: Server, body: CompletionRequest, batch: Batch, id: str, model: str
) -> dict[str, Any]:
    """The whole reply; prompts run at the same time."""
    parts = await gather_or_cancel([collect(one) for one in batch.generations])
    choices = []
    for number, deltas in enumerate(parts):
        prompt = read_prompt_part(batch, number, deltas)
        for index in range(batch.n):
            own = [delta for delta in deltas if delta.index == index]
            choices.append(build_choice(server, body, number * batch.n + index, own, prompt))
    return {
        "id": id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": describe_usage(batch.usage),
    }


async def collect(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation.deltas()]


async def gather_or_cancel(coroutines: list[Any]) -> list[Any]:
    """The results of all; the first error cancels the others."""
    if len(coroutines) == 1:
        return [await coroutines[0]]
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class PromptPart(NamedTuple):
    """The prompt of a choice: the text to echo, its tokens, and their log-probabilities."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[WirePromptLogprob] | None


def read_prompt_part(batch: Batch, number: int, deltas: Sequence[Delta]) -> PromptPart:
    """Of prompt `number`, from the deltas of its choices."""
    found = (one.prompt_logprobs for one in deltas if one.prompt_logprobs is not None)
    text = batch.prompts[number] if batch.prompts else ""
    return PromptPart(text, batch.generations[number].request.prompt_ids, next(found, None))


def build_choice(
    server: Server,
    body: CompletionRequest,
    index: int,
    deltas: list[Delta],
    prompt: PromptPart | None = None,
) -> dict[str, Any]:
    """A choice of these deltas; with its prompt, unless that was sent before."""
    finish = deltas[-1].finish if deltas else None
    if body.has_no_reply:
        deltas = []
    choice: dict[str, Any] = {
        "index": index,
        "text": "".join(delta.text for delta in deltas),
        "logprobs": None,
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": None if finish is None else finish.stopped_by,
    }
    if body.has_no_reply and finish is not None:
        choice["finish_reason"], choice["stop_reason"] = "length", None
    entries: list[WireLogprob | int] = [one for delta in deltas for one in delta.logprobs or ()]
    if prompt is not None:
        choice["text"] = prompt.text + choice["text"]
        if body.echoes_logprobs and prompt.logprobs is not None:
            own = list_prompt_logprobs(prompt.token_ids, prompt.logprobs, body.logprobs or 0)
            entries = [*own, *entries]
        if body.prompt_logprobs is not None:
            described = describe_prompt_logprobs(server, prompt.logprobs, body.prompt_logprobs)
            choice["prompt_logprobs"] = described
    if body.logprobs is not None:
        offsets = TextOffsets(server.token_texts, choice["text"])
        choice["logprobs"] = describe_logprobs(server, entries, offsets)
    if body.return_token_ids:
        choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
        if prompt is not None:
            choice["prompt_token_ids"] = prompt.token_ids
    return choice


async def stream_events(
    server: Server, body: CompletionRequest, batch: Batch, id: str, model: str, ticket: Ticket
) -> AsyncIterator[bytes]:
    """Chunks of all prompts as they come, then usage if asked for."""
    chunk: dict[str, Any] = {
        "id": id,
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    options = body.stream_options
    include_usage = options is not None and options.include_usage
    has_started = False
    stream = ChoiceStream(server, body, batch)
    deltas = merge_deltas(batch)
    try:
        async for index, delta in deltas:
            for choice in stream.add(index, delta):
                event = {**chunk, "choices": [choice]}
                if options is not None and options.continuous_usage_stats:
                    event["usage"] = describe_usage(batch.usage)
                elif include_usage:
                    event["usage"] = None
                has_started = True
                yield encode_event(event)
        if include_usage:
            yield encode_event({**chunk, "choices": [], "usage": describe_usage(batch.usage)})
        yield DONE_EVENT
    except Exception as error:  # a stream that has begun can only end with an event
        failure = to_api_error(error)
        if failure is None or not has_started:
            raise
        yield encode_event(failure.to_openai())
        yield DONE_EVENT
    finally:
        await deltas.aclose()  # type: ignore[attr-defined]
        ticket.close()


class ChoiceStream:
    """Deltas of choices in, their chunks out. With `echo` each choice begins with its prompt.

    Log-probabilities of a prompt come with choice 0: until then the deltas of the others wait.
    """

    def __init__(self, server: Server, body: CompletionRequest, batch: Batch) -> None:
        self.server, self.body, self.batch = server, body, batch
        self.offsets: dict[int, TextOffsets] = {}
        self.started: set[int] = set()  # choices whose prompt was sent, if there is one to send
        self.held: list[tuple[int, Delta]] = []

    def add(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        number = index // self.batch.n
        chunks: list[dict[str, Any]] = []
        if index in self.started or not (self.batch.prompts or self.body.return_token_ids):
            return [self.describe(index, delta)]
        if self.body.echoes_logprobs and delta.prompt_logprobs is None:
            self.held.append((index, delta))
            return []
        first = number * self.batch.n
        own = range(first, first + self.batch.n) if self.body.echoes_logprobs else [index]
        for one in own:
            chunks.append(self.begin(one, read_prompt_part(self.batch, number, [delta])))
        waiting = [pair for pair in self.held if pair[0] in own]
        self.held = [pair for pair in self.held if pair[0] not in own]
        return chunks + [self.describe(*pair) for pair in ((index, delta), *waiting)]

    def begin(self, index: int, prompt: PromptPart) -> dict[str, Any]:
        """The chunk of a choice's prompt."""
        self.started.add(index)
        offsets = self.offsets[index] = TextOffsets(self.server.token_texts)
        offsets.next = len(prompt.text)
        choice = build_choice(self.server, self.body, index, [], prompt)
        if not self.body.echoes_logprobs:
            choice["logprobs"] = None
        return choice

    def describe(self, index: int, delta: Delta) -> dict[str, Any]:
        """The chunk of a delta."""
        choice = build_choice(self.server, self.body, index, [delta])
        if self.body.logprobs is not None:
            offsets = self.offsets.setdefault(index, TextOffsets(self.server.token_texts))
            entries = [] if self.body.has_no_reply else delta.logprobs
            choice["logprobs"] = describe_logprobs(self.server, entries, offsets)
        return choice


async def merge_deltas(batch: Batch) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of all prompts with the number of their choice."""
    if len(batch.generations) == 1:
        stream = batch.generations[0].deltas()
        try:
            async for delta in stream:
                yield delta.index, delta
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()

    async def read(number: int, generation: Generation) -> None:
        try:
            async for delta in generation.deltas():
                queue.put_nowait((number * batch.n + delta.index, delta))
            queue.put_nowait(None)
        except Exception as error:  # handed to the reader of the queue
            queue.put_nowait(error)

    tasks = [asyncio.ensure_future(read(*pair)) for pair in enumerate(batch.generations)]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
