"""Sharded parameters (DTensors of FSDP2 and of split columns) give the result of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the cases share a module with its reference tests")

from fulgurite.parallel.processes.launch import launch
from tests.train.optim.shard_cases import OPTIONS, load_on_one_rank, run_all, run_whole


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("shards")


@pytest.fixture(scope="module")
def results(folder):
    return launch(run_all, 2, str(folder))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_ranks_equal_one_to_the_bit(name, dtype, results):
    for rank in results:
        assert rank[f"{name} {dtype}"] == 0.0


def test_split_columns_equal_one_rank(results):
    for rank in results:
        assert rank["columns adamw"] == 0.0 and rank["columns muon"] == 0.0


def test_ranks_with_shards_of_other_sizes_gather_the_same_matrices(results):
    for rank in results:
        assert rank["chunks"] < 1e-5


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_of_two_ranks_goes_on_with_one(name, results, folder):
    assert results
    found = load_on_one_rank(name, str(Path(folder) / name))
    for ours, expected in zip(found, run_whole(name, torch.bfloat16), strict=True):
        assert torch.equal(ours, expected)


def test_export_from_shards(results):
    for is_equal, message in (rank["export"] for rank in results):
        assert is_equal
        assert "already exists" in message
