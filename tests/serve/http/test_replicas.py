"""Servers with several engines of a tiny real model: the same replies as one, also when parts fail."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.prefix_chunk import PrefixBlocks
from fulgurite.serve.engine.replica_choice import BLOCK_TOKENS
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.http.placement import choose_devices, count_ranks
from fulgurite.serve.http.server import Server
from fulgurite.serve.remote.client import EngineClient, EngineError
from tests.serve.http.serving import RunningServer, mock_config, serve
from tests.serve.tiny_checkpoint import save_checkpoint

ENGINE = {"device": "cpu", "context": 256, "max_sequences": 8, "cache_tokens": 2048}
SHARED = "You are a helpful and careful assistant that answers in few words. "
SHARED += "Here are the rules of the house, which nobody may break, whatever is asked: be kind. "
QUESTIONS = [SHARED + f"Question {number}: what is {number} + {number}?" for number in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model")))


def config(model: str, **fields: Any) -> ServerConfig:
    fields = {"engine_in": "thread", "threads": 1, "served_names": ("m",), **fields}
    return ServerConfig(model=model, engine={**ENGINE}, **fields)


def ask(server: RunningServer, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    reply = server.post("/v1/completions", {**body, **fields})
    assert reply.status_code == 200, reply.text
    parsed: dict[str, Any] = reply.json()
    return parsed


def answers(reply: dict[str, Any]) -> list[Any]:
    return [(one["text"], one["logprobs"], one["finish_reason"]) for one in reply["choices"]]


@pytest.fixture(scope="module")
def expected(model: str) -> dict[str, Any]:
    """The replies of one engine, each prompt for the first time."""
    with serve(config(model)) as server:
        replies = {question: answers(ask(server, question)) for question in QUESTIONS}
        replies["n"] = answers(ask(server, QUESTIONS[0], n=3, temperature=1.0, seed=5))
        return replies


@pytest.fixture(scope="module")
def disaggregated(model: str) -> Iterator[RunningServer]:
    """A prefill and a decode replica."""
    with serve(config(model, replicas=2, prefill_replicas=1)) as server:
        yield server
        assert server.leaks() == {}


def clients_of(server: RunningServer) -> list[EngineClient]:
    return server.app.server.clients


# ---- disaggregated prefill ----------------------------------------------------------------------


def test_handed_over_prompts_give_the_same_replies(disaggregated, expected) -> None:
    prefill, decode = clients_of(disaggregated)
    router = disaggregated.app.server.router
    for question in QUESTIONS:
        reply = ask(disaggregated, question)
        assert answers(reply) == expected[question]
        details = reply["usage"]["prompt_tokens_details"]
        tokens = reply["usage"]["prompt_tokens"]
        assert details["cached_tokens"] == (tokens - 1) // 16 * 16  # all full blocks
    assert router.handed_blocks > 0
    assert decode.progress.prefill_tokens < prefill.progress.prefill_tokens


def test_choices_of_one_request_share_a_hand_over(disaggregated, expected) -> None:
    router = disaggregated.app.server.router
    before = router.handed_blocks
    reply = ask(disaggregated, QUESTIONS[0], n=3, temperature=1.0, seed=5, cache_salt="n")
    assert answers(reply) == expected["n"]
    tokens = reply["usage"]["prompt_tokens"]
    assert router.handed_blocks - before == (tokens - 1) // 16


def test_cached_prompts_are_not_handed_over_again(disaggregated) -> None:
    router, prefill = disaggregated.app.server.router, clients_of(disaggregated)[0]
    ask(disaggregated, QUESTIONS[1])
    before, steps = router.handed_blocks, prefill.progress.steps
    ask(disaggregated, QUESTIONS[1])
    assert router.handed_blocks == before and prefill.progress.steps == steps


def test_short_prompts_are_not_handed_over(disaggregated) -> None:
    router = disaggregated.app.server.router
    before = router.handed_blocks
    assert ask(disaggregated, "x" * (2 * BLOCK_TOKENS - 1))["usage"]["prompt_tokens"] < 128
    assert router.handed_blocks == before


def test_many_requests_at_once(disaggregated, expected) -> None:
    with ThreadPoolExecutor(8) as pool:
        salts = [f"salt {number}" for number in range(6)]
        replies = [
            (question, pool.submit(ask, disaggregated, question, cache_salt=salt))
            for salt in salts
            for question in QUESTIONS
        ]
        for question, reply in replies:
            assert answers(reply.result()) == expected[question]
    assert disaggregated.leaks() == {}


def test_chunked_hand_over_gives_the_same_replies(disaggregated, expected, monkeypatch) -> None:
    """One block a chunk: a large model's blocks."""
    prefill = clients_of(disaggregated)[0]
    export, chunks = prefill.export_prefix, []

    async def export_small(*arguments: Any, **options: Any) -> PrefixBlocks:
        chunk = await export(*arguments, **{**options, "max_bytes": 1})
        chunks.append((chunk.start, chunk.end))
        return chunk

    monkeypatch.setattr(prefill, "export_prefix", export_small)
    reply = ask(disaggregated, QUESTIONS[2], cache_salt="small")
    assert answers(reply) == expected[QUESTIONS[2]]
    count = (reply["usage"]["prompt_tokens"] - 1) // 16
    assert chunks == [(number, number + 1) for number in range(count)]
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * count


