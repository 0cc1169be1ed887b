"""Experts over data ranks against one rank: losses, weights and loads, with every data layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.train.parallel.expert import check_experts
from tests.train.parallel.comparison import Ranks, assert_close, reference, run_on
from tests.train.parallel.layout_cases import Case

slow = pytest.mark.slow
PRODUCTS = [
    pytest.param(2, {"expert": 2}, id="data 2, expert 2", marks=slow),
    pytest.param(4, {"expert": 2}, id="every expert on two ranks", marks=slow),
    pytest.param(4, {"expert": 2, "data_shard": 0}, id="FSDP 4, expert 2", marks=slow),
    pytest.param(4, {"expert": 2, "data_shard": 2}, id="HSDP 2 x 2, expert 2"),
    pytest.param(4, {"expert": 4, "data_shard": 2}, id="HSDP 2 x 2, expert 4", marks=slow),
]


@pytest.mark.parametrize("count, degrees", PRODUCTS)
def test_fifty_steps(ranks: Ranks, count: int, degrees: dict[str, Any]) -> None:
    case = Case("moe", steps=50, batch_size=4)
    assert_close(run_on(ranks, count, case, **degrees), reference(case))


@pytest.mark.parametrize("shard", [1, 0])
def test_eight_experts_on_three_ranks(ranks: Ranks, shard: int) -> None:
    case = Case("moe", steps=3, batch_size=6)
    results = run_on(ranks, 3, case, expert=3, data_shard=shard)
    assert_close(results, reference(case))
    name = next(n for n in results[0].weights if n.endswith("experts.gate_up_proj"))
    assert [result.local_shapes[name][0] for result in results] == [3, 3, 2]


@pytest.mark.parametrize("change", ["one expert", "frozen", "no labels", "no rows"])
def test_odd_runs(ranks: Ranks, change: str) -> None:
    """Ranks without tokens, experts without tokens: nothing hangs and every gradient is right."""
    case = Case("moe", steps=3, change=change)
    assert_close(run_on(ranks, 2, case, expert=2), reference(case))


def test_experts_without_tokens_keep_their_weights_as_on_one_rank(ranks: Ranks) -> None:
    case = Case("moe", steps=3, change="one expert")
    expected = reference(case)
    result = run_on(ranks, 4, case, expert=4, data_shard=2)[3]
    loads = expected.loads[-1]
    assert loads is not None and loads[:, 2:].sum() == 0, "experts 2 to 7 have no tokens"
    assert_close([result], expected)


@pytest.mark.parametrize("degrees", [{"expert": 2}, {"expert": 4, "data_shard": 2}], ids=str)
def test_products_with_muon(ranks: Ranks, degrees: dict[str, Any]) -> None:
    case = Case("moe", steps=3, batch_size=4, optimizer="muon")
    assert_close(run_on(ranks, 4, case, **degrees), reference(case))


def test_layers_without_a_shared_expert(ranks: Ranks) -> None:
    case = Case("moe, no shared expert", steps=3)
    assert_close(run_on(ranks, 2, case, expert=2), reference(case))


def test_bfloat16_follows_one_rank(ranks: Ranks) -> None:
    """Routes of near ties may differ by rounding; the loss may not."""
    case = Case("moe", steps=5, dtype=torch.bfloat16)
    result, expected = run_on(ranks, 2, case, expert=2)[0], reference(case)
    torch.testing.assert_close(result.losses, expected.losses, rtol=1e-2, atol=0.0)
    assert result.tokens == expected.tokens


def test_parameters_keep_names_and_full_shapes(ranks: Ranks) -> None:
    case = Case("moe", steps=1)
    result, expected = run_on(ranks, 2, case, expert=2)[0], reference(case)
    assert {n: w.shape for n, w in result.weights.items()} == {
        n: w.shape for n, w in expected.weights.items()
    }
    assert list(result.weights) == list(expected.weights)


@pytest.mark.parametrize("experts, degree", [(0, 2), (2, 3), (4, 3)])
def test_ranks_without_experts_are_an_error(experts: int, degree: int) -> None:
    with pytest.raises(ArgumentError, match=f"parallel.expert={degree}"):
        check_experts(experts, degree)


@pytest.mark.parametrize("experts, tensor", [(6, 2), (8, 3)])
def test_tensor_ranks_with_other_numbers_of_experts_are_an_error(experts: int, tensor: int) -> None:
    with pytest.raises(ArgumentError, match="parallel.expert=1 distributes"):
        check_experts(experts, 2, tensor)


def test_uneven_experts_are_not(ranks: Ranks) -> None:
    check_experts(8, 3)
    check_experts(0, 1)
