"""Admission: fairness among keys, priority, limits before any work, deadlines, drain; no ticket is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.http import admission as module
from fulgurite.serve.http.admission import LOOKAHEAD, Admission, Ticket
from fulgurite.serve.http.errors import ApiError
from tests.serve.http.serving import MODEL, PLAIN, RunningServer, mock_config, serve
from tests.waiting import wait_for

NOTHING = {"tickets": 0, "slots": 0, "queued": 0, "bytes": 0}


def make(capacity: int = 1, max_waiting: int = 1000, max_bytes: int = 1 << 20) -> Admission:
    return Admission(max_waiting, max_bytes, lambda: capacity)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Driver:
    """Requests of keys that wait for their turn; `order` has the keys as they got it."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.order: list[str] = []
        self.running: list[Ticket] = []
        self.tasks: list[asyncio.Task[None]] = []

    def add(self, key: str, cost: float = 1.0, priority: int = 0, name: str = "") -> Ticket:
        ticket = self.admission.enter(key, 10, None)

        async def run() -> None:
            await self.admission.acquire(ticket, 1, cost, priority)
            self.order.append(name or key)
            self.running.append(ticket)

        self.tasks.append(asyncio.ensure_future(run()))
        return ticket

    async def finish(self, count: int) -> None:
        """End running requests, the oldest first, `count` times."""
        for _ in range(count):
            await settle()
            self.running.pop(0).close()
        await settle()

    async def finish_all(self) -> None:
        while self.running:
            await self.finish(1)
        await asyncio.gather(*self.tasks)
        assert self.admission.audit() == NOTHING


def run(coroutine: Awaitable[Any]) -> Any:
    return asyncio.run(coroutine)  # type: ignore[arg-type]


# ---- turns ----------------------------------------------------------------------------------------


def test_a_key_that_floods_gets_half_of_the_turns():
    async def body() -> None:
        driver = Driver(make())
        for _ in range(100):
            driver.add("flood")
        await settle()
        for _ in range(20):
            driver.add("other")
        await driver.finish(30)
        window = driver.order[LOOKAHEAD + 1 : LOOKAHEAD + 21]
        assert Counter(window) == {"flood": 10, "other": 10}
        await driver.finish_all()
        assert Counter(driver.order) == {"flood": 100, "other": 20}

    run(body())


def test_shares_are_by_tokens_not_by_requests():
    async def body() -> None:
        driver = Driver(make())
        for _ in range(60):
            driver.add("long", cost=300)
            driver.add("short", cost=100)
        await driver.finish(40)
        counts = Counter(driver.order[4:40])
        assert 2.4 < counts["short"] / counts["long"] < 3.6
        await driver.finish_all()

    run(body())


def test_a_key_that_was_away_has_no_credit():
    """A key that comes back does not get all turns that it did not use."""

    async def body() -> None:
        driver = Driver(make())
        for _ in range(50):
            driver.add("busy")
        await driver.finish(30)
        for _ in range(20):
            driver.add("late")
        start = len(driver.order)
        await driver.finish(12)
        counts = Counter(driver.order[start : start + 10])
        assert 4 <= counts["late"] <= 6
        await driver.finish_all()

    run(body())


def test_priority_then_arrival_within_a_key():
    async def body() -> None:
        driver = Driver(make())
        for number in range(LOOKAHEAD + 1):
            driver.add("k", name=f"first {number}")
        await settle()
        for name, priority in (("b", 0), ("d", 5), ("a", -1), ("c", 0)):
            driver.add("k", priority=priority, name=name)
        await driver.finish_all()
        assert driver.order[LOOKAHEAD + 1 :] == ["a", "b", "c", "d"]

    run(body())


@pytest.mark.parametrize("seed", range(5))
def test_random_cancels_leave_nothing(seed):
    """Requests that leave while they wait, at their turn, or while they run."""

    async def body() -> None:
        rng = random.Random(seed)
        admission = make(capacity=3)

        async def one(number: int) -> None:
            with admission.enter(f"key {number % 4}", rng.randrange(100), None) as ticket:
                slots = rng.randrange(1, 4)
                await admission.acquire(ticket, slots, rng.random(), rng.randrange(3))
                for _ in range(slots if rng.random() < 0.5 else 0):
                    await asyncio.sleep(0)
                    admission.release(ticket, 1)
                await asyncio.sleep(rng.random() * 0.002)

        tasks = [asyncio.ensure_future(one(number)) for number in range(200)]
        for task in rng.sample(tasks, 80):
            await asyncio.sleep(rng.random() * 0.001)
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert admission.audit() == NOTHING and admission.queues == {}

    run(body())