@pytest.mark.parametrize("place", ["compute", "export", "import"])
def test_a_request_cancelled_during_hand_over_leaks_nothing(
    disaggregated, expected, monkeypatch, place: str
) -> None:
    """The client leaves while the prompt is computed, exported or imported."""
    prefill, decode = clients_of(disaggregated)
    entered = threading.Event()

    def hang(*arguments: Any, **options: Any) -> Any:
        entered.set()
        return asyncio.sleep(60)

    class HangingStream:
        is_finished = False
        next = staticmethod(hang)

        def cancel(self) -> None:
            self.stream.cancel()

        def __init__(self, stream: Any) -> None:
            self.stream = stream

    if place == "compute":
        generate = prefill.generate
        monkeypatch.setattr(
            prefill, "generate", lambda *a, **options: HangingStream(generate(*a, **options))
        )
    elif place == "export":
        monkeypatch.setattr(prefill, "export_prefix", hang)
    else:
        monkeypatch.setattr(decode, "import_prefix", hang)
    body = {"model": "m", "prompt": QUESTIONS[3], "cache_salt": place, "stream": True}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{disaggregated.url}/v1/completions", json=body, timeout=1.0)
    assert entered.wait(5.0)
    assert disaggregated.leaks() == {}
    assert not any(disaggregated.app.server.router.starting.values())
    monkeypatch.undo()
    assert answers(ask(disaggregated, QUESTIONS[3], cache_salt=place)) == expected[QUESTIONS[3]]


def test_a_deadline_ends_a_hand_over(disaggregated, monkeypatch) -> None:
    async def hang(*arguments: Any, **options: Any) -> Any:
        await asyncio.sleep(60)

    monkeypatch.setattr(clients_of(disaggregated)[0], "export_prefix", hang)
    body = {"model": "m", "prompt": QUESTIONS[0], "cache_salt": "late", "deadline": 0.3}
    reply = disaggregated.post("/v1/completions", body)
    assert reply.status_code in (408, 504), reply.text
    assert disaggregated.leaks() == {}


@pytest.mark.parametrize("method", ["export_prefix", "generate"])
def test_a_prefill_replica_that_fails(
    disaggregated, expected, monkeypatch, caplog, method: str
) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise EngineError("the engine has died", next="send the request again")

    prefill = clients_of(disaggregated)[0]
    monkeypatch.setattr(prefill, method, fail)
    reply = ask(disaggregated, QUESTIONS[0], cache_salt=f"failed {method}")
    assert answers(reply) == expected[QUESTIONS[0]]
    assert "replica 1 computes the prompt: the engine has died" in caplog.text
    monkeypatch.setattr(prefill, "is_ready", False)
    reply = ask(disaggregated, QUESTIONS[1], cache_salt=f"failed {method}")
    assert answers(reply) == expected[QUESTIONS[1]]


