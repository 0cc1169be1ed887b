"""`EngineClient`: streams, cancels, faults, restarts, health; engines in threads and processes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.remote import client as module
from fulgurite.serve.remote import engine_loop
from fulgurite.serve.remote.client import (
    EngineClient,
    EngineError,
    EngineLoadError,
    RequestRejected,
    TokenStream,
)
from fulgurite.serve.remote.messages import LoadModel
from tests.waiting import wait_until

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
LONG = SamplingParams(max_tokens=8000, ignore_eos=True)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch):
    monkeypatch.setattr(module, "RESTART_DELAYS", (0.0,))


@asynccontextmanager
async def start(mock: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[EngineClient]:
    load = LoadModel("none", mock={"tokens_per_step": 4, **(mock or {})}, faults=True)
    client = EngineClient(load, **{"in_thread": True, **options})
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def run(body: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), 120))  # type: ignore[arg-type]


async def collect(stream: TokenStream) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        update = await stream.next()
        tokens += update.token_ids
        if update.finish is not None:
            return tokens, update.finish.reason


def test_an_engine_in_a_thread_freezes_no_objects():
    """What is frozen is never collected: each server of a process kept 70 MB after its end."""
    before = gc.get_freeze_count()

    async def body() -> None:
        async with start():
            assert gc.get_freeze_count() == before

    run(body)


def test_streams_of_many_requests():
    async def body() -> None:
        async with start() as client:
            streams = [client.generate([number, 5], PARAMS) for number in range(50)]
            results = await asyncio.gather(*map(collect, streams))
            assert all(len(tokens) == 40 and reason == "length" for tokens, reason in results)
            again = await collect(client.generate([7, 5], PARAMS))
            assert again == results[7] and client.num_requests == 0
            assert set((await client.audit()).values()) == {0}

    run(body)


def test_logprobs_of_merged_updates():
    async def body() -> None:
        async with start() as client:
            params = SamplingParams(max_tokens=40, logprobs=2, ignore_eos=True)
            stream = client.generate([1], params)
            await asyncio.sleep(0.1)  # several reports are merged into one update
            tokens, logprobs = [], []
            while not stream.is_finished:
                update = await stream.next()
                tokens += update.token_ids
                logprobs += update.logprobs or []
            assert [one[0] for one in logprobs] == tokens and len(tokens) == 40

    run(body)


def test_cancel_frees_the_engine_before_its_next_step():
    async def body() -> None:
        async with start({"step_seconds": 0.005, "tokens_per_step": 1}) as client:
            stream = client.generate([1], LONG)
            await stream.next()
            steps = client.progress.steps
            stream.cancel()
            stream.cancel()  # twice: once is enough
            assert client.num_requests == 0 and client.state == "idle"
            await wait_until(lambda: client.progress.running == 0)
            assert client.progress.steps - steps <= 3  # those whose report was on its way
            assert set((await client.audit()).values()) == {0}

    run(body)


def test_rejected_requests_name_the_reason():
    async def body() -> None:
        async with start() as client:
            with pytest.raises(RequestRejected, match="tokens can't run"):
                await client.generate([1] * 9000, PARAMS).next()
            assert len((await collect(client.generate([1], PARAMS)))[0]) == 40

    run(body)


def test_a_failed_step_ends_its_requests_only():
    async def body() -> None:
        async with start({"step_seconds": 0.001}) as client:
            stream = client.generate([1], LONG)
            await stream.next()
            client.inject_fault("raise")
            tokens, reason = await collect(stream)
            assert reason == "error"
            assert (await collect(client.generate([2], PARAMS)))[1] == "length"
            assert client.restarts == 0 and client.progress.failed_steps == 1

    run(body)


def test_an_engine_in_a_thread_starts_again_when_its_loop_ends(monkeypatch):
    async def body() -> None:
        async with start({"step_seconds": 0.001}) as client:
            stream = client.generate([1], LONG)
            await stream.next()
            monkeypatch.setattr(engine_loop, "MAX_FAILED_STEPS", 1)
            client.inject_fault("raise")
            with pytest.raises(EngineError, match="died"):
                await collect(stream)
            await wait_until(lambda: client.restarts == 1 and client.is_ready)
            assert (await collect(client.generate([2], PARAMS)))[1] == "length"

    run(body)


def test_a_hanging_step_is_a_stall():
    async def body() -> None:
        async with start(stall_seconds=0.2) as client:
            client.inject_fault("hang", 0.8)
            stream = client.generate([1], PARAMS)
            await wait_until(lambda: client.state == "stalled")
            assert (await collect(stream))[1] == "length"
            assert client.state == "idle"

    run(body)


@pytest.mark.slow  # tests/serve/http/test_chaos.py has the sample
def test_a_killed_process_starts_again():
    async def body() -> None:
        ready = []
        async with start({"step_seconds": 0.001}, in_thread=False) as client:
            client.on_ready.append(lambda: ready.append(1))
            before = await collect(client.generate([3], PARAMS))
            stream, audit = client.generate([1], LONG), asyncio.ensure_future(client.audit())
            await stream.next()
            await audit
            client.kill()
            with pytest.raises(EngineError, match="died"):
                while True:
                    await stream.next()
            assert client.num_requests == 0
            with pytest.raises(EngineError, match="not ready"):
                client.generate([1], PARAMS)
            assert client.state == "starting"
            await wait_until(lambda: client.is_ready)
            assert await collect(client.generate([3], PARAMS)) == before
            assert ready == [1] and client.restarts == 1

    run(body)


def test_a_model_that_cannot_be_loaded():
    async def body() -> None:
        load = LoadModel("none", mock={"no_such_option": 1})
        client = EngineClient(load, in_thread=True)
        with pytest.raises(EngineLoadError, match="no_such_option"):
            await client.start()
        await client.close()
        client = EngineClient(LoadModel("/nowhere/at/all"), in_thread=True)
        with pytest.raises(EngineLoadError):
            await client.start()
        await client.close()

    run(body)


def test_close_ends_what_runs():
    async def body() -> None:
        async with start({"step_seconds": 0.005}) as client:
            stream = client.generate([1], LONG)
            await stream.next()
            await client.close()
            with pytest.raises(EngineError):
                while True:
                    await stream.next()
            with pytest.raises(EngineError):
                client.generate([1], PARAMS)

    run(body)


def test_faults_are_refused_unless_a_test_asked_for_them():
    async def body() -> None:
        client = EngineClient(LoadModel("none", mock={}), in_thread=True)
        await client.start()
        client.inject_fault("exit")  # would end this process
        client.inject_fault("raise")
        assert (await collect(client.generate([1], PARAMS)))[1] == "length"
        await client.close()

    run(body)
