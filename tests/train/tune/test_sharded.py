"""Fine-tuning with FSDP2 against one rank: losses and the adapter, for every method and task."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="it makes the base model")

from safetensors.torch import load_file

from fulgurite.parallel.processes.launch import RankPool
from fulgurite.train.config import ParallelSection, TrainConfig
from fulgurite.train.trainer import train
from tests.train.tune.test_runs import make_config, save_base

CASES = [
    ("text", "lora", {}),
    ("chat", "qlora", {}),
    ("dpo", "none", {"reference": "live"}),
    ("dpo", "none", {}),
    ("dpo", "lora", {}),
    ("grpo", "lora", {"beta": 0.1}),
    ("grpo", "none", {"beta": 0.1, "temperature": 0.7}),
]


def run(config: TrainConfig) -> None:
    train(config)


def read_losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def pair() -> Any:
    with RankPool(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def alone() -> Any:
    with RankPool(1) as ranks:
        yield ranks


@pytest.mark.parametrize(("task", "method", "tune"), CASES)
def test_two_ranks_that_share_the_weights_train_as_one(
    alone: RankPool, pair: RankPool, base: Path, tmp_path: Path, task: str, method: str, tune: Any
) -> None:
    config = make_config(
        tmp_path, base, task, method, deterministic=True, batch_size=8, microbatch_size=2, steps=2
    )
    config = replace(config, tune=replace(config.tune, **tune))
    folders = tmp_path / "one", tmp_path / "two"
    alone.run(run, replace(config, output=str(folders[0])))
    sharded = ParallelSection(data_shard=2, timeout=60.0)
    pair.run(run, replace(config, output=str(folders[1]), parallel=sharded))
    losses = [read_losses(folder) for folder in folders]
    assert losses[0] == losses[1] and len(losses[0]) == 2
    if task == "dpo":
        assert losses[0][0] == pytest.approx(math.log(2)), "the policy is the reference"
    name = "adapter/adapter_model.safetensors" if method != "none" else "export/model.safetensors"
    first, second = (load_file(folder / name) for folder in folders)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(second[key], value), key
