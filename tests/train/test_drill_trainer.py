"""The real trainer under the drill, and its receipt replayed; a mixture of experts of a few thousand
parameters, 1 and 2 ranks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fulgurite.train.checkpoint import hash_state, list_checkpoints, read_checkpoint
from fulgurite.train.config import (
    CheckpointSection,
    DataSection,
    EvaluateSection,
    LogSection,
    ModelSection,
    OptimizerSection,
    ParallelSection,
    TrainConfig,
)
from fulgurite.train.drill import run_drill
from fulgurite.train.supervisor import supervise
from fulgurite.train.trainer import hash_data, replay, train
from fulgurite.train.verify import VerifyReport, verify_run

FIELDS = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "n_routed_experts": 4,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = "the a light stone runs falls under over quick slow river".split()
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    with path.open("w") as file:
        for _ in range(300):
            file.write(json.dumps({"text": " ".join(generator.choices(words, k=30))}) + "\n")
    return path


def make_config(output: Path, text: Path, **parallel: int) -> TrainConfig:
    return TrainConfig(
        output=str(output),
        device="cpu",
        steps=12,
        batch_size=4,
        microbatch_size=1,
        compile=False,
        deterministic=True,
        model=ModelSection(fields=FIELDS),
        data=DataSection(train=(str(text),), sequence_length=16, vocab_size=280, holdout=10),
        checkpoint=CheckpointSection(every=2, keep=4, export=False),
        evaluate=EvaluateSection(every=0, batches=1),
        log=LogSection(report=False, live=False),
        parallel=ParallelSection(**parallel),  # type: ignore[arg-type]
    )


def verify(folder: Path, steps: int = 3) -> VerifyReport:
    return verify_run(folder, replay=replay, hash_data=hash_data, steps=steps, seed=0)


def final_hash(folder: Path) -> tuple[int, str]:
    step, path = list_checkpoints(folder / "checkpoints")[-1]
    return step, hash_state(read_checkpoint(path))


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """A drill of the real trainer on two ranks."""
    folder = tmp_path_factory.mktemp("drill")
    report = run_drill(make_config(folder, text), 2, train, kills=2, seed=0)
    assert report.has_passed, report.describe()
    assert len(report.kills) == 2 and len(report.undisturbed.losses) == 12
    return folder


def test_a_disturbed_run_of_two_ranks_is_verified_on_one(drill: Path) -> None:
    report = verify(drill / "disturbed", steps=12)
    assert report.has_passed, report.describe()
    assert "to the bit" in report.describe() and len(report.replayed) == 12


def test_one_rank_has_the_bits_of_two(drill: Path, tmp_path: Path, text: Path) -> None:
    assert supervise(make_config(tmp_path, text), 1, train) == 0
    assert final_hash(tmp_path) == final_hash(drill / "undisturbed")


@pytest.mark.slow
def test_changed_text_and_weights_are_named(tmp_path: Path, text: Path) -> None:
    own = tmp_path / "text.jsonl"
    own.write_text(text.read_text())
    config = make_config(tmp_path / "run", own)
    train(config)
    folder = tmp_path / "run"
    assert verify(folder).has_passed
    file = folder / "checkpoints" / "step-000012" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    own.write_text(text.read_text().replace("river", "rover", 1))
    problems = "\n".join(verify(folder).problems)
    assert "step-000012" in problems and "data " in problems, problems


def read_losses(folder: Path) -> list[float]:
    receipt = json.loads((folder / "receipt.json").read_text())
    return [float.fromhex(text) for text in receipt["losses"].values()]


@pytest.mark.slow
def test_a_sharded_run_resumes_on_other_numbers_of_ranks(tmp_path: Path, text: Path) -> None:
    """FSDP2 on four ranks, then two, then one; its losses are those of one rank from the start."""
    config = replace(
        make_config(tmp_path / "run", text, data_shard=0),
        deterministic=False,
        optimizer=OptimizerSection(schedule="constant", warmup=2),
    )
    for ranks, steps in ((4, 4), (2, 8)):
        assert supervise(replace(config, steps=steps), ranks, train) == 0
    config = replace(config, parallel=ParallelSection())
    assert supervise(config, 1, train) == 0
    whole = replace(config, output=str(tmp_path / "whole"))
    assert supervise(whole, 1, train) == 0
    losses = read_losses(tmp_path / "run")
    assert len(losses) == 12
    assert losses == pytest.approx(read_losses(tmp_path / "whole"), rel=1e-4)
