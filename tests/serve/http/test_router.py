"""Which replica a request gets: by prefix, by load, and after restarts and failures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve.engine.prefix_chunk import PrefixBlocks
from fulgurite.serve.engine.replica_choice import BLOCK_TOKENS, KnownPrefixes, hash_prefixes
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.http.kv_transfer import CHUNKS_AHEAD, send_blocks
from fulgurite.serve.http.router import Router
from fulgurite.serve.remote.client import EngineError
from fulgurite.serve.remote.messages import Progress
from tests.serve.http.routing_simulation import (
    WORKLOADS,
    Outcome,
    make_info,
    shared_prefixes,
    simulate,
    unique_prompts,
)


class FakeEngine:
    """An `EngineHandle` that the tests set: its load, its state, and the blocks that it has."""

    def __init__(self, index: int, cache_tokens: int = 1 << 20) -> None:
        self.index, self.info = index, make_info(cache_tokens)
        self.progress = Progress()
        self.restarts, self.num_requests = 0, 0
        self.is_ready, self.state = True, "idle"
        self.started: list[list[int]] = []

    def generate(self, prompt_ids: list[int], params: SamplingParams, **options: Any) -> Any:
        self.started.append(prompt_ids)
        self.num_requests += 1
        return self


def make_router(count: int, routing: str = "prefix", **options: Any) -> tuple[Router, list[Any]]:
    engines = [FakeEngine(index, **options) for index in range(count)]
    return Router(engines, routing), engines  # type: ignore[arg-type]


def prompt(seed: int, blocks: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=blocks * BLOCK_TOKENS)


# ---- keys ---------------------------------------------------------------------------------------


def test_a_key_covers_all_tokens_before_it_and_the_salt() -> None:
    tokens = prompt(0, 3)
    keys = hash_prefixes(tokens)
    assert len(keys) == 3 and len({*keys}) == 3
    assert hash_prefixes(tokens[:-1]) == keys[:2]
    assert hash_prefixes([tokens[0] + 1, *tokens[1:]])[2] != keys[2]
    assert not {*keys} & {*hash_prefixes(tokens, "salt")}
    assert hash_prefixes(tokens[: BLOCK_TOKENS - 1]) == []


def test_the_least_recently_used_blocks_are_forgotten_first() -> None:
    known = KnownPrefixes(limit=4)
    first, second = hash_prefixes(prompt(1, 3)), hash_prefixes(prompt(2, 3))
    known.add(first)
    known.add(second)
    assert known.match(second) == 3
    assert known.match(first) == 1  # its first block, which is the most useful, is left


def test_replies_take_room() -> None:
    known = KnownPrefixes(limit=8)
    keys = hash_prefixes(prompt(1, 4))
    known.add(keys)
    known.add(hash_prefixes(prompt(2, 2)), 1, reply_blocks=4)
    assert known.match(keys) == 2


def test_known_blocks_are_limited_by_the_replica_s_cache() -> None:
    router, engines = make_router(2, cache_tokens=10 * BLOCK_TOKENS)
    engines[1].num_requests = 50
    for seed in range(5):
        router.choose(prompt(seed, 4))
    assert router.chooser.known[0].limit == 10
    assert len(router.chooser.known[0].blocks) == 10
    assert router.chooser.known[0].match(hash_prefixes(prompt(0, 4))) == 0


# ---- policies -----------------------------------------------------------------------------------


def test_a_known_prefix_is_followed_and_unknown_ones_go_to_the_least_busy() -> None:
    router, engines = make_router(4)
    engines[0].num_requests = engines[1].num_requests = engines[3].num_requests = 1
    assert router.choose(prompt(0, 8)).index == 2
    engines[2].num_requests = 3
    assert router.choose(prompt(0, 8) + prompt(9, 1)).index == 2
    assert router.choose(prompt(1, 8)).index == 0


def test_conversations_follow_their_history() -> None:
    router, engines = make_router(4)
    histories = {user: prompt(user, 2) for user in range(8)}
    homes: dict[int, int] = {}
    for turn in range(6):
        for user, history in histories.items():
            index = router.choose(history).index
            assert homes.setdefault(user, index) == index
            engines[index].num_requests += 1
            history += prompt(100 * turn + user, 1)
        for engine in engines:
            engine.num_requests = 0  # all have finished
    assert {*homes.values()} == {0, 1, 2, 3}


def test_a_hot_prefix_spreads_when_its_replica_is_overloaded() -> None:
    router, engines = make_router(4)
    hot = prompt(0, 32)
    for _ in range(64):
        engines[router.choose(hot).index].num_requests += 1
    loads = [engine.num_requests for engine in engines]
    assert min(loads) >= 12, loads


def test_a_rare_prefix_stays_although_its_replica_is_a_little_busier() -> None:
    router, engines = make_router(2)
    for seed in range(40):
        router.choose(prompt(seed, 16))
    home = router.choose(prompt(3, 16)).index
    engines[home].num_requests = 6
    assert router.choose(prompt(3, 16)).index == home
    engines[home].num_requests = 60
    assert router.choose(prompt(3, 16)).index != home


def test_round_robin_and_least_loaded() -> None:
    router, engines = make_router(3, "round-robin")
    assert [router.choose(prompt(0, 4)).index for _ in range(4)] == [0, 1, 2, 0]
    router, engines = make_router(3, "least-loaded")
    engines[0].num_requests, engines[1].num_requests = 2, 1
    assert [router.choose(prompt(0, 4)).index for _ in range(2)] == [2, 2]
    assert router.chooser.prompt_blocks == 0


def test_without_a_prompt_the_least_busy_is_chosen_and_nothing_is_known() -> None:
    router, engines = make_router(2)
    engines[0].num_requests = 1
    assert router.choose([]).index == 1
    assert not router.chooser.known[1].blocks


def test_replicas_that_are_not_ready_or_stalled_are_left_out() -> None:
    router, engines = make_router(3)
    router.choose(prompt(0, 8))
    engines[0].is_ready = False
    assert router.choose(prompt(0, 8)).index == 1
    engines[1].state = "stalled"
    assert router.choose(prompt(0, 8)).index == 2
    engines[2].is_ready = False
    with pytest.raises(EngineError, match="no engine is ready"):
        router.choose(prompt(0, 8))


def test_a_restarted_replica_has_an_empty_cache() -> None:
    router, engines = make_router(2)
    assert router.choose(prompt(0, 8)).index == 0
    engines[0].restarts, engines[0].num_requests = 1, 1
    assert router.choose(prompt(0, 8)).index == 1


def test_capacity_counts_ready_decode_replicas() -> None:
    engines = [FakeEngine(index) for index in range(4)]
    router = Router(engines, prefill_replicas=1)  # type: ignore[arg-type]
    engines[3].is_ready = False
    assert router.capacity == 2 * 64
    router.check_engine(make_info(1))
    with pytest.raises(ArgumentError, match="no prefix cache"):
        router.check_engine(make_info(1, prefix_caching=False))


# ---- hand-over ----------------------------------------------------------------------------------


class FakeStore(FakeEngine):
    """Exports `total` blocks, four a chunk; imports up to `room`."""

    def __init__(self, index: int, total: int = 0, room: int = 1 << 30) -> None:
        super().__init__(index)
        self.total, self.room = total, room
        self.imported: list[tuple[int, int]] = []
        self.in_flight = self.most_in_flight = 0

    async def export_prefix(self, prompt_ids: list[int], *_: Any, **options: Any) -> PrefixBlocks:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(0)
            start = options.get("start", 0)
            hashes = [str(number).encode() for number in range(self.total)]
            end = min(start + 4, self.total)
            return PrefixBlocks(hashes, start, end, [b""], "")
        finally:
            self.in_flight -= 1

    async def import_prefix(self, blocks: PrefixBlocks) -> int:
        await asyncio.sleep(0)
        self.imported.append((blocks.start, blocks.end))
        return min(len(blocks.hashes), self.room)


@pytest.mark.parametrize(
    ("total", "room", "start", "chunks", "count"),
    [
        (0, 99, 0, [], 0),
        (3, 99, 0, [(0, 3)], 3),
        (10, 99, 0, [(0, 4), (4, 8), (8, 10)], 10),
        (10, 99, 5, [(5, 9), (9, 10)], 5),
        (10, 99, 10, [], 0),
        (40, 6, 0, [(0, 4), (4, 8)], 6),
        (40, 0, 0, [(0, 4)], 0),
    ],
)
def test_chunks_arrive_in_order_and_stop_when_there_is_no_room(
    total: int, room: int, start: int, chunks: list[tuple[int, int]], count: int
) -> None:
    source, target = FakeStore(0, total), FakeStore(1, room=room)
    sent = asyncio.run(send_blocks(source, target, [1], start=start))  # type: ignore[arg-type]
    assert sent == count and target.imported == chunks
    assert source.in_flight == 0 and source.most_in_flight <= CHUNKS_AHEAD


def test_a_source_that_evicts_ends_the_hand_over() -> None:
    class Evicting(FakeStore):
        async def export_prefix(self, *arguments: Any, **options: Any) -> PrefixBlocks:
            self.total -= 3
            return await super().export_prefix(*arguments, **options)

    source, target = Evicting(0, 40), FakeStore(1)
    assert asyncio.run(send_blocks(source, target, [1])) == 4  # type: ignore[arg-type]
    assert target.imported == [(0, 4)]


# ---- simulation ---------------------------------------------------------------------------------


def compare(name: str, replicas: int) -> dict[str, Outcome]:
    make, cache_tokens = WORKLOADS[name]
    count = 200 * replicas
    return {
        routing: simulate(make(count, replicas), routing, replicas, cache_tokens, 16 * replicas)
        for routing in ("prefix", "round-robin", "least-loaded")
    }


@pytest.mark.parametrize("replicas", [2, 4])
def test_shared_prefixes_are_computed_less_often(replicas: int) -> None:
    outcomes = compare("shared, small caches", replicas)
    prefix, others = outcomes.pop("prefix"), outcomes.values()
    assert all(1.9 * prefix.computed_tokens < other.computed_tokens for other in others), outcomes
    assert all(1.4 * prefix.seconds < other.seconds for other in others), outcomes
    assert prefix.imbalance < 1.1


def test_unique_prompts_are_routed_like_least_loaded() -> None:
    outcomes = [
        simulate(unique_prompts(200), routing, 4, 80_000, 64)
        for routing in ("prefix", "least-loaded")
    ]
    assert outcomes[0].seconds < 1.03 * outcomes[1].seconds
    assert outcomes[0].computed_tokens == outcomes[1].computed_tokens


def test_one_hot_prefix_keeps_all_replicas_busy() -> None:
    outcomes = [
        simulate(shared_prefixes(400, 1, 2048), routing, 4, 80_000, 96)
        for routing in ("prefix", "least-loaded")
    ]
    assert outcomes[0].imbalance < 1.1
    assert outcomes[0].seconds < 1.05 * outcomes[1].seconds