def test_waiting_requests_get_their_turn_when_an_engine_comes_back():
    async def body() -> None:
        capacity = 1
        admission = Admission(100, 1 << 20, lambda: capacity)
        driver = Driver(admission)
        for _ in range(8):
            driver.add("k")
        await settle()
        capacity = 0  # the engine dies: what ran ends
        for ticket in [*driver.running]:
            ticket.close()
        driver.running.clear()
        await settle()
        assert admission.waiting == 8 - LOOKAHEAD - 1 and admission.running == 0
        capacity = 1
        admission.grant_turns()
        await settle()
        assert len(driver.running) == LOOKAHEAD + 1
        await driver.finish_all()

    run(body())


# ---- limits at the door ---------------------------------------------------------------------------


def refuse(admission: Admission, num_bytes: int = 0, deadline: float | None = None) -> ApiError:
    with pytest.raises(ApiError) as error:
        admission.enter("k", num_bytes, deadline)
    return error.value


def test_queue_full():
    admission = make(capacity=2, max_waiting=3)
    tickets = [admission.enter("k", 1, None) for _ in range(5)]
    error = refuse(admission)
    assert (error.status, error.code) == (429, "queue_full")
    assert int(error.headers["retry-after"]) >= 1
    tickets[0].close()
    tickets[0].close()  # twice: the second time has no effect
    admission.enter("k", 1, None).close()
    for ticket in tickets:
        ticket.close()
    assert admission.audit() == NOTHING


def test_memory_full():
    admission = make(max_bytes=100)
    ticket = admission.enter("k", 60, None)
    assert refuse(admission, 41).code == "memory_full"
    other = admission.enter("k", 40, None)
    ticket.close()
    other.close()
    assert admission.audit() == NOTHING


def test_drain_and_engines_that_are_not_ready():
    admission = make(capacity=0)
    error = refuse(admission)
    assert (error.status, error.code) == (503, "engine_not_ready") and error.headers["retry-after"]
    admission = make()
    admission.is_draining = True
    assert (refuse(admission).status, refuse(admission).code) == (503, "draining")


def test_unreachable_deadline_is_refused_at_once(monkeypatch):
    """Turns take 2 s each, and 5 requests are ahead: a deadline of 3 s can't be kept."""

    async def body() -> None:
        now = 100.0
        monkeypatch.setattr(module.time, "monotonic", lambda: now)
        driver = Driver(make())
        for _ in range(LOOKAHEAD + 9):
            driver.add("k")
        await settle()
        for _ in range(4):
            now += 2.0
            await driver.finish(1)
        assert driver.admission.seconds_per_turn == pytest.approx(2.0)
        error = refuse(driver.admission, deadline=3.0)
        assert (error.status, error.code) == (429, "deadline_unreachable")
        driver.admission.enter("k", 1, 1000.0).close()
        await driver.finish_all()

    run(body())


def test_deadline_that_passes_in_the_queue():
    async def body() -> None:
        admission = make()
        driver = Driver(admission)
        for _ in range(LOOKAHEAD + 1):
            driver.add("k")
        await settle()
        with admission.enter("k", 1, 0.02) as ticket, pytest.raises(ApiError) as error:
            await admission.acquire(ticket, 1, 1.0, 0)
        assert error.value.status == 504
        assert error.value.headers == {"x-should-retry": "false"}
        await driver.finish_all()

    run(body())


# ---- with a server --------------------------------------------------------------------------------


def fill(server: RunningServer, count: int) -> list[httpx.Response]:
    """Streams that run or wait; close them to end them."""
    client = httpx.Client(verify=False, timeout=30.0)

    def open_stream(number: int) -> httpx.Response:
        body = {"prompt": f"x {number}", "max_tokens": 5000, "stream": True, "ignore_eos": True}
        request = client.build_request("POST", server.url + "/v1/completions", json=body)
        return client.send(request, stream=True)

    return [open_stream(number) for number in range(count)]


def slow_config(max_waiting: int = 0, **fields: Any) -> Any:
    options = {"max_sequences": 2, "tokens_per_step": 1, "step_seconds": 0.005}
    return mock_config(mock_options=options, max_waiting=max_waiting, **fields)


