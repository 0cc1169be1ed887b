"""Which replica of an engine over ranks gets a request; no ranks are started."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from fulgurite.parallel.mesh import Axis
from fulgurite.serve.engine.coordinator import Coordinator
from fulgurite.serve.engine.replica_choice import BLOCK_TOKENS
from fulgurite.serve.engine.request import Request, RequestOptions, SamplingParams


class Replicas:
    """The coordinator of rank 0, whose requests end when a test says so."""

    def __init__(self, count: int = 2, max_requests: int = 8, cache_blocks: int = 100) -> None:
        mesh: Any = SimpleNamespace(
            rank=0, data=Axis("data", tuple(range(count)), 0), health=None, mesh_number=0
        )
        self.coordinator = Coordinator(mesh)
        if max_requests:
            self.coordinator.use_prefix_caches(cache_blocks * BLOCK_TOKENS, max_requests)
        self.requests: list[Request] = []

    def add(self, prompt: list[int], salt: str = "", constraint: Any = None) -> int:
        """The replica of a new request."""
        name = f"r{len(self.requests)}"
        request = Request(
            name, prompt, SamplingParams(), 100_000, options=RequestOptions(cache_salt=salt)
        )
        request.constraint = constraint
        self.requests.append(request)
        self.coordinator.add_request(request, prompt)
        return self.coordinator.replica_of[name]

    def end_all(self) -> None:
        for request in self.requests:
            if request.id in self.coordinator.replica_of:
                self.coordinator.record_end(request)
        assert set(self.coordinator.loads.values()) == {0}


def prompt(first: int, blocks: int) -> list[int]:
    return [first, *range(1, blocks * BLOCK_TOKENS)]


def test_a_request_goes_where_its_prefix_is_cached() -> None:
    replicas = Replicas(3)
    homes = [replicas.add(prompt(n, 10)) for n in range(3)]
    assert sorted(homes) == [0, 1, 2]
    replicas.end_all()
    for n in (2, 2, 0, 1, 2, 0):
        assert replicas.add([*prompt(n, 10), 7, 8, 9]) == homes[n]
        replicas.end_all()


def test_another_salt_is_another_prefix() -> None:
    replicas = Replicas()
    replicas.add([1])
    assert replicas.add(prompt(1, 4)) == 1
    replicas.end_all()
    assert replicas.add(prompt(1, 4), salt="other") == 0


def test_short_prompts_go_to_the_replica_with_the_fewest() -> None:
    replicas = Replicas(3)
    assert [replicas.add([1, 2, 3]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_busy_replica_loses_its_prefix_to_an_idle_one() -> None:
    replicas = Replicas(2, max_requests=100)
    homes = [replicas.add(prompt(1, 8)) for _ in range(40)]
    assert homes[:3] == [0, 0, 0]  # eight blocks cost more than these requests
    assert abs(homes.count(0) - homes.count(1)) <= 6


def test_no_request_waits_where_another_replica_could_run_it() -> None:
    replicas = Replicas(2, max_requests=4)
    homes = [replicas.add(prompt(1, 90)) for _ in range(8)]
    assert homes == [0] * 4 + [1] * 4
    replicas.add(prompt(1, 90))
    assert sum(replicas.coordinator.loads.values()) == 9  # all are full: it waits


def test_a_reset_cache_and_one_that_is_too_small() -> None:
    replicas = Replicas(2, cache_blocks=5)
    assert replicas.add(prompt(1, 4)) == 0
    assert replicas.add(prompt(2, 4)) == 1
    replicas.end_all()
    assert replicas.add(prompt(3, 4)) == 0  # evicts the first prompt
    replicas.end_all()
    replicas.add([1])
    assert replicas.add(prompt(1, 4)) == 1
    replicas.end_all()
    replicas.coordinator.record_prefix_cache_reset()
    assert replicas.add(prompt(1, 4)) == 0


def test_without_a_prefix_cache_and_with_an_own_constraint() -> None:
    replicas = Replicas(2, max_requests=0)
    assert [replicas.add(prompt(1, 4)) for _ in range(4)] == [0, 1, 0, 1]
    assert [replicas.add([1], constraint=object()) for _ in range(2)] == [0, 0]
    assert replicas.add([1]) == 1
