"""The order of samples is a permutation of each epoch that depends on the seed and the number alone."""

from __future__ import annotations

import pytest
from scipy.stats import chi2

from fulgurite.errors import ArgumentError
from fulgurite.train.data.order import sample_index

LENGTHS = [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 255, 257, 1000, 1025]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", [None, 0, 1, -1, 2**70])
def test_each_epoch_has_each_sample_once(length: int, seed: int | None):
    for epoch in range(3):
        numbers = range(epoch * length, (epoch + 1) * length)
        assert sorted(sample_index(n, length, seed) for n in numbers) == list(range(length))


def test_without_a_seed_samples_are_in_order():
    assert [sample_index(n, 5, None) for n in range(12)] == [0, 1, 2, 3, 4] * 2 + [0, 1]


def test_epochs_and_seeds_have_orders_of_their_own():
    def epoch(number: int, seed: int) -> tuple[int, ...]:
        return tuple(sample_index(n, 100, seed) for n in range(100 * number, 100 * number + 100))

    orders = {epoch(number, seed) for number in range(5) for seed in range(5)}
    assert len(orders) == 25
    assert tuple(range(100)) not in orders


def test_the_order_is_pinned():
    """A change of the order would break resumed runs and receipts."""
    assert [sample_index(n, 10, 0) for n in range(20)] == [
        0,
        4,
        5,
        6,
        3,
        9,
        7,
        2,
        8,
        1,
        1,
        8,
        9,
        4,
        6,
        0,
        2,
        3,
        7,
        5,
    ]


def test_the_first_place_is_uniform_over_seeds():
    length, draws = 20, 4000
    counts = [0] * length
    for seed in range(draws):
        counts[sample_index(3, length, seed)] += 1
    expected = draws / length
    statistic = sum((count - expected) ** 2 / expected for count in counts)
    assert chi2.sf(statistic, length - 1) > 1e-4


def test_huge_datasets_need_no_memory():
    length = 10**15 + 7
    found = {sample_index(n, length, 0) for n in range(1000)}
    assert len(found) == 1000 and max(found) > length // 2


@pytest.mark.parametrize(("number", "length"), [(-1, 5), (0, 0)])
def test_a_sample_that_is_not_there(number: int, length: int):
    with pytest.raises(ArgumentError, match="no sample"):
        sample_index(number, length, 0)
