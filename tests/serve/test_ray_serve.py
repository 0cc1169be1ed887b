"""`fulgurite serve --ray` on one machine: streams, cancels, actors that die. Slow: starts a Ray cluster.

pytest -m slow tests/serve/test_ray_serve.py
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytest.importorskip("ray.serve", reason="ray without ray[serve]")

import ray
from ray import serve

from fulgurite.errors import ArgumentError
from fulgurite.serve.http.config import ServerConfig
from fulgurite.serve.ray_serve import APP_NAME, check_resources, start_on_ray
from tests.serve.http.serving import serve as serve_here
from tests.serve.tiny_checkpoint import save_checkpoint
from tests.waiting import wait_for

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MOCK: dict[str, Any] = {"mock": True, "mock_options": {"tokens_per_step": 1, "step_seconds": 0.01}}
QUESTION = "Here are the rules of the house, which nobody may break, whatever is asked. " * 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {**variables, "OMP_NUM_THREADS": "1"}},
    )
    yield
    serve.shutdown()
    ray.shutdown()


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


PORT = find_free_port()  # Ray Serve's proxy keeps it for all apps
URL = f"http://127.0.0.1:{PORT}"


@contextmanager
def deploy(**fields: Any) -> Iterator[None]:
    start_on_ray(ServerConfig(port=PORT, served_names=("m",), replicas=2, **fields))
    try:
        yield
    finally:
        serve.delete(APP_NAME)


def post(**fields: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 8, "temperature": 0, **fields}
    reply = httpx.post(f"{URL}/v1/completions", json=body, timeout=60.0)
    assert reply.status_code == 200, reply.text
    parsed: dict[str, Any] = reply.json()
    return parsed


def stream_lines(**fields: Any) -> Iterator[str]:
    body = {"model": "m", "stream": True, **fields}
    with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=60.0) as reply:
        assert reply.status_code == 200
        yield from (line for line in reply.iter_lines() if line)


def find_leaks() -> dict[str, int]:
    audit = httpx.get(f"{URL}/audit", timeout=60.0).json()
    return {
        f"{place}.{kind}": count
        for place, kinds in audit.items()
        for kind, count in kinds.items()
        if count
    }


def engine_actors(index: int) -> list[str]:
    names = ray.util.list_named_actors(all_namespaces=True)
    return [one["name"] for one in names if f"#engine-{index}#" in one["name"]]


def read_health() -> list[dict[str, Any]]:
    engines: list[dict[str, Any]] = httpx.get(f"{URL}/health", timeout=60.0).json()["engines"]
    return engines


def test_mock_engines(cluster) -> None:
    with deploy(**MOCK):
        assert len(read_health()) == 2
        whole = post(prompt="Hello", max_tokens=20)["choices"][0]["text"]
        lines = [*stream_lines(prompt="Hello", max_tokens=20, temperature=0)]
        assert lines[-1] == "data: [DONE]" and len(lines) > 5  # it came in parts
        events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        parts = [choice["text"] for event in events for choice in event["choices"]]
        assert "".join(parts) == whole

        next(stream_lines(prompt="Hello", max_tokens=5000))  # and leave
        wait_for(lambda: not find_leaks())
        wait_for(lambda: all(one["state"] == "idle" for one in read_health()))

        check_killed_actor(whole)


def check_killed_actor(whole: str) -> None:
    """A request on the killed actor ends with an error; Ray starts another actor; the log names both."""
    reply = stream_lines(prompt="Hello", max_tokens=5000)
    next(reply)
    busy = next(index for index, one in enumerate(read_health()) if one["state"] == "busy")
    (name,) = engine_actors(busy)
    ray.kill(ray.get_actor(name, namespace="serve"))
    rest = "\n".join(reply)
    assert "error" in rest and "died" in rest
    assert post(prompt="Hello", max_tokens=20)["choices"][0]["text"] == whole  # by the other one
    wait_for(lambda: [one["restarts"] for one in read_health()][busy] == 1)
    wait_for(lambda: all(one["state"] != "starting" for one in read_health()))
    (new_name,) = engine_actors(busy)
    assert new_name != name
    log = "".join(path.read_text() for path in find_logs())
    for one, text in ((name, "is lost"), (new_name, "")):
        short = one.removeprefix("SERVE_REPLICA::")
        assert any(short in line and text in line for line in log.splitlines()), short
    assert not find_leaks()


def find_logs() -> list[Path]:
    """What Ray's workers have printed."""
    context = ray.get_runtime_context()
    folder = Path("/tmp/ray") / context.get_session_name() / "logs"
    return [*folder.glob("worker-*.err"), *folder.glob("serve/*.log")]


def test_a_real_model_with_a_prefill_replica(cluster, tmp_path) -> None:
    """The same bits as an engine on this machine, by way of handed-over blocks."""
    engine = {"device": "cpu", "context": 256, "max_sequences": 4, "cache_tokens": 1024}
    fields: dict[str, Any] = {
        "model": str(save_checkpoint(tmp_path)),
        "engine": engine,
        "threads": 1,
    }
    with serve_here(ServerConfig(engine_in="thread", served_names=("m",), **fields)) as server:
        body = {"model": "m", "prompt": QUESTION, "max_tokens": 8, "temperature": 0, "logprobs": 2}
        expected = server.post("/v1/completions", body).json()["choices"]
    with deploy(prefill_replicas=1, **fields):
        reply = post(prompt=QUESTION, logprobs=2)
        assert reply["choices"] == expected
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
        assert not find_leaks()


def test_a_cluster_that_is_too_small_is_refused(cluster) -> None:
    with pytest.raises(ArgumentError, match="need 9 CPUs, but the Ray cluster has 4"):
        check_resources(ServerConfig(replicas=3, threads=3), 0)
    with pytest.raises(ArgumentError, match="need 2 GPUs"):
        check_resources(ServerConfig(replicas=2), 1)
