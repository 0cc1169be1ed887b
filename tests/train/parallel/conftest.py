"""Rank processes that live as long as the tests: each test sends them a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fulgurite.parallel.processes.launch import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)`: four processes, started when first asked for, and anew after a failure."""
    running: dict[int, RankPool] = {}

    def get(count: int) -> RankPool:
        if count not in running or not running[count].is_alive:
            running[count] = RankPool(count, failure_grace=3.0)
        return running[count]

    yield get
    for pool in running.values():
        pool.close()
