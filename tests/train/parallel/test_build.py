"""`build_layout`: which layout a config means, what is refused, and compiled models under each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.config import ParallelSection, TrainConfig
from fulgurite.train.parallel import ReplicatedData, ShardedData, build_layout, resolve_degrees
from fulgurite.train.parallel.build import check_layout, select_layout
from fulgurite.train.parallel.layout_base import Degrees
from fulgurite.train.step import OneRank
from tests.train.parallel.comparison import (
    Ranks,
    assert_close,
    assert_same_bits,
    reference,
    run_on,
)
from tests.train.parallel.layout_cases import Case, model_config


def config_of(**fields: Any) -> TrainConfig:
    return TrainConfig(**({"batch_size": 8, "microbatch_size": 1} | fields))


def test_one_process_is_one_rank() -> None:
    layout = build_layout(config_of(deterministic=True), model_config("moe"), "cpu")
    assert isinstance(layout, OneRank) and layout.deterministic


@pytest.mark.parametrize(
    "world, fields, expected",
    [
        (8, {}, Degrees(dp_replicate=8)),
        (8, {"data_shard": 0}, Degrees(dp_shard=8)),
        (8, {"data_shard": 2}, Degrees(dp_replicate=4, dp_shard=2)),
        (8, {"tensor": 2, "data_shard": 4}, Degrees(dp_shard=4, tp=2)),
        (8, {"data": 4, "pipeline": 2, "expert": 4}, Degrees(pp=2, dp_replicate=4, ep=4)),
        (6, {"context": 3, "expert": 6}, Degrees(dp_replicate=2, cp=3, ep=6)),
        (3, {"expert": 3}, Degrees(dp_replicate=3, ep=3)),
        (1, {}, Degrees()),
    ],
)
def test_degrees(world: int, fields: dict[str, Any], expected: Degrees) -> None:
    degrees = resolve_degrees(replace(ParallelSection(), **fields), world)
    assert degrees == expected
    assert degrees.world_size == world
    assert degrees.ep * degrees.ep_replicate == degrees.tokens


@pytest.mark.parametrize(
    "world, fields, message",
    [
        (4, {"data": 3}, "= 3 ranks, but there are 4"),
        (4, {"tensor": 3}, "= 3 ranks, but there are 4"),
        (4, {"data": 2, "tensor": 4}, "= 8 ranks, but there are 4"),
        (4, {"data_shard": 3}, "data_shard=3 must divide the 4 data ranks"),
        (4, {"data_shard": -1}, "data_shard=-1"),
        (4, {"expert": 3}, "expert=3 must divide data 4 x context 1"),
        (4, {"tensor": 2, "expert": 4}, "expert=4 must divide data 2"),
        (4, {"tensor": 0}, "tensor=0"),
        (4, {"data": 0}, "data=0"),
    ],
)
def test_degrees_that_do_not_fit(world: int, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message) as caught:
        resolve_degrees(replace(ParallelSection(), **fields), world)
    assert caught.value.details["next"]


@pytest.mark.parametrize(
    "fields, degrees, message",
    [
        ({"batch_size": 8}, Degrees(dp_replicate=3), "batch_size=8 must be a multiple"),
        ({"batch_size": 6, "microbatch_size": 4}, Degrees(), "batch_size=6 must be a multiple"),
        ({"batch_size": 2}, Degrees(dp_replicate=4), "batch_size=2 must be a multiple"),
        ({}, Degrees(dp_replicate=2, ep=2), "the model has no experts"),
        ({"deterministic": True, "batch_size": 12}, Degrees(dp_replicate=4), "3 microbatches"),
        ({"deterministic": True}, Degrees(dp_replicate=2, ep=2), "parallel.expert=2"),
    ],
)
def test_runs_that_are_refused(fields: dict[str, Any], degrees: Degrees, message: str) -> None:
    model = "moe" if "expert=2" in message else "dense"
    with pytest.raises(ArgumentError, match=message) as caught:
        check_layout(config_of(**fields), model_config(model), degrees)
    assert caught.value.details["next"]


def test_the_suggested_batch_size_fits() -> None:
    degrees, model = Degrees(dp_replicate=3), model_config("dense")
    with pytest.raises(ArgumentError, match="batch_size=8") as caught:
        check_layout(config_of(batch_size=8, microbatch_size=2), model, degrees)
    assert caught.value.details["next"].startswith("batch_size=6")
    check_layout(config_of(batch_size=6, microbatch_size=2), model, degrees)


def test_layouts() -> None:
    assert select_layout(Degrees(dp_replicate=2)) is ReplicatedData
    assert select_layout(Degrees(dp_replicate=2, ep=2)) is ReplicatedData
    assert select_layout(Degrees(dp_shard=2)) is ShardedData
    assert select_layout(Degrees(dp_replicate=2, dp_shard=2, ep=4)) is ShardedData


COMPILED = {
    "replicated": ({}, 0),
    "FSDP": ({"data_shard": 0}, 2),
    "expert": ({"expert": 2}, 0),
    "FSDP and expert": ({"data_shard": 0, "expert": 2}, 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if "and" in n else pytest.mark.slow) for n in COMPILED]
)
def test_compiled_models(ranks: Ranks, name: str) -> None:
    """FSDP2's units compile; experts on other ranks break the graph at dispatch and combine."""
    degrees, units = COMPILED[name]
    case = Case("moe", steps=2, compile=True)
    results = run_on(ranks, 2, case, **degrees)
    assert_close(results, reference(case))
    assert results[0].extra["units"] == units
    assert 1 <= results[0].extra["graphs"] <= 12


@pytest.mark.slow
def test_compiled_deterministic_runs_have_the_same_bits(ranks: Ranks) -> None:
    case = Case("moe", steps=2, compile=True, deterministic=True)
    replicated, sharded = (run_on(ranks, 2, case, data_shard=n) for n in (1, 0))
    assert_same_bits(sharded, replicated[0])
