"""`POST /v1/completions`: text or token ids in, text out.

A list of prompts gives `n` choices each, in the order of the prompts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

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
from fulgurite.serve.http.errors import invalid, to_api_error
from fulgurite.serve.http.generation import Delta, Generation, GenerationRequest, Usage, WireLogprob
from fulgurite.serve.http.server import Server, new_id

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
    add_special_tokens: bool = True


class Logprobs(Struct, kw_only=True):
    """Log-probabilities in the form of text completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass
class Batch:
    """The generations of one request, one a prompt; choices are numbered across prompts."""

    generations: list[Generation]
    prompts: list[str]  # the texts to echo; empty: none
    n: int

    @property
    def usage(self) -> Usage:
        parts = [generation.usage for generation in self.generations]
        return Usage(
            sum(one.prompt_tokens for one in parts),
            sum(one.completion_tokens for one in parts),
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
    if body.echo and body.logprobs is not None:
        raise invalid("'echo' with 'logprobs' is not supported: prompts have no logprobs", "echo")


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
            ids = await server.encode(ids, body.add_special_tokens)
        left = server.check_prompt(ids, "prompt")
        max_tokens = server.choose_max_tokens(
            16 if body.max_tokens is None else body.max_tokens, left, "max_tokens"
        )
        params = body.build_params(limits, max_tokens, body.logprobs, constraint)
        await server.check_params(params)
        generation = GenerationRequest(
            ids,
            params,
            n,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            skip_special_tokens=body.skip_special_tokens is not False,
        )
        generations.append(server.generate(generation, ticket))
        if body.echo:
            texts.append(
                prompt if isinstance(prompt, str) else server.require_tokenizer().decode(ids)
            )
    return Batch(generations, texts, n)


# ---- replies --------------------------------------------------------------------------------------


def describe_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def describe_logprobs(
    server: Server, logprobs: list[WireLogprob] | None, offset: int
) -> Logprobs | None:
    if logprobs is None or server.token_texts is None:
        return None
    texts = server.token_texts
    tokens = [texts[token][0] for token, _, _ in logprobs]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    return Logprobs(
        tokens=tokens,
        token_logprobs=[max(value, MIN_LOGPROB) for _, value, _ in logprobs],
        top_logprobs=[
            {texts[token][0]: max(value, MIN_LOGPROB) for token, value in (*top, (chosen, own))}
            for chosen, own, top in logprobs
        ],
        text_offset=offsets,
    )


async def complete(
    server: Server, body: CompletionRequest, batch: Batch, id: str, model: str
) -> dict[str, Any]:
    """The whole reply; prompts run at the same time."""
    parts = await gather_or_cancel([collect(one) for one in batch.generations])
    choices = []
    for number, deltas in enumerate(parts):
        echo = batch.prompts[number] if batch.prompts else ""
        for index in range(batch.n):
            own = [delta for delta in deltas if delta.index == index]
            choices.append(build_choice(server, body, number * batch.n + index, echo, own))
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


def build_choice(
    server: Server, body: CompletionRequest, index: int, echo: str, deltas: list[Delta]
) -> dict[str, Any]:
    logprobs = [one for delta in deltas for one in delta.logprobs or ()]
    finish = deltas[-1].finish
    choice: dict[str, Any] = {
        "index": index,
        "text": echo + "".join(delta.text for delta in deltas),
        "logprobs": describe_logprobs(server, logprobs, 0) if body.logprobs is not None else None,
        "finish_reason": None if finish is None else finish.reason,
        "stop_reason": None if finish is None else finish.stopped_by,
    }
    if body.return_token_ids:
        choice["token_ids"] = [token for delta in deltas for token in delta.token_ids]
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
    offsets: dict[int, int] = {}
    has_started = False
    deltas = merge_deltas(batch)
    try:
        if batch.prompts:
            for index in range(len(batch.generations) * batch.n):
                text = batch.prompts[index // batch.n]
                offsets[index] = len(text)
                choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
                yield encode_event({**chunk, "choices": [choice]})
        async for index, delta in deltas:
            choice = build_choice(server, body, index, "", [delta])
            if body.logprobs is not None:
                offset = offsets.get(index, 0)
                logprobs = describe_logprobs(server, delta.logprobs, offset)
                choice["logprobs"] = logprobs
                if logprobs is not None:
                    offsets[index] = offset + sum(map(len, logprobs.tokens))
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