@pytest.mark.slow  # starts three processes
def test_a_prefill_replica_that_dies(model, expected, caplog) -> None:
    """The decode replica computes by itself, at once and while the other one restarts."""
    fields = {"replicas": 2, "prefill_replicas": 1, "engine_in": "process", "faults": True}
    with serve(config(model, **fields)) as server:
        prefill = clients_of(server)[0]
        generate = prefill.generate

        def die(*arguments: Any, **options: Any) -> Any:
            stream = generate(*arguments, **options)
            prefill.kill()
            return stream

        prefill.generate = die  # type: ignore[method-assign]
        assert answers(ask(server, QUESTIONS[0])) == expected[QUESTIONS[0]]
        assert "replica 1 computes the prompt" in caplog.text
        prefill.generate = generate  # type: ignore[method-assign]
        assert answers(ask(server, QUESTIONS[1])) == expected[QUESTIONS[1]]
        end = time.monotonic() + 60
        while not prefill.is_ready and time.monotonic() < end:
            time.sleep(0.05)
        assert prefill.restarts == 1
        assert answers(ask(server, QUESTIONS[2])) == expected[QUESTIONS[2]]
        assert server.app.server.router.handed_blocks > 0
        assert server.leaks() == {}


def test_models_without_a_prefix_cache_are_refused() -> None:
    async def start() -> None:
        await Server(mock_config(replicas=2, prefill_replicas=1)).start()

    with pytest.raises(ArgumentError, match="no prefix cache"):
        asyncio.run(start())


# ---- replicas -----------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ["prefix", "round-robin", "least-loaded"])
def test_replicas_give_the_same_replies(model, expected, routing: str) -> None:
    with serve(config(model, replicas=2, routing=routing)) as server:
        with ThreadPoolExecutor(8) as pool:
            replies = [(q, pool.submit(ask, server, q)) for _ in range(3) for q in QUESTIONS]
        assert all(answers(reply.result()) == expected[question] for question, reply in replies)
        assert all(client.progress.steps > 0 for client in clients_of(server))
        assert server.leaks() == {}


def test_choices_run_on_one_replica(model, expected, monkeypatch) -> None:
    used, generate = set[int](), EngineClient.generate

    def record(client: EngineClient, *arguments: Any, **options: Any) -> Any:
        used.add(client.index)
        return generate(client, *arguments, **options)

    with serve(config(model, replicas=2, routing="round-robin")) as server:
        monkeypatch.setattr(EngineClient, "generate", record)
        reply = ask(server, QUESTIONS[0], n=3, temperature=1.0, seed=5)
        assert answers(reply) == expected["n"]
        assert len(used) == 1


# ---- GPUs of replicas ---------------------------------------------------------------------------


def test_each_replica_has_gpus_of_its_own(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    two = ServerConfig(replicas=2, engine={"tensor": 2})
    assert count_ranks(two) == 2
    devices = [choose_devices(two, index, 4)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert devices == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,5,GPU-a,GPU-b")
    devices = [choose_devices(two, index, 4)["CUDA_VISIBLE_DEVICES"] for index in range(2)]
    assert devices == ["7,5", "GPU-a,GPU-b"]


def test_too_few_gpus_are_refused_unless_the_cache_has_a_size(monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ArgumentError, match="2 replicas of 1 GPUs need 2, but there are 1"):
        choose_devices(ServerConfig(replicas=2), 0, 1)
    shared = ServerConfig(replicas=2, engine={"cache_tokens": 4096})
    assert choose_devices(shared, 1, 1) == {"CUDA_VISIBLE_DEVICES": "0"}
    with pytest.raises(ArgumentError):
        choose_devices(ServerConfig(replicas=2, engine={"tensor": 2, "cache_tokens": 1}), 0, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"replicas": 1},
        {"replicas": 2, "mock": True},
        {"replicas": 2, "engine_in": "thread"},
        {"replicas": 2, "engine": {"device": "cpu"}},
    ],
)
def test_replicas_that_need_no_gpu_of_their_own(fields: dict[str, Any]) -> None:
    assert choose_devices(ServerConfig(**fields), 0, 1) == {}


def test_replicas_without_gpus() -> None:
    assert choose_devices(ServerConfig(replicas=4), 3, 0) == {}
