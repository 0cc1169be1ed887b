"""The server under clients that misbehave and engines that fail: it goes on, and holds nothing back.

Chaos is seeded: the name of a failing test has its seed, and the error says which action failed.
`python -m tests.serve.http.soak --seed S` replays it for longer.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest

from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.config import Limits
from fulgurite.serve.remote import client as client_module
from tests.serve.http.chaos import Figures, Prompt, encode_request, failing_steps, run_chaos
from tests.serve.http.serving import PLAIN, RunningServer, mock_config, script, serve
from tests.serve.http.tiny_server import tiny_config
from tests.waiting import wait_for, wait_until

LIMITS = Limits(write_seconds=0.5, read_seconds=20.0, body_bytes=1 << 20)
FAULTS = ("raise", "oom", "hang", "kill")
MOCK_PROMPTS = tuple(
    Prompt(
        "/v1/completions",
        {"prompt": script(f"reply {n} " * n), "max_tokens": 500},
        f"reply {n} " * n,
    )
    for n in range(1, 9)
)


@pytest.fixture(autouse=True)
def quick_restarts(monkeypatch):
    monkeypatch.setattr(client_module, "RESTART_DELAYS", (0.0,))


def ask(server: RunningServer, prompt: Prompt) -> str:
    reply = server.post(prompt.path, prompt.body)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def check_recovered(server: RunningServer, prompts: tuple[Prompt, ...]) -> None:
    """After chaos: healthy and idle, nothing held, and the same answers as before."""
    wait_for(lambda: server.get("/health").status_code == 200)
    assert server.leaks() == {}
    wait_for(lambda: server.get("/health").json()["status"] == "idle")
    for prompt in prompts:
        assert ask(server, prompt) == prompt.text
    assert server.leaks() == {}


def run(server: RunningServer, prompts: tuple[Prompt, ...], seed: int, **options: Any) -> Figures:
    figures = asyncio.run(run_chaos(server, prompts, seed=seed, **options))
    check_recovered(server, prompts)
    return figures


# ---- mixes ----------------------------------------------------------------------------------------


@contextmanager
def mock_server(step_seconds: float = 0.001, **fields: Any) -> Iterator[RunningServer]:
    options = {"max_sequences": 8, "tokens_per_step": 4, "step_seconds": step_seconds}
    fields = {"faults": True, "limits": LIMITS, "max_waiting": 16, **fields}
    with serve(mock_config(mock_options=options, **fields)) as running:
        yield running


def test_chaos_with_a_mock_engine_in_a_thread():
    seed = 1
    with mock_server() as server:
        figures = run(server, MOCK_PROMPTS, seed, num_actions=120, faults=("raise", "oom", "hang"))
    assert figures.outcomes["ok"] > 20


def test_chaos_with_a_mock_engine_that_is_killed(killable):
    restarts = killable.app.server.clients[0].restarts
    run(killable, MOCK_PROMPTS, 10, num_actions=120, faults=("kill", "raise"), fault_every=60)
    assert killable.app.server.clients[0].restarts > restarts


@pytest.fixture(scope="module")
def killable() -> Iterator[RunningServer]:
    """A server whose engine is a process."""
    with mock_server(engine_in="process") as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_more_chaos_with_a_mock_engine(seed):
    with mock_server(engine_in="process", replicas=1 + seed % 2) as server:
        run(server, MOCK_PROMPTS, seed, num_actions=600, faults=FAULTS)


TINY_PROMPTS = ("Once", "a b c d", "The quick brown fox", "1, 2, 3, 4, 5, 6", "x" * 60)


def make_tiny_prompts(server: RunningServer) -> tuple[Prompt, ...]:
    """Prompts with the texts that a quiet server gives."""
    made = []
    for text in TINY_PROMPTS:
        prompt = Prompt("/v1/completions", {"prompt": text, "max_tokens": 24, "temperature": 0})
        made.append(Prompt(prompt.path, prompt.body, ask(server, prompt)))
    return tuple(made)


def tiny_chaos_config(folder: Any, **fields: Any) -> Any:
    """A cache of 16 blocks for 8 requests: they preempt each other."""
    engine = {"context": 192, "cache_tokens": 256, "max_sequences": 8, "max_batched_tokens": 64}
    options = {"faults": True, "limits": LIMITS, "max_waiting": 16, **fields}
    return tiny_config(folder, engine, **options)


@pytest.mark.parametrize("seed", [20])
def test_chaos_with_a_tiny_model_under_memory_pressure(tmp_path, seed):
    with serve(tiny_chaos_config(tmp_path)) as server:
        prompts = make_tiny_prompts(server)
        with failing_steps(seed) as failures:
            faults = ("raise", "oom", "hang")
            asyncio.run(run_chaos(server, prompts, seed=seed, num_actions=100, faults=faults))
        check_recovered(server, prompts)
        assert server.app.server.clients[0].progress.preemptions > 0
        assert failures["raise"] > 0 and failures["oom"] > 0 and failures["raise late"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 204))
def test_chaos_with_a_tiny_model_in_a_process(tmp_path, seed):
    with serve(tiny_chaos_config(tmp_path, engine_in="process")) as server:
        prompts = make_tiny_prompts(server)
        run(server, prompts, seed, num_actions=300, faults=FAULTS, fault_every=60)


def test_a_failed_action_says_what_happened_on_its_connection():
    """A server that reads a request and closes the connection without an answer."""

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 20")
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
            host, port = listener.sockets[0].getsockname()
            broken = replace(server, url=f"http://{host}:{port}")
            await run_chaos(broken, MOCK_PROMPTS, seed=4, num_actions=1)

    with mock_server() as server, pytest.raises(ExceptionGroup) as caught:
        asyncio.run(scenario())
    text = str(caught.value.exceptions[0])
    for part in (
        r"action 0 \(complete\) of seed 4: ChaosError\('no whole reply'\) after \d",
        r"closed by the server \(end of file\); opened \d.* s ago, last sent \d.* s ago, .* never",
        r"sent \d+ bytes \(0 of them still here\), last b'POST /v1/completions HTTP/1.1",
        r"received 11 bytes: b'HTTP/1.1 20'",
        r"engine 0: idle, last report \d.* s ago, 0 restarts",
        r"load of the machine: \d",
    ):
        assert re.search(part, text), (part, text)


# ---- one failure at a time ------------------------------------------------------------------------


def test_a_failed_step_ends_its_requests_and_no_others():
    with mock_server() as server:
        client = server.app.server.clients[0]
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with PLAIN.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            next(lines)
            server.loop.call_soon_threadsafe(client.inject_fault, "raise")
            rest = [line for line in lines if line]
        assert '"engine_error"' in rest[-2] and rest[-1] == "data: [DONE]"
        assert client.progress.failed_steps == 1 and client.restarts == 0
        check_recovered(server, MOCK_PROMPTS[:2])


def test_a_hanging_step_shows_in_health():
    with mock_server(stall_seconds=1.0) as server:
        client = server.app.server.clients[0]
        server.loop.call_soon_threadsafe(client.inject_fault, "hang", 5.0)
        with pytest.raises(httpx.ReadTimeout):
            PLAIN.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=0.1)
        wait_for(lambda: server.get("/health").json()["status"] == "stalled", 5)
        reply = server.get("/health")
        assert reply.status_code == 503
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert refused.status_code == 503 and refused.headers["retry-after"]
        check_recovered(server, MOCK_PROMPTS[:1])


async def run_into_a_stall(server: RunningServer) -> tuple[list[str], httpx.Response, str]:
    """A step hangs: what a stream, a whole reply, and a request that waits for its turn get."""
    body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    client, admission = server.app.server.clients[0], server.app.server.admission
    url = server.url + "/v1/completions"
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        async with http.stream("POST", url, json={**body, "stream": True}) as reply:
            lines = reply.aiter_lines()
            await anext(lines)
            whole = asyncio.ensure_future(http.post(url, json=body))
            await wait_until(lambda: client.num_requests == 2)
            admission.running += 100  # nobody gets a turn
            waiting = asyncio.ensure_future(http.post(url, json={"prompt": script("later")}))
            await wait_until(lambda: admission.waiting)
            server.loop.call_soon_threadsafe(client.inject_fault, "hang", 600.0)
            rest = [line async for line in lines if line]
        failed = await whole
        admission.running -= 100
        return rest, failed, (await waiting).json()["choices"][0]["text"]


def test_a_stalled_engine_is_ended_and_started_again():
    """What runs gets 503 and the cause; what waits runs on the engine that starts again."""
    with mock_server(engine_in="process", stall_seconds=1.0, stall_timeout=2.0) as server:
        client = server.app.server.clients[0]
        process = client.process
        rest, failed, text = asyncio.run(run_into_a_stall(server))
        assert "the engine is stalled: no step has ended for 2 s" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert failed.status_code == 503 and failed.headers["retry-after"] == "1"
        assert failed.json()["error"]["code"] == "engine_error"
        assert "the engine is stalled" in failed.json()["error"]["message"]
        assert text == "later" and client.restarts == 1
        assert process is not None and process.poll() == -signal.SIGKILL
        check_recovered(server, MOCK_PROMPTS[:2])


def test_requests_of_a_stalled_thread_fail_and_it_goes_on():
    with mock_server(0.01, stall_seconds=1.0, stall_timeout=2.0) as server:
        client = server.app.server.clients[0]
        body = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with PLAIN.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as reply:
            lines = reply.iter_lines()
            rest = [next(lines)]  # an error already, if the machine is busy
            server.loop.call_soon_threadsafe(client.inject_fault, "hang", 4.0)
            rest += [line for line in lines if line]
        assert "the engine is stalled" in rest[-2] and rest[-1] == "data: [DONE]"
        assert client.restarts == 0
        check_recovered(server, MOCK_PROMPTS[:2])


def test_a_request_that_waits_outlives_a_stall():
    """While an engine is stalled nobody gets a turn; those that wait go on when it does."""
    with mock_server(stall_seconds=1.0, stall_timeout=0.0) as server:
        client, admission = server.app.server.clients[0], server.app.server.admission
        url = server.url + "/v1/completions"

        async def scenario() -> list[httpx.Response]:
            async with httpx.AsyncClient(verify=False, timeout=30) as http:
                admission.running += 100  # nobody gets a turn
                body = {"prompt": script("later")}
                waiting = [asyncio.ensure_future(http.post(url, json=body)) for _ in range(2)]
                await wait_until(lambda: admission.waiting == 2)
                server.loop.call_soon_threadsafe(client.inject_fault, "hang", 3.0)
                server.loop.call_soon_threadsafe(client.generate, [1], SamplingParams())
                await wait_until(lambda: client.state == "stalled")
                admission.running -= 100
                server.loop.call_soon_threadsafe(admission.grant_turns)  # as when a client leaves
                return await asyncio.gather(*waiting)

        replies = asyncio.run(scenario())
        assert [one.json()["choices"][0]["text"] for one in replies] == ["later", "later"]
        check_recovered(server, MOCK_PROMPTS[:1])


def test_a_killed_engine_starts_again(killable):
    """What runs gets an error; what waits has not begun, and runs on the engine that starts again."""
    server, body = killable, {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
    client, admission = server.app.server.clients[0], server.app.server.admission
    restarts = client.restarts

    async def scenario() -> tuple[list[str], str]:
        async with (
            server.async_openai() as openai,
            httpx.AsyncClient(verify=False, timeout=60) as http,
        ):
            url = server.url + "/v1/completions"
            async with http.stream("POST", url, json={**body, "stream": True}) as reply:
                lines = reply.aiter_lines()
                await anext(lines)
                admission.running += 100  # nobody gets a turn
                waiting = asyncio.ensure_future(
                    openai.completions.create(model="test-model", prompt=script("later"))
                )
                await wait_until(lambda: admission.waiting)
                client.kill()
                rest = [line async for line in lines if line]
            admission.running -= 100
            return rest, (await waiting).choices[0].text

    rest, text = asyncio.run(scenario())
    assert "the engine has died" in rest[-2] and rest[-1] == "data: [DONE]"
    assert text == "later" and client.restarts == restarts + 1
    check_recovered(server, MOCK_PROMPTS[:2])


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_cache_within_one_step(tmp_path, stream):
    """The engine makes no step of the request after the one that runs when it hears of it."""
    with serve(tiny_config(tmp_path)) as server:
        client = server.app.server.clients[0]
        prompts = make_tiny_prompts(server)[:1]
        cancelled: list[int] = []
        watch_cancels(client, cancelled)
        body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        start = client.progress.steps
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(encode_request("/v1/completions", json.dumps(body).encode()))
            wait_for(lambda: client.progress.steps > start + 5)
            assert client.progress.running == 1 and client.progress.used_blocks > 0
        wait_for(lambda: cancelled and client.progress.running == 0)
        # The engine reads commands before each step; its reports may be behind.
        assert client.progress.steps - cancelled[0] <= 50, "of 1000: reports lag on a busy machine"
        assert client.progress.steps < start + 1000
        check_recovered(server, prompts)


def watch_cancels(client: client_module.EngineClient, steps: list[int]) -> None:
    """Note the engine's steps when a cancel is sent."""
    cancel = type(client).cancel

    def record(id: int) -> None:
        steps.append(client.progress.steps)
        cancel(client, id)

    client.cancel = record  # type: ignore[method-assign]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_does_not_read_is_disconnected(stream):
    """Also a reply that is not streamed stays in no buffer for ever."""
    small_buffer = [(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)]
    transport = httpx.HTTPTransport(socket_options=small_buffer)
    body = {"prompt": "x", "max_tokens": 7000, "ignore_eos": True, "logprobs": 20, "n": 3}
    with mock_server() as server, httpx.Client(transport=transport, timeout=30) as client:
        url = server.url + "/v1/completions"
        with client.stream("POST", url, json={**body, "stream": stream}) as reply:
            assert reply.status_code == 200
            wait_for(lambda: server.app.server.admission.entered == 0)
            time.sleep(4 * LIMITS.write_seconds)
            with pytest.raises((httpx.RemoteProtocolError, httpx.ReadError)):
                reply.read()
        check_recovered(server, MOCK_PROMPTS[:1])


