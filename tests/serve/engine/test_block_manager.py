"""The block pool and the block manager alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fulgurite.plan.kv_cache import KVCacheGroup
from fulgurite.plan.limits import EngineLimits
from fulgurite.serve.engine.block_manager import BlockManager, BlockPool, hash_block
from fulgurite.serve.engine.request import Request, SamplingParams

FULL, NARROW, CHUNKED = (
    KVCacheGroup((0,), None, None),
    KVCacheGroup((1,), 6, None),
    KVCacheGroup((2,), None, 8),
)


def request(ids: list[int]) -> Request:
    return Request("r", ids, SamplingParams(max_tokens=100), 200)


def tables(
    groups: list[KVCacheGroup], blocks: int = 20, prefix_caching: bool = True
) -> BlockManager:
    limits = EngineLimits(64, 4, 8, 4, torch.float32)
    pools = [BlockPool(blocks) for _ in groups]
    return BlockManager(groups, pools, limits, prefix_caching)


def run(made: BlockManager, one: Request, tokens: int) -> None:
    assert made.reserve(one, tokens)
    one.num_computed_tokens = tokens
    made.cache_full_blocks(one, one.num_computed_tokens)


def test_free_blocks_stay_cached_until_allocated() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    assert blocks == [1, 2, 3] and not pool.free_blocks
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.cache_block(block, name)
    pool.add_reference(2)
    for block in (3, 2, 1, 2):
        pool.release(block)
    assert list(pool.free_blocks) == [3, 1, 2] and pool.block_by_hash[b"b"] == 2
    assert pool.allocate() == 3 and b"c" not in pool.block_by_hash and b"a" in pool.block_by_hash
    with pytest.raises(AssertionError, match="no references"):
        pool.release(1)


def test_block_hash_includes_all_previous_blocks() -> None:
    one, two = np.arange(4), np.arange(4, 8)
    assert hash_block(hash_block(b"", one), two) != hash_block(hash_block(b"", two), two)
    assert hash_block(b"", one) == hash_block(b"", one.copy())


@pytest.mark.parametrize("group", [FULL, NARROW, CHUNKED])
def test_block_table_keeps_visible_blocks(group: KVCacheGroup) -> None:
    made, one = tables([group], prefix_caching=False), request(list(range(40)))
    made.allocate(one)
    for tokens in range(1, 41):
        assert made.reserve(one, tokens)
        row = made.block_tables[0][one.block_table_row]
        seen = range(group.first_visible(tokens - 1), tokens)
        kept = {position // 4 for position in range(64) if row[position // 4]}
        assert {position // 4 for position in seen} <= kept
        assert len(kept) == made.pools[0].num_blocks - len(made.pools[0].free_blocks)
        assert len(kept) <= group.max_blocks(tokens, 8, 4)
        one.num_computed_tokens = tokens
    made.free(one)
    assert len(made.pools[0].free_blocks) == 20 and not made.block_tables[0].any()


def test_reserve_is_all_or_nothing() -> None:
    made, one = tables([FULL, NARROW], blocks=3), request(list(range(30)))
    made.allocate(one)
    assert made.reserve(one, 12) and not made.reserve(one, 13)
    assert [len(pool.free_blocks) for pool in made.pools] == [0, 0]
    assert made.num_blocks[:, one.block_table_row].tolist() == [3, 3]


def test_prefix_match_is_the_shortest_of_all_groups() -> None:
    made = tables([FULL, NARROW])
    first = request(list(range(30)))
    made.allocate(first)
    for tokens in (8, 16, 24, 30):
        run(made, first, tokens)
    made.free(first)
    second = request([*range(24), 99, 98])
    made.allocate(second)
    assert second.num_computed_tokens == 24
    assert made.block_tables[1][second.block_table_row, :6].tolist()[:4] == [
        0,
        0,
        0,
        0,
    ]  # behind the window
    made.free(second)
    # Without the block just before, a window of six sees nothing there; an earlier end is tried.
    pool = made.pools[1]
    lost = pool.block_by_hash.pop(first.block_hashes[5])
    del pool.hash_by_block[lost]
    third = request([*range(24), 99, 98])
    made.allocate(third)
    assert third.num_computed_tokens == 20
    made.free(third)


def test_shared_blocks_are_freed_by_the_last_request() -> None:
    made, first = tables([FULL]), request(list(range(20)))
    made.allocate(first)
    run(made, first, 20)
    second = Request("s", list(range(20)), SamplingParams(), 200)
    made.allocate(second)
    assert second.num_computed_tokens == 16
    assert (
        made.block_tables[0][first.block_table_row, :4]
        == made.block_tables[0][second.block_table_row, :4]
    ).all()
    made.free(first)
    assert len(made.pools[0].free_blocks) == 20 - 4
    made.free(second)
    assert len(made.pools[0].free_blocks) == 20
