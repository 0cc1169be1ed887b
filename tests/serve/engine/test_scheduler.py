"""The scheduler and its tables without a model: what a key is, is written down slot by slot.

A `Ledger` plays the model. For every token of a step it notes in the token's slot of every group which
beginning of a text the key there stands for, and looks up the key of every position that the token sees. So
blocks that are shared wrongly, given back too early or found by the wrong hash are seen at the first read.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.plan.kv_cache import KVCacheGroup, group_layers
from fulgurite.plan.limits import EngineLimits
from fulgurite.serve.engine.block_manager import BlockManager, BlockPool
from fulgurite.serve.engine.request import Request, RequestState, SamplingParams
from fulgurite.serve.engine.scheduler import MIN_MIXED_PREFILL, ScheduledChunk, Scheduler

SIZE, CONTEXT = 4, 64
FULL, NARROW, CHUNKED = (
    KVCacheGroup((0,), None, None),
    KVCacheGroup((1,), 6, None),
    KVCacheGroup((2,), None, 8),
)


def make_limits(max_sequences: int, max_batched_tokens: int) -> EngineLimits:
    return EngineLimits(CONTEXT, max_sequences, max_batched_tokens, SIZE, torch.float32)


SHARED = [list(range(22)), list(range(50, 63))]


def first_seen(group: KVCacheGroup, position: int) -> int:
    """The first position that a token sees, by the definition of a window and of chunks."""
    if group.sliding_window is not None:
        return max(0, position - group.sliding_window + 1)
    return 0 if group.chunk_size is None else position - position % group.chunk_size


class Ledger:
    """Runs a scheduler's steps and checks each; `blocks` of every group's pool."""

    def __init__(
        self,
        groups: list[KVCacheGroup],
        blocks: int,
        *,
        rows: int = 4,
        max_batched_tokens: int = 10,
        prefix_caching: bool = True,
        stale_after: int | None = None,
    ) -> None:
        pools = [BlockPool(blocks) for _ in groups]
        limits = make_limits(rows, max_batched_tokens)
        self.tables = BlockManager(groups, pools, limits, prefix_caching)
        self.scheduler = Scheduler(self.tables, rows, max_batched_tokens, stale_after)
        self.keys: list[dict[int, object]] = [{} for _ in groups]
        self.order: list[Request] = []
        self.cached: dict[str, int] = {}
        self.max_batched_tokens, self.rows, self.stale_after = max_batched_tokens, rows, stale_after
        self.most_in_use = 0

    def add(self, prompt: list[int], reply: int) -> Request:
        name = f"{len(self.order)}"
        request = Request(name, prompt, SamplingParams(max_tokens=reply), CONTEXT)
        self.order.append(request)
        self.scheduler.add(request)
        return request

    def step(self) -> list[ScheduledChunk]:
        scheduler = self.scheduler
        before, stopped = list(scheduler.running), scheduler.num_preemptions
        chunks = scheduler.schedule()
        self.check_step(chunks, before, scheduler.num_preemptions - stopped)
        for chunk in chunks:
            self.run(chunk)
        scheduler.mark_computed(chunks)
        scheduler.cache_blocks(chunks)
        for chunk in chunks:
            if chunk.request.num_computed_tokens == chunk.request.length:
                self.write(chunk.request)
        self.check_tables()
        return chunks

    def key(self, request: Request, position: int, length: int) -> object:
        """What a cached key depends on: all tokens up to its own, and LongRoPE's factors."""
        uses_long_factors = self.stale_after is not None and length > self.stale_after
        return request.tokens[: position + 1].tobytes(), uses_long_factors

    def run(self, chunk: ScheduledChunk) -> None:
        request, start, count = chunk.request, chunk.start, chunk.num_tokens
        assert start == request.num_computed_tokens, "keys are computed in order"
        for index, group in enumerate(self.tables.groups):
            row, keys = self.tables.block_tables[index][request.block_table_row], self.keys[index]
            for position in range(start, start + count):
                slot = int(row[position // SIZE]) * SIZE + position % SIZE
                assert slot >= SIZE, "block 0 is nobody's"
                keys[slot] = self.key(request, position, request.length)
            for position in range(start, start + count):
                for seen in range(first_seen(group, position), position + 1):
                    slot = int(row[seen // SIZE]) * SIZE + seen % SIZE
                    wanted = self.key(request, seen, request.length)
                    assert keys.get(slot) == wanted, f"{request.id}: {position} sees {seen}"

    def write(self, request: Request) -> None:
        """The next token, which follows from those before it."""
        seed = int(np.sum(request.tokens[: request.length] * np.arange(1, request.length + 1)))
        request.append(seed % 7)
        if request.length == request.max_length:
            request.finish("length")
            self.scheduler.finish(request)

    def check_step(self, chunks: list[ScheduledChunk], before: list[Request], stopped: int) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        assert sum(chunk.num_tokens for chunk in chunks) <= self.max_batched_tokens
        assert len({chunk.request for chunk in chunks}) == len(chunks) <= self.rows
        assert all(chunk.request.state is RequestState.RUNNING for chunk in chunks)
        assert all(
            request.state is RequestState.WAITING and request.block_table_row < 0
            for request in waiting
        )
        line = [*running, *waiting]
        assert line == [request for request in self.order if request in line], "nobody overtakes"
        assert not before or running[0] is before[0], "who came first is never stopped"
        served = {chunk.request for chunk in chunks}
        for request in before:
            if request in running and request.length - request.num_computed_tokens == 1:
                assert request in served, "who writes waits for nobody"
        if stopped:
            assert set(running) <= set(before), "nobody comes in while others are stopped"
        else:
            assert set(before) <= set(running)
        limit = self.max_batched_tokens
        mixed = self.scheduler.max_mixed_tokens
        decoding = sum(chunk.request in before and chunk.num_tokens == 1 for chunk in chunks)
        if mixed is not None and decoding:
            limit = max(mixed, decoding + MIN_MIXED_PREFILL)
        left = limit - sum(chunk.num_tokens for chunk in chunks)
        cut = [p for p in chunks if p.start + p.num_tokens < p.request.length]
        assert not (cut and left), "a prompt is cut only where the step is full"
        assert not (waiting and not running), "someone can always run"
        for request in running:
            first = self.cached.setdefault(request.id, request.cached_tokens)
            assert request.cached_tokens == first, "the hits of the first start are reported"

    def check_tables(self) -> None:
        """Users of a block are the rows that name it; a row has what can still be seen, and no more."""
        running = self.scheduler.running
        for group, pool, table in zip(
            self.tables.groups, self.tables.pools, self.tables.block_tables, strict=True
        ):
            used: Counter[int] = Counter()
            for request in running:
                named = np.flatnonzero(table[request.block_table_row])
                used.update(table[request.block_table_row][named].tolist())
                if request.num_computed_tokens < request.length and len(named):
                    # of the step that ran; the next one gives back what its first token can't see
                    begin = first_seen(
                        group, max(0, request.num_computed_tokens - self.max_batched_tokens)
                    )
                    assert begin // SIZE <= named[0] and named[-1] < -(-request.length // SIZE)
            assert [used[block] for block in range(pool.num_blocks + 1)] == pool.ref_counts
            free = [block for block in range(1, pool.num_blocks + 1) if not pool.ref_counts[block]]
            assert sorted(pool.free_blocks) == free
            assert set(pool.hash_by_block.items()) == {
                (b, h) for h, b in pool.block_by_hash.items()
            }
            assert 0 not in pool.hash_by_block
            self.most_in_use = max(self.most_in_use, pool.num_blocks - len(free))
        rows = [request.block_table_row for request in running]
        assert sorted([*rows, *self.tables.free_rows]) == list(range(self.rows))


def traffic(ledger: Ledger, count: int, seed: int) -> None:
    """Requests that come, share beginnings and are cancelled at random, to the last one's end."""
    rng, steps = random.Random(seed), 0
    while len(ledger.order) < count or ledger.scheduler.running or ledger.scheduler.waiting:
        while len(ledger.order) < count and rng.random() < 0.5:
            own = [rng.randrange(100) for _ in range(rng.choice((1, 3, 8, 17)))]
            ledger.add(rng.choice(([], *SHARED)) + own, rng.choice((1, 5, 12, 20)))
        ledger.step()
        steps += 1
        assert steps < 60 * count, "it does not come to an end"
        alive = [*ledger.scheduler.running, *ledger.scheduler.waiting]
        if alive and rng.random() < 0.05:
            gone = rng.choice(alive)
            ledger.scheduler.cancel(gone)
            gone.finish("cancelled")
            ledger.check_tables()
    for pool, table in zip(ledger.tables.pools, ledger.tables.block_tables, strict=True):
        assert len(pool.free_blocks) == pool.num_blocks and not table.any()


@pytest.mark.parametrize(
    "groups",
    [[FULL], [NARROW], [CHUNKED], [FULL, NARROW, CHUNKED]],
    ids=("full", "window", "chunks", "all"),
)
@pytest.mark.parametrize("blocks", [16, 24, 80])
def test_every_slot_holds_the_right_key(groups: list[KVCacheGroup], blocks: int) -> None:
    ledger = Ledger(groups, blocks)
    traffic(ledger, 60, seed=blocks)
    reused = sum(request.cached_tokens > 0 for request in ledger.order)
    assert reused > 5
    if FULL in groups and blocks == 16:
        assert ledger.scheduler.num_preemptions > 5 and ledger.most_in_use == blocks


def test_no_prefix_hits_without_prefix_caching() -> None:
    ledger = Ledger([FULL, NARROW], 24, prefix_caching=False)
    traffic(ledger, 40, seed=1)
    assert not any(request.cached_tokens for request in ledger.order)
    assert not any(pool.block_by_hash for pool in ledger.tables.pools)


def test_reset_prefix_cache() -> None:
    ledger = Ledger([FULL, NARROW], 24)
    traffic(ledger, 20, seed=3)
    assert all(pool.block_by_hash for pool in ledger.tables.pools)
    ledger.tables.reset_prefix_cache()
    ledger.add([*SHARED[0], 99], 1)
    ledger.step()
    assert ledger.order[-1].cached_tokens == 0
    traffic(ledger, 40, seed=4)
    assert any(request.cached_tokens for request in ledger.order[21:])


def test_stale_keys_are_recomputed() -> None:
    """LongRoPE: from 21 tokens on all keys of a sequence are rotated with the long factors."""
    ledger = Ledger([FULL], 30, prefix_caching=False, stale_after=20)
    traffic(ledger, 40, seed=2)
    assert any(request.uses_long_rope for request in ledger.order)
    exact = Ledger([FULL], 30, prefix_caching=False, stale_after=20)
    request = exact.add(list(range(18)), 6)
    starts = []
    while exact.scheduler.running or exact.scheduler.waiting:
        starts += [(request.length, chunk.start) for chunk in exact.step()]
    assert [length for length, start in starts if start == 0] == [18, 21]
    long = exact.add(list(range(25)), 3)  # was too long from its start
    starts = []
    while exact.scheduler.running or exact.scheduler.waiting:
        starts += [chunk.start for chunk in exact.step()]
    assert starts == [0, 10, 20, 25, 26] and long.uses_long_rope


def test_preempted_request_has_no_chunk_in_its_step() -> None:
    """Its token was scheduled already when a text before it had to be computed anew."""
    ledger = Ledger([FULL], 4, max_batched_tokens=10, prefix_caching=False, stale_after=8)
    first, second = ledger.add(list(range(7)), 6), ledger.add([50, 51, 52], 6)
    for _ in range(2):
        ledger.step()
    assert (first.length, second.length) == (9, 5)
    chunks = ledger.step()  # three blocks for the first, and one is left for the second's two
    assert [(p.request, p.start, p.num_tokens) for p in chunks] == [(first, 0, 9)]
    assert second.num_preemptions == 1
    while ledger.scheduler.running or ledger.scheduler.waiting:
        ledger.step()


def test_layers_with_equal_windows_share_a_group() -> None:
    spec = AttentionSpec(0, 2, 1, 8, 8, 1.0, sliding_window=None, chunk_size=None, softcap=None)
    reach = [(None, None), (6, None), (None, 6), (6, None), (6, 6)]
    specs = [
        replace(spec, layer_index=i, sliding_window=w, chunk_size=c)
        for i, (w, c) in enumerate(reach)
    ]
    assert [group.layers for group in group_layers(specs)] == [(0,), (1, 3), (2,), (4,)]


def test_decode_is_scheduled_before_prefill() -> None:
    ledger = Ledger([FULL], 80, max_batched_tokens=10)
    first = ledger.add(list(range(5)), 20)
    ledger.step()
    second, third = ledger.add(list(range(30, 48)), 3), ledger.add([70, 71], 3)
    chunks = ledger.step()
    assert [(p.request, p.num_tokens) for p in chunks] == [(first, 1), (second, 9)]
    chunks = ledger.step()  # the second's last nine; nothing is left for the third
    assert [(p.request, p.num_tokens) for p in chunks] == [(first, 1), (second, 9)]
    chunks = ledger.step()
    assert [(p.request, p.num_tokens) for p in chunks] == [(first, 1), (second, 1), (third, 2)]


def test_prompts_take_smaller_chunks_while_requests_decode() -> None:
    ledger = Ledger([FULL], 80, rows=2, max_batched_tokens=40)
    ledger.scheduler.max_mixed_tokens = 20
    first = ledger.add(list(range(38)), 20)
    assert [chunk.num_tokens for chunk in ledger.step()] == [38]  # nobody waits for a token
    second = ledger.add(list(range(50, 83)), 3)
    chunks = ledger.step()
    assert [(c.request, c.num_tokens) for c in chunks] == [(first, 1), (second, 19)]
    ledger.scheduler.max_mixed_tokens = 1  # a prompt still goes on
    chunks = ledger.step()
    assert [(c.request, c.num_tokens) for c in chunks] == [(first, 1), (second, 14)]
    third_budget = ledger.scheduler._find_budget(2)
    assert third_budget == 2 + MIN_MIXED_PREFILL


def test_budget_of_a_preempted_chunk_is_reused() -> None:
    """A step's budget comes back with the chunk of a request that is stopped in it."""
    ledger = Ledger([FULL], 5, rows=3, max_batched_tokens=4, prefix_caching=False)
    first, second = ledger.add([1] * 4, 12), ledger.add([2] * 4, 12)
    while first.length < 8:
        ledger.step()
    while not ledger.scheduler.num_preemptions:
        chunks = ledger.step()
    assert [chunk.request for chunk in chunks] == [first] and second.state is RequestState.WAITING
    assert second.num_preemptions == 1 and second.num_computed_tokens == 0 and second.length > 4


def test_admitted_request_can_reach_its_first_token() -> None:
    """Room for the prompt alone is too little: the first reply would stop somebody at once."""
    ledger = Ledger([FULL], 3, rows=2, max_batched_tokens=16, prefix_caching=False)
    ledger.add([1] * 4, 4)
    ledger.step()  # two blocks: four tokens, and the next one's
    second = ledger.add([2] * 4, 2)
    chunks = ledger.step()
    assert second.state is RequestState.WAITING and len(chunks) == 1
    small = Ledger([FULL], 3, rows=2, max_batched_tokens=16, prefix_caching=False)
    assert [p.num_tokens for p in (small.add([1] * 11, 1), small.step())[1]] == [
        11
    ]  # all of three blocks


def test_free_blocks_are_reused_in_lru_order() -> None:
    """The beginning of a text is found longest; blocks that hold nothing whole go before all others."""
    made = BlockManager([FULL], [BlockPool(6)], make_limits(2, 8))
    old, new = (Request(n, [t] * 10, SamplingParams(), CONTEXT) for n, t in (("a", 1), ("b", 2)))
    for one in (old, new):
        made.allocate(one)
        assert made.reserve(one, 10)
        one.num_computed_tokens = 10
        made.cache_full_blocks(one, one.num_computed_tokens)
    blocks = {one: made.block_tables[0][one.block_table_row][:3].tolist() for one in (old, new)}
    made.free(old)
    made.free(new)
    (a, b, half), (c, d, other) = blocks[old], blocks[new]
    assert list(made.pools[0].free_blocks) == [other, half, b, a, d, c]


def test_prefix_must_be_cached_for_every_group() -> None:
    """Where one end of a beginning fails, the next shorter one may fail too."""
    made = BlockManager([FULL, NARROW], [BlockPool(20) for _ in range(2)], make_limits(4, 8))
    ids = list(range(30))
    first = Request("a", ids, SamplingParams(), CONTEXT)
    made.allocate(first)
    for tokens in (8, 16, 24, 30):
        assert made.reserve(first, tokens)
        first.num_computed_tokens = tokens
        made.cache_full_blocks(first, first.num_computed_tokens)
    made.free(first)
    narrow = made.pools[1]
    for block in (5, 3):  # an end at 24 needs 4 and 5, one at 20 needs 3 and 4, one at 16 2 and 3
        del narrow.hash_by_block[narrow.block_by_hash.pop(first.block_hashes[block])]
    again = Request("b", [*ids[:24], 99], SamplingParams(), CONTEXT)
    made.allocate(again)
    assert again.num_computed_tokens == 12


@pytest.mark.parametrize(
    ("group", "position", "oldest"),
    [
        (FULL, 30, 0),
        (NARROW, 5, 0),
        (NARROW, 6, 1),
        (CHUNKED, 7, 0),
        (CHUNKED, 8, 8),
        (CHUNKED, 23, 16),
    ],
)
def test_first_visible_key(group: KVCacheGroup, position: int, oldest: int) -> None:
    assert group.first_visible(position) == oldest == first_seen(group, position)


def test_max_request_tokens_is_set_by_the_smallest_pool() -> None:
    def capacity(full: int, narrow: int) -> int:
        pools = [BlockPool(full), BlockPool(narrow)]
        return BlockManager([FULL, NARROW], pools, make_limits(2, 8)).max_request_tokens()

    assert capacity(16, 16) == 64 and capacity(15, 16) == 60
    assert NARROW.max_blocks(64, 8, SIZE) == 5  # 13 positions lie in up to five blocks of four
    assert capacity(16, 5) == 64 and capacity(16, 4) == 16
