"""Pipelines against one rank: schedules, uneven layers, tied embeddings, and what can't be scheduled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.config import ParallelSection, TrainConfig
from fulgurite.train.parallel.layout_base import Degrees
from fulgurite.train.parallel.pipeline import check_pipeline, rank_of_stage
from fulgurite.train.parallel.stages import split_layers
from tests.train.parallel import model_parallel_cases as cases
from tests.train.parallel.model_parallel_cases import Case

SCHEDULES = ("1f1b", "interleaved", "zero_bubble")
TWO = Degrees(pp=2)
FIVE = {"num_hidden_layers": 5}


def make_case(name: str, degrees: Degrees, schedule: str, steps: int, count: int = 4) -> Case:
    section = ParallelSection(pipeline=degrees.pp, pipeline_schedule=schedule)
    layers = {"num_hidden_layers": 5 if degrees.pp == 2 else 9}
    return Case(name, degrees, steps=steps, count=count, section=section, changed=layers)


@pytest.mark.covering
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["qwen3", "tied", "dots1"])
def test_two_ranks_train_as_one(pair, name, schedule):
    cases.check(pair, make_case(name, TWO, schedule, 8))


def test_fifty_steps_train_as_one(pair):
    cases.check(pair, make_case("tied", TWO, "1f1b", 50, 2))


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [("zero_bubble", 4), *(pytest.param("1f1b", n, marks=pytest.mark.slow) for n in (8, 50))],
)
def test_compiled_layers_train_as_one(pair, schedule, steps):
    """Linears whose weight gradients come later run between graphs."""
    case = replace(make_case("tied", TWO, schedule, steps), compile=True)
    for outcome in cases.check(pair, case):
        assert outcome.compiled.count
        assert bool(outcome.compiled.breaks) == (schedule == "zero_bubble")
        assert all("gradients of weights later" in text for text in outcome.compiled.breaks)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages(pool, schedule):
    cases.check(pool, make_case("tied", Degrees(pp=4), schedule, 4, 8))


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(pp=2, tp=2),
        Degrees(pp=2, cp=2),
        Degrees(pp=2, dp_replicate=2),
        Degrees(pp=2, dp_shard=2),
    ],
    ids=str,
)
def test_with_other_dimensions(pool, degrees):
    cases.check(pool, make_case("tied", degrees, "1f1b", 4))
    cases.check(pool, make_case("dots1", degrees, "interleaved", 3))


def test_evaluation_is_that_of_one_rank(pair):
    wanted = cases.evaluate_alone("dots1", **FIVE)
    for schedule in SCHEDULES:
        for found in pair.run(cases.evaluate_split, make_case("dots1", TWO, schedule, 0)):
            assert found == pytest.approx(wanted, rel=1e-6)


def test_export_has_the_parameters_of_all_stages(pair):
    wanted = {name: p.detach() for name, p in cases.make_model("tied", **FIVE).named_parameters()}
    for found in pair.run(cases.gather_for_export, make_case("tied", TWO, "1f1b", 0)):
        assert found.keys() == wanted.keys()
        assert all((found[name] == wanted[name]).all() for name in wanted)


def test_a_checkpoint_of_stages_loads_on_one_rank(pair, tmp_path):
    pair.run(cases.save_checkpoint, make_case("tied", TWO, "interleaved", 2), str(tmp_path))
    cases.check_loaded(tmp_path, "tied", 2, **FIVE)


def test_uneven_layers_go_to_the_first_stages():
    assert split_layers(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert split_layers(4, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    with pytest.raises(ArgumentError, match="3 layers are too few for 4"):
        split_layers(3, 4)


def test_ranks_of_stages():
    assert [rank_of_stage("interleaved", s, 2) for s in range(4)] == [0, 1, 0, 1]
    assert [rank_of_stage("zero_bubble", s, 2) for s in range(4)] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("schedule", "degrees", "batch", "says"),
    [
        ("gpipe", TWO, 4, "pipeline_schedule='gpipe'"),
        ("1f1b", TWO, 1, "1 microbatches on each data rank"),
        ("interleaved", TWO, 5, "a multiple of the rounds"),
        ("zero_bubble", Degrees(pp=2, dp_shard=2), 8, "FSDP2"),
        ("interleaved", Degrees(pp=4), 8, "5 layers are too few for 8"),
    ],
)
def test_what_can_not_be_scheduled(schedule, degrees, batch, says):
    section = ParallelSection(pipeline=degrees.pp, pipeline_schedule=schedule)
    config = TrainConfig(parallel=section, batch_size=batch, microbatch_size=1)
    _, model_config = cases.family_of("tied", **FIVE)
    with pytest.raises(ArgumentError, match=says):
        check_pipeline(config, model_config, degrees)