def test_clock_jumps_change_nothing(monkeypatch):
    """Deadlines, timeouts and health use the monotonic clock."""
    with mock_server() as server:
        real, jump = time.time, [0.0]
        monkeypatch.setattr(time, "time", lambda: real() + jump[0])
        for jump[0] in (-1e9, 1e9, -3600.0, 3600.0):
            prompt = MOCK_PROMPTS[1]
            body = {**prompt.body, "deadline": 20.0}
            assert ask(server, Prompt(prompt.path, body)) == prompt.text
            assert server.get("/health").status_code == 200
        check_recovered(server, MOCK_PROMPTS[:1])


# ---- the end --------------------------------------------------------------------------------------


@contextmanager
def serve_process(*options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "fulgurite", "serve", "--mock", "--port", "0"]
    command += ["--engine-in", "thread", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            found = re.search(r"http://127\.0\.0\.1:\d+", line)
            if found is not None:
                break
        else:
            raise AssertionError("the server did not start")
        yield process, found[0]
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.fixture(scope="module")
def slow_mock(tmp_path_factory):
    """A config file: 100 steps of 10 ms for a reply of 100 tokens."""
    file = tmp_path_factory.mktemp("config") / "mock.toml"
    file.write_text("[mock_options]\ntokens_per_step = 1\nstep_seconds = 0.01\n")
    return str(file)


def test_drain(slow_mock):
    """Running streams finish, new requests are refused, and the exit code is 0."""
    with serve_process("--config", slow_mock) as (process, url):
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with PLAIN.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGTERM)
            wait_for(lambda: PLAIN.get(url + "/health").status_code == 503)
            refused = PLAIN.post(url + "/v1/completions", json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2]
        assert process.wait(30) == 0
        assert "Traceback" not in process.stderr.read()
        with pytest.raises(httpx.ConnectError):
            PLAIN.get(url + "/health")


def test_second_signal_ends_at_once(slow_mock):
    with serve_process("--config", slow_mock) as (process, url):
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True, "stream": True}
        with PLAIN.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(process.pid, signal.SIGINT)
            wait_for(lambda: PLAIN.get(url + "/health").status_code == 503)
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(30) == 0