def test_overload_is_answered_before_tokenizing(monkeypatch):
    calls: list[str] = []
    encode = Tokenizer.encode
    render = Tokenizer.apply_chat_template
    with serve(slow_config()) as server:
        streams = fill(server, 2)
        monkeypatch.setattr(
            Tokenizer,
            "encode",
            lambda self, *a, **o: calls.append("encode") or encode(self, *a, **o),
        )
        monkeypatch.setattr(
            Tokenizer,
            "apply_chat_template",
            lambda self, *a, **o: calls.append("render") or render(self, *a, **o),
        )
        long = "word " * 100_000
        bodies = {
            "/v1/completions": {"prompt": long},
            "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
            "/v1/embeddings": {"input": long},
            "/tokenize": {"prompt": long},
        }
        for path, body in bodies.items():
            reply = server.post(path, body)
            assert reply.status_code == 429, (path, reply.text)
            assert int(reply.headers["retry-after"]) >= 1
            assert reply.json()["error"]["code"] == "queue_full"
            assert reply.json()["error"]["type"] == "rate_limit_error"
        assert calls == []
        for stream in streams:
            stream.close()
        assert server.leaks() == {}
        assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
        assert calls == ["encode"]


def test_openai_client_retries_after_overload():
    with serve(slow_config()) as server:
        streams = fill(server, 2)
        with pytest.raises(openai.RateLimitError):
            server.openai().completions.create(model=MODEL, prompt="x")
        with ThreadPoolExecutor() as pool:
            create = server.openai(max_retries=5).completions.create
            waiting = pool.submit(create, model=MODEL, prompt="x", max_tokens=1)
            for stream in streams:
                stream.close()
            assert waiting.result(20).usage.completion_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_while_generating(stream):
    with serve(slow_config()) as server:
        deadline = 3.0 if stream else 0.3  # a busy machine must send a first token before it
        body = {"prompt": "x", "max_tokens": 5000, "ignore_eos": True, "stream": stream}
        body["deadline"] = deadline
        reply = server.post("/v1/completions", body)
        if stream:  # it has begun: the error is an event
            assert reply.status_code == 200 and '"deadline_exceeded"' in reply.text
            assert reply.text.endswith("data: [DONE]\n\n")
        else:
            assert reply.status_code == 504
            assert reply.headers["x-should-retry"] == "false"
            assert reply.json()["error"]["code"] == "deadline_exceeded"
        assert server.leaks() == {}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_deadline_in_the_queue_of_a_server(path):
    with serve(slow_config(max_waiting=10)) as server:
        streams = fill(server, 2)
        hold(server, LOOKAHEAD)
        server.app.server.admission.first_token_seconds = 0.0  # else it may be refused at once
        body = {"prompt": "x"} if path == "/v1/completions" else {"input": "x"}
        reply = server.post(path, {**body, "deadline": 0.1})
        assert reply.status_code == 504, reply.text
        assert reply.headers["x-should-retry"] == "false"
        for stream in streams:
            stream.close()
        server.app.server.admission.running -= LOOKAHEAD
        assert server.leaks() == {}


def test_huge_deadlines_do_no_harm(server):
    for deadline in (1e-300, 1e300, 1e15):
        reply = server.post("/v1/completions", {"prompt": "x", "deadline": deadline})
        assert reply.status_code in (200, 429, 504)


@pytest.mark.parametrize(
    ("path", "stream"),
    [("/v1/completions", False), ("/v1/completions", True), ("/v1/embeddings", False)]
    + [("/v1/chat/completions", False), ("/v1/chat/completions", True)],
)
def test_a_client_that_leaves_the_queue_is_forgotten(path, stream):
    """While others run, a request that waits for its turn is gone as soon as its client is."""
    with serve(slow_config(max_waiting=10)) as server:
        streams = fill(server, 2)
        hold(server, LOOKAHEAD)
        body: dict[str, Any] = {"stream": stream, "prompt": "x"}
        if path == "/v1/chat/completions":
            body = {"stream": stream, "messages": [{"role": "user", "content": "x"}]}
        if path == "/v1/embeddings":
            body = {"input": "x"}
        with pytest.raises(httpx.ReadTimeout):
            PLAIN.post(server.url + path, json=body, timeout=0.3)
        wait_for(lambda: server.app.server.admission.waiting == 0)
        wait_for(lambda: server.app.server.admission.entered == 2)
        for one in streams:
            one.close()
        server.app.server.admission.running -= LOOKAHEAD
        assert server.leaks() == {}


def hold(server: RunningServer, count: int) -> None:
    """Take places, so that the next request waits for its turn."""
    server.app.server.admission.running += count
