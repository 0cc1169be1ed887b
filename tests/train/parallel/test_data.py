"""Replicated data ranks against one rank: to the bit in deterministic mode, else in float tolerance."""

from __future__ import annotations

import pytest
import torch

from tests.train.parallel.comparison import (
    Ranks,
    assert_close,
    assert_same_bits,
    reference,
    run_on,
)
from tests.train.parallel.layout_cases import Case
from tests.train.parallel.reduction_cases import (
    reduce_uneven_gradients,
    reduce_while_backward_runs,
    sum_in_tree_order,
)


@pytest.mark.covering
@pytest.mark.parametrize("model", ["dense", "tied", "moe"])
@pytest.mark.parametrize("count", [2, 4])
def test_deterministic_runs_have_the_same_bits(ranks: Ranks, model: str, count: int) -> None:
    case = Case(model, steps=3, deterministic=True)
    assert_same_bits(run_on(ranks, count, case), reference(case))


def test_deterministic_runs_have_the_same_bits_in_bfloat16(ranks: Ranks) -> None:
    case = Case("moe", steps=3, deterministic=True, dtype=torch.bfloat16)
    expected = reference(case)
    assert_same_bits(run_on(ranks, 2, case), expected)
    assert_same_bits(run_on(ranks, 4, case), expected)


def test_three_ranks_have_the_same_bits_too(ranks: Ranks) -> None:
    case = Case(steps=3, deterministic=True, batch_size=12, microbatch_size=2)
    assert_same_bits(run_on(ranks, 3, case), reference(case))


@pytest.mark.parametrize("change", ["frozen", "no labels", "no rows"])
def test_odd_runs_have_the_same_bits(ranks: Ranks, change: str) -> None:
    case = Case("moe", steps=2, deterministic=True, change=change)
    assert_same_bits(run_on(ranks, 2, case), reference(case))


def test_fifty_steps_of_bucketed_gradients(ranks: Ranks) -> None:
    case = Case("moe", steps=50, batch_size=4)
    assert_close(run_on(ranks, 2, case), reference(case))


@pytest.mark.parametrize("change", ["frozen", "no labels", "no rows"])
def test_odd_runs(ranks: Ranks, change: str) -> None:
    case = Case("tied", steps=3, change=change)
    assert_close(run_on(ranks, 2, case), reference(case))


def test_batches_by_three(ranks: Ranks) -> None:
    case = Case("moe", steps=3, batch_size=6)
    assert_close(run_on(ranks, 3, case), reference(case))


def test_a_gradient_that_only_one_rank_has(ranks: Ranks) -> None:
    """Ranks neither hang nor lose it; what no rank has stays None."""
    for in_order in (False, True):
        results = ranks(2).run(reduce_uneven_gradients, in_order)
        for both, first, second, nobody in results:
            assert both == [3.0, 3.0]
            assert first == [1.0, 1.0]
            assert second == [2.0, 2.0]
            assert nobody is None


def test_buckets_start_while_backward_runs(ranks: Ranks) -> None:
    for started, total, gradient, expected in ranks(2).run(reduce_while_backward_runs):
        assert total == 4
        assert started == [0, 1, 2, 3], "one more by the backward of each layer"
        torch.testing.assert_close(gradient, expected)


def test_sums_have_the_order_of_a_tree(ranks: Ranks) -> None:
    """Values whose sum depends on the order; both collectives agree with one rank."""
    for count in (2, 3, 4):
        for small, large, expected in ranks(count).run(sum_in_tree_order):
            assert torch.equal(small, expected)
            assert torch.equal(large, expected)
