"""kill -9 of an engine while 64 replies are decoded: everyone is answered, and nothing is lost.

Seeded: which replies are streamed, how long they are, and when the kill comes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from fulgurite.serve.remote import client as client_module
from tests.serve.http.chaos import Prompt, check_error, check_reply
from tests.serve.http.serving import RunningServer, serve
from tests.serve.http.test_chaos import ask, check_recovered
from tests.serve.http.tiny_server import tiny_config
from tests.waiting import wait_until

NUM_REPLIES = 64
ENGINE = {"max_sequences": NUM_REPLIES, "context": 1024, "cache_tokens": NUM_REPLIES * 640}
LENGTHS = (500, 550, 600)


@pytest.fixture(scope="module")
def killable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A tiny real model in a process of its own."""
    patch = pytest.MonkeyPatch()
    patch.setattr(client_module, "RESTART_DELAYS", (0.0,))
    folder = tmp_path_factory.mktemp("tiny")
    with serve(tiny_config(folder, ENGINE, engine_in="process", max_waiting=256)) as server:
        yield server
        assert server.leaks() == {}
    patch.undo()


@pytest.fixture(scope="module")
def prompts(killable: RunningServer) -> tuple[Prompt, ...]:
    """Greedy requests with the texts that a quiet server gives."""
    made = []
    for text, length in zip(("Once", "a b c d", "1, 2, 3"), LENGTHS, strict=True):
        body = {"prompt": text, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        prompt = Prompt("/v1/completions", body)
        made.append(Prompt(prompt.path, body, ask(killable, prompt)))
    return tuple(made)


async def request(http: httpx.AsyncClient, url: str, prompt: Prompt, is_streamed: bool) -> str:
    """How a reply ends: ok, or the code of its error; ChaosError if it is wrong."""
    reply = await http.post(url + prompt.path, json={**prompt.body, "stream": is_streamed})
    if reply.status_code == 503:
        assert reply.headers["retry-after"], "clients learn when to come back"
        return check_error(503, reply.json()["error"])
    return check_reply(reply.status_code, reply.content, prompt)


async def kill_in_decode(server: RunningServer, delay: float) -> None:
    """kill -9 once all replies are in decode."""
    client = server.app.server.clients[0]
    assert client.process is not None
    start = client.progress.steps
    await wait_until(lambda: client.progress.running == NUM_REPLIES)
    await wait_until(lambda: client.progress.steps > start + NUM_REPLIES // 8)
    await asyncio.sleep(delay)
    os.kill(client.process.pid, signal.SIGKILL)
    await wait_until(lambda: not client.is_ready)
    await wait_until(lambda: client.is_ready, 120)


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(32, 40)]


@pytest.mark.parametrize("seed", [31, *SLOW])
def test_kills_under_full_decode_load(
    killable: RunningServer, prompts: tuple[Prompt, ...], seed: int
) -> None:
    """Streams end with an error event, whole replies with 503; the next ones are right."""
    client, rng = killable.app.server.clients[0], random.Random(seed)
    restarts = client.restarts
    plan = [(rng.choice(prompts), rng.random() < 0.5) for _ in range(NUM_REPLIES)]
    delay = rng.random() * 0.1

    async def scenario() -> Counter[str]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(verify=False, timeout=120, limits=limits) as http:
            kill = asyncio.create_task(kill_in_decode(killable, delay))
            replies = [request(http, killable.url, prompt, streamed) for prompt, streamed in plan]
            outcomes = Counter(await asyncio.gather(*replies))
            await kill
        return outcomes

    outcomes = asyncio.run(scenario())
    assert outcomes.total() == NUM_REPLIES
    assert outcomes["stream: 500 engine_error"] and outcomes["503 engine_error"], outcomes
    assert {*outcomes} <= {"ok", "stream: 500 engine_error", "503 engine_error"}, outcomes
    assert client.restarts == restarts + 1
    check_recovered(killable, prompts)


def test_clients_that_retry_get_their_replies(
    killable: RunningServer, prompts: tuple[Prompt, ...]
) -> None:
    """The openai client sends a request again after 503: the kill costs it time only."""
    others = prompts * (NUM_REPLIES // len(prompts) + 1)

    async def scenario() -> list[str]:
        async with killable.async_openai(max_retries=8, timeout=120.0) as openai:

            async def create(prompt: Prompt) -> str:
                body: dict[str, Any] = {**prompt.body, "model": "test-model"}
                extra = {"ignore_eos": body.pop("ignore_eos")}
                return (await openai.completions.create(**body, extra_body=extra)).choices[0].text

            kill = asyncio.create_task(kill_in_decode(killable, 0.0))
            texts = await asyncio.gather(*map(create, others[:NUM_REPLIES]))
            await kill
            return texts

    texts = asyncio.run(scenario())
    assert texts == [prompt.text for prompt in others[:NUM_REPLIES]]
    check_recovered(killable, prompts)
