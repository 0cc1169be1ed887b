"""Context parallelism against one rank: a sequence over ranks has the losses and weights of one."""

from __future__ import annotations

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.parallel.mesh import Axis
from fulgurite.train.parallel.context import check_context_degree, local_places, split_batch
from fulgurite.train.parallel.layout_base import Degrees
from tests.train.parallel import model_parallel_cases as cases
from tests.train.parallel.model_parallel_cases import Case

TWO = Degrees(cp=2)


@pytest.mark.parametrize("name", ["qwen3", "tied", "dots1", "gemma2"])
def test_two_ranks_train_as_one(pair, name):
    cases.check(pair, Case(name, TWO, steps=8, count=1))


def test_fifty_steps_of_whole_rows(pair):
    cases.check(pair, Case("qwen3", TWO, steps=50, count=1, documents=False))


@pytest.mark.parametrize("steps", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_compiled_layers_train_as_one(pair, steps):
    """The all-gather of keys is an op of the graph."""
    for outcome in cases.check(pair, Case("qwen3", TWO, steps=steps, count=1, compile=True)):
        assert outcome.compiled.collectives["axis_all_gather"] and not outcome.compiled.breaks


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_auxiliary_losses_sinks_and_latent_attention(pair, name):
    cases.check(pair, Case(name, TWO, steps=6, count=1))


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(cp=4),
        Degrees(cp=2, tp=2),
        Degrees(cp=2, dp_replicate=2),
        Degrees(cp=2, dp_shard=2),
    ],
    ids=str,
)
def test_four_ranks(pool, degrees):
    cases.check(pool, Case("dots1", degrees, steps=6, count=2))


def test_evaluation_is_that_of_one_rank(pair):
    wanted = cases.evaluate_alone("qwen3")
    for found in pair.run(cases.evaluate_split, Case("qwen3", TWO)):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_zigzag_gives_every_rank_the_same_work():
    places = [local_places(24, rank, 3) for rank in range(3)]
    assert sorted(torch.cat(places).tolist()) == list(range(24))
    work = {int((place + 1).sum()) for place in places}  # keys that the queries see
    assert len(work) == 1
    assert local_places(8, 0, 2).tolist() == [0, 1, 6, 7]


def test_labels_positions_and_documents_are_split_alike():
    (batch,) = cases.make_batches(0, 1, 61)
    places = local_places(cases.LENGTH, 1, 2)
    part = split_batch(batch, Axis("cp", (0, 1), 1))
    for name in ("tokens_BT", "labels_BT", "positions_BT", "documents_BT"):
        assert torch.equal(getattr(part, name), getattr(batch, name)[:, places])


def test_lengths_that_do_not_divide():
    with pytest.raises(ArgumentError, match="4 chunks") as caught:
        check_context_degree(18, 2)
    assert "data.sequence_length=16" in str(caught.value)
    check_context_degree(16, 2)
    check_context_degree(17, 1)
