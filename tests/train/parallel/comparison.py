"""Runs on many ranks against the same run on one, which is computed once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from fulgurite.parallel.processes.launch import RankPool
from tests.train.parallel.layout_cases import Case, Result, run_case

Ranks = Callable[[int], RankPool]


RESULTS: dict[str, Result] = {}


@cache
def one_rank() -> RankPool:
    """A process like those of many ranks; it ends with the tests."""
    return RankPool(1)


def reference(case: Case) -> Result:
    """The same case on one rank, not compiled."""
    case = replace(case, parallel={}, compile=False)
    if str(case) not in RESULTS:
        RESULTS[str(case)] = one_rank().run(run_case, case)[0]
    return RESULTS[str(case)]


def run_on(ranks: Ranks, count: int, case: Case, **degrees: Any) -> list[Result]:
    results: list[Result] = ranks(count).run(run_case, replace(case, parallel=degrees))
    return results


def assert_same_bits(results: list[Result], expected: Result) -> None:
    for result in results:
        assert [x.hex() for x in result.losses] == [x.hex() for x in expected.losses]
        assert [x.hex() for x in result.norms] == [x.hex() for x in expected.norms]
        assert result.weights.keys() == expected.weights.keys()
        for name, weight in expected.weights.items():
            assert torch.equal(result.weights[name], weight), name
        assert_same_counts(result, expected)


def assert_close(results: list[Result], expected: Result, tolerance: float = 2e-5) -> None:
    """Losses and norms of float32 runs, which differ by the order of sums only."""
    for result in results:
        torch.testing.assert_close(result.losses, expected.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(result.norms, expected.norms, rtol=tolerance, atol=tolerance)
        for name, weight in expected.weights.items():
            # Where a gradient is near zero, AdamW turns its rounding into a visible update.
            torch.testing.assert_close(result.weights[name], weight, rtol=1e-2, atol=2e-4)
        assert_same_counts(result, expected)


def assert_same_counts(result: Result, expected: Result) -> None:
    assert result.tokens == expected.tokens
    for load_LE, expected_LE in zip(result.loads, expected.loads, strict=True):
        assert (load_LE is None) == (expected_LE is None)
        assert load_LE is None or torch.equal(load_LE, expected_LE)
