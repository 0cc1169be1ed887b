"""FSDP2 and HSDP against one rank: to the bit in deterministic mode, else in float tolerance."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fulgurite.parallel.processes.launch import RankPool
from fulgurite.train.config import ParallelSection
from fulgurite.train.parallel.layout_base import Degrees
from tests.train.parallel import model_parallel_cases
from tests.train.parallel.comparison import (
    Ranks,
    assert_close,
    assert_same_bits,
    reference,
    run_on,
)
from tests.train.parallel.layout_cases import Case
from tests.train.parallel.state_cases import (
    load_other_layout,
    merge_into_shards,
    sum_small_gradients,
    use_parameters_unevenly,
)


@pytest.mark.covering
@pytest.mark.parametrize("model", ["tied", "moe"])
@pytest.mark.parametrize(
    "count, shard", [(2, 0), (4, 2), pytest.param(4, 0, marks=pytest.mark.slow)]
)
def test_deterministic_runs_have_the_same_bits(
    ranks: Ranks, model: str, count: int, shard: int
) -> None:
    case = Case(model, steps=3, deterministic=True)
    assert_same_bits(run_on(ranks, count, case, data_shard=shard), reference(case))


def test_deterministic_runs_have_the_same_bits_in_bfloat16(ranks: Ranks) -> None:
    """Sums are divided before they are rounded, as on one rank."""
    case = Case("moe", steps=3, deterministic=True, dtype=torch.bfloat16, optimizer="muon")
    assert_same_bits(run_on(ranks, 4, case, data_shard=2), reference(case))


def test_uneven_shards_have_the_same_bits(ranks: Ranks) -> None:
    case = Case(steps=3, deterministic=True, batch_size=12, microbatch_size=2)
    assert_same_bits(run_on(ranks, 3, case, data_shard=0), reference(case))


@pytest.mark.parametrize("count, shard", [(2, 0), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_fifty_steps(ranks: Ranks, count: int, shard: int) -> None:
    case = Case("moe", steps=50, batch_size=4)
    results = run_on(ranks, count, case, data_shard=shard)
    assert_close(results, reference(case))


@pytest.mark.parametrize("deterministic", [True, False])
def test_an_evaluation_between_steps_changes_nothing(ranks: Ranks, deterministic: bool) -> None:
    case = Case("tied", steps=3, evaluates=True, deterministic=deterministic)
    results = run_on(ranks, 2, case, data_shard=0)
    assert_close(results, reference(replace(case, evaluates=False)))
    shapes = results[0].local_shapes
    assert shapes["embed_tokens.weight"][0] < 61, "the embedding is a shard again"


def test_shards_are_smaller_than_parameters(ranks: Ranks) -> None:
    result = run_on(ranks, 2, Case("moe", steps=1), data_shard=0)[0]
    for name, shape in result.local_shapes.items():
        full = tuple(result.weights[name].shape)
        if ".router." in name:
            assert shape == full, (
                "update_balance and the auxiliary loss read routers outside of layers"
            )
        else:
            assert shape == (full[0] // 2 + full[0] % 2, *full[1:]), name


def test_an_auxiliary_loss_reads_routers_of_layers_that_were_freed() -> None:
    section = ParallelSection(data_shard=2)
    case = model_parallel_cases.Case("qwen3_moe", Degrees(dp_shard=2), 3, 2, section=section)
    with RankPool(2) as pool:  # of its own: the case keeps its mesh open
        model_parallel_cases.check(pool, case)


def test_adapters_are_merged_into_shards(ranks: Ranks) -> None:
    for is_whole, difference in ranks(2).run(merge_into_shards):
        assert is_whole and difference < 1e-6


@pytest.mark.parametrize("change", ["frozen", "no labels", "no rows"])
def test_odd_runs(ranks: Ranks, change: str) -> None:
    case = Case("tied", steps=3, change=change)
    assert_close(run_on(ranks, 2, case, data_shard=0), reference(case))


@pytest.mark.parametrize("shard", [1, 3])
def test_bfloat16_is_reduced_in_float32(ranks: Ranks, shard: int) -> None:
    """256 + 1 + 1 is 256 if each sum is rounded to bfloat16."""
    for gradient in ranks(3).run(sum_small_gradients, shard):
        assert gradient == [258 / 3] * 4


def test_a_parameter_that_only_one_rank_uses(ranks: Ranks) -> None:
    """Ranks don't wait for each other forever, and the gradient is the sum over ranks."""
    for used, unused in ranks(2).run(use_parameters_unevenly):
        assert used == pytest.approx([1.0, 1.0])
        assert unused == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize("degrees", [{"data_shard": 0}, {"expert": 2}, {}])
def test_states_load_on_another_layout(
    ranks: Ranks, degrees: dict[str, Any], tmp_path: Any
) -> None:
    """Weights and optimizer states of FSDP, saved with DCP, go on with another layout."""
    saved = ranks(4).run(load_other_layout, str(tmp_path), "save", {"data_shard": 2})
    loaded = ranks(2).run(load_other_layout, str(tmp_path), "load", degrees)
    assert loaded[0] == pytest.approx(saved[0], rel=1e-5)
