"""Blocks and tables by themselves."""

from __future__ import annotations

import numpy as np
import pytest

from fulgurite.serve.engine.block_pool import BlockPool, next_hash
from fulgurite.serve.engine.block_tables import BlockTables, Group
from fulgurite.serve.engine.request import Request, SamplingParams

FULL, NARROW, CHUNKED = Group((0,), None, None), Group((1,), 6, None), Group((2,), None, 8)


def request(ids: list[int]) -> Request:
    return Request("r", ids, SamplingParams(max_tokens=100), 200)


def tables(groups: list[Group], blocks: int = 20, reuse: bool = True) -> BlockTables:
    return BlockTables(groups, [BlockPool(blocks) for _ in groups], 4, 4, 64, 8, reuse)


def run(made: BlockTables, one: Request, tokens: int) -> None:
    assert made.reserve(one, tokens)
    one.computed = tokens
    made.publish(one)


def test_free_blocks_are_found_until_they_are_taken() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    assert blocks == [1, 2, 3] and not pool.free
    for block, name in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.publish(block, name)
    pool.share(2)
    for block in (3, 2, 1, 2):
        pool.release(block)
    assert list(pool.free) == [3, 1, 2] and pool.block_of[b"b"] == 2
    assert pool.take() == 3 and b"c" not in pool.block_of and b"a" in pool.block_of
    with pytest.raises(AssertionError, match="no user"):
        pool.release(1)


def test_a_hash_says_all_that_came_before() -> None:
    one, two = np.arange(4), np.arange(4, 8)
    assert next_hash(next_hash(b"", one), two) != next_hash(next_hash(b"", two), two)
    assert next_hash(b"", one) == next_hash(b"", one.copy())


@pytest.mark.parametrize("group", [FULL, NARROW, CHUNKED])
def test_a_row_keeps_what_is_seen(group: Group) -> None:
    made, one = tables([group], reuse=False), request(list(range(40)))
    made.open(one)
    for tokens in range(1, 41):
        assert made.reserve(one, tokens)
        row = made.tables[0][one.row]
        seen = range(group.oldest(tokens - 1), tokens)
        kept = {position // 4 for position in range(64) if row[position // 4]}
        assert {position // 4 for position in seen} <= kept
        assert len(kept) == made.pools[0].count - len(made.pools[0].free)
        assert len(kept) <= group.blocks(tokens, 8, 4)
        one.computed = tokens
    made.close(one)
    assert len(made.pools[0].free) == 20 and not made.tables[0].any()


def test_reserving_takes_all_or_nothing() -> None:
    made, one = tables([FULL, NARROW], blocks=3), request(list(range(30)))
    made.open(one)
    assert made.reserve(one, 12) and not made.reserve(one, 13)
    assert [len(pool.free) for pool in made.pools] == [0, 0]
    assert made.stops[:, one.row].tolist() == [3, 3]


def test_a_beginning_is_found_as_far_as_every_layer_has_it() -> None:
    made = tables([FULL, NARROW])
    first = request(list(range(30)))
    made.open(first)
    for tokens in (8, 16, 24, 30):
        run(made, first, tokens)
    made.close(first)
    second = request([*range(24), 99, 98])
    made.open(second)
    assert second.computed == 24
    assert made.tables[1][second.row, :6].tolist()[:4] == [0, 0, 0, 0]  # behind the window
    made.close(second)
    # Without the block just before, a window of six sees nothing there; an earlier end is tried.
    pool = made.pools[1]
    lost = pool.block_of.pop(first.block_hashes[5])
    del pool.hash_of[lost]
    third = request([*range(24), 99, 98])
    made.open(third)
    assert third.computed == 20
    made.close(third)


def test_shared_blocks_stay_with_their_other_user() -> None:
    made, first = tables([FULL]), request(list(range(20)))
    made.open(first)
    run(made, first, 20)
    second = Request("s", list(range(20)), SamplingParams(), 200)
    made.open(second)
    assert second.computed == 16
    assert (made.tables[0][first.row, :4] == made.tables[0][second.row, :4]).all()
    made.close(first)
    assert len(made.pools[0].free) == 20 - 4
    made.close(second)
    assert len(made.pools[0].free) == 20
