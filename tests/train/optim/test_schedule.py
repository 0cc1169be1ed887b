"""Learning rates at the corners: no steps, warmup longer than the run, fractions, the last step."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.train.config import OptimizerSection
from fulgurite.train.optim import build_optimizer, learning_rate, set_learning_rate
from fulgurite.train.optim.schedule import SCHEDULES, count_warmup_steps


def section(**fields):
    return OptimizerSection(**{"learning_rate": 2.0, **fields})


def rates(steps, **fields):
    return [learning_rate(section(**fields), step, steps) for step in range(steps)]


def test_wsd_rises_stays_and_falls():
    found = rates(20, schedule="wsd", warmup=4, decay=0.25, final_ratio=0.1)
    assert found[:4] == [0.5, 1.0, 1.5, 2.0]
    assert found[4:16] == [2.0] * 12
    assert found[16:] == pytest.approx([1.64, 1.28, 0.92, 0.56])
    assert learning_rate(section(decay=0.25, final_ratio=0.1), 20, 20) == pytest.approx(0.2)


def test_cosine_and_linear_fall_from_the_end_of_the_warmup():
    cosine = rates(12, schedule="cosine", warmup=2)
    assert cosine[2] == 2.0
    assert cosine[7] == pytest.approx(1 + math.cos(math.pi / 2))
    linear = rates(12, schedule="linear", warmup=2)
    assert linear[2:] == pytest.approx([2 - 0.2 * i for i in range(10)])
    assert rates(5, schedule="constant", warmup=0) == [2.0] * 5


def test_warmup_as_a_fraction_and_as_steps():
    assert count_warmup_steps(section(warmup=0.1), 50) == 5
    assert count_warmup_steps(section(warmup=1), 50) == 1
    assert count_warmup_steps(section(warmup=0.0), 50) == 0
    assert rates(10, schedule="constant", warmup=0.2)[:3] == [1.0, 2.0, 2.0]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_longer_than_the_run(schedule):
    found = rates(5, schedule=schedule, warmup=100)
    assert found[0] == pytest.approx(0.02)
    assert all(0 < rate <= 0.1 for rate in found)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("warmup", [0, 0.5, 1, 3])
def test_runs_of_no_and_one_step(schedule, steps, warmup):
    for step in (-1, 0, 1, 7):
        rate = learning_rate(section(schedule=schedule, warmup=warmup), step, steps)
        assert math.isfinite(rate) and 0 <= rate <= 2.0
    if steps == 1 and warmup < 3:
        assert learning_rate(section(schedule=schedule, warmup=warmup), 0, 1) > 0


def test_steps_past_the_end_keep_the_last_rate():
    for schedule in ("wsd", "cosine", "linear"):
        assert learning_rate(section(schedule=schedule, final_ratio=0.3), 99, 10) == 0.6


@pytest.mark.parametrize(
    "fields",
    [
        {"schedule": "step"},
        {"warmup": -1},
        {"warmup": math.inf},
        {"decay": 1.5},
        {"final_ratio": -0.1},
        {"learning_rate": None},
        {"learning_rate": math.nan},
    ],
)
def test_wrong_values_are_named(fields):
    with pytest.raises(ArgumentError, match=f"optimizer.{next(iter(fields))}"):
        learning_rate(section(**fields), 0, 10)


def test_groups_of_muon_have_their_own_peak():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    config = section(name="muon", adam_learning_rate=0.5, warmup=4, schedule="constant")
    optimizer = build_optimizer(model, config, 10)
    by_kind = {group["kind"]: group for group in optimizer.param_groups}
    assert by_kind["matrices"]["lr"] == 0.5 and by_kind["vectors"]["lr"] == 0.125
    set_learning_rate(optimizer, config, 9, 10)
    assert by_kind["matrices"]["lr"] == 2.0 and by_kind["vectors"]["lr"] == 0.5
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    set_learning_rate(other, section(warmup=4), 0, 10)
    assert other.param_groups[0]["lr"] == 0.5
