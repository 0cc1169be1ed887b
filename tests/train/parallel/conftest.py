"""Rank processes that live as long as the tests of this folder: each test sends them a function."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fulgurite.parallel.processes.launch import RankPool
from tests.ranks import keep_pools


@pytest.fixture(scope="package")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """`ranks(4)`: four processes, started when first asked for, and anew after a failure."""
    with keep_pools(failure_grace=3.0) as get:
        yield get


@pytest.fixture
def pool(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(4)


@pytest.fixture
def pair(ranks: Callable[[int], RankPool]) -> RankPool:
    return ranks(2)
