"""Whole runs of a very small model: resume, skipped steps, results on disk."""

from __future__ import annotations

import json
import math
import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fulgurite.errors import ArgumentError, NonFiniteError
from fulgurite.train import trainer as trainer_file
from fulgurite.train.checkpoint import CheckpointManager, list_checkpoints
from fulgurite.train.config import TrainConfig
from fulgurite.train.config_file import override, read_config
from fulgurite.train.finish import read_result, write_sample
from fulgurite.train.metrics import read_metrics
from fulgurite.train.report import write_report
from fulgurite.train.setup import build_parts, resolve
from fulgurite.train.trainer import Trainer, hash_data, replay, train
from fulgurite.train.verify import verify_run

SMALL = [
    ("device", "cpu"),
    ("steps", "6"),
    ("batch_size", "4"),
    ("microbatch_size", "2"),
    ("compile", "false"),
    ("data.sequence_length", "24"),
    ("data.vocab_size", "300"),
    ("data.workers", "0"),
    ("model.fields.hidden_size", "32"),
    ("model.fields.num_hidden_layers", "2"),
    ("model.fields.head_dim", "8"),
    ("model.fields.intermediate_size", "48"),
    ("model.fields.moe_intermediate_size", "16"),
    ("checkpoint.every", "3"),
    ("evaluate.every", "3"),
    ("evaluate.batches", "2"),
    ("log.report", "false"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = random.Random(0)
    words = ["sun", "moon", "rises", "sets", "over", "the", "quiet", "sea"]
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        line = " ".join(generator.choice(words) for _ in range(60))
        (folder / f"{number}.txt").write_text(line + ".\n")
    return folder


@pytest.fixture
def config(text: Path, tmp_path: Path) -> TrainConfig:
    result = TrainConfig()
    for name, value in [*SMALL, ("data.train", str(text)), ("output", str(tmp_path / "run"))]:
        result = override(result, name, value)
    return result


def read_losses(folder: Path) -> list[float]:
    return [record.loss for record in read_metrics(folder)]


def test_a_run_leaves_everything_behind(config):
    result = train(config)
    folder = Path(config.output)
    assert result.is_finished and result.steps == 6 and result.skipped == 0
    assert read_result(folder) == result
    assert read_losses(folder)[-1] == result.loss < read_losses(folder)[0]
    assert result.bits_per_byte and result.validation_loss
    names = {path.name for path in folder.iterdir()}
    expected = {
        "config.toml",
        "metrics.jsonl",
        "receipt.json",
        "tokenizer",
        "checkpoints",
        "export",
    }
    assert expected <= names
    assert read_config(folder / "config.toml") == resolve(config)
    assert json.loads((folder / "receipt.json").read_text())["is_finished"]
    sample = write_sample(Path(result.export), resolve(replace(config, device="cpu")))
    assert sample.startswith("The")


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_run_that_stops_goes_on_with_the_same_losses(
    config, deterministic, tmp_path, monkeypatch
):
    config = replace(config, deterministic=deterministic)
    train(replace(config, output=str(tmp_path / "whole")))
    poll, calls = trainer_file.StopRequest.poll, []

    def stop_after_three(self: trainer_file.StopRequest) -> bool:
        calls.append(1)
        return len(calls) == 4 or poll(self)

    monkeypatch.setattr(trainer_file.StopRequest, "poll", stop_after_three)
    first = train(config)
    assert not first.is_finished and first.steps == 4 and first.export is None
    monkeypatch.undo()
    second = train(config)
    assert second.is_finished
    whole, resumed = read_losses(tmp_path / "whole"), read_losses(Path(config.output))
    assert whole == resumed if deterministic else whole == pytest.approx(resumed, rel=1e-5)


def test_a_finished_run_has_no_step_left(config):
    first = train(config)
    again = train(config)
    assert again.is_finished and again.steps == 6
    assert again == first == read_result(Path(config.output))
    (Path(config.output) / "result.json").unlink()  # as if it was killed while it wrote the export
    assert train(config) == first == read_result(Path(config.output))


def test_a_tokenizer_that_is_removed_in_between_is_exported(config, monkeypatch):
    def run(self: Trainer, folder: Path) -> bool:
        shutil.rmtree(folder / "tokenizer")
        return True

    monkeypatch.setattr(Trainer, "run", run)
    result = train(config)
    assert (Path(result.export) / "tokenizer.json").is_file()


def test_text_that_is_read_too_often_is_said(config, monkeypatch, capsys):
    monkeypatch.setattr(Trainer, "run", lambda self, folder: False)
    train(override(config, "steps", "10"))
    assert "times" not in capsys.readouterr().err
    train(override(config, "steps", "4000"))
    assert "is read 1" in capsys.readouterr().err


def test_ranks_that_share_weights_do_not_name_the_cause_alone(config):
    trainer = Trainer(build_parts(resolve(config)))
    assert trainer._runs_alone()
    trainer.layout = SimpleNamespace(world_size=2)
    assert trainer._runs_alone()
    for name in ("data_shard", "expert"):
        trainer.config = override(config, f"parallel.{name}", "2")
        assert not trainer._runs_alone()


def test_the_vocabulary_of_a_new_model(config):
    larger = resolve(override(config, "model.fields.vocab_size", "512"))
    assert build_parts(larger).built.model.config.vocab_size == 512
    with pytest.raises(ArgumentError, match="model.fields.vocab_size=99, but the tokenizer has"):
        build_parts(resolve(override(config, "model.fields.vocab_size", "99")))


def test_verify_replays_a_run(config):
    train(replace(config, deterministic=True))
    report = verify_run(config.output, replay=replay, hash_data=hash_data, steps=2, seed=0)
    assert report.has_passed, report.describe()


def test_skipped_steps_are_named_and_limited(config, capsys):
    config = replace(config, log=replace(config.log, max_nonfinite=2))
    parts = build_parts(resolve(config))
    trainer = Trainer(parts)
    with torch.no_grad():
        parts.model.layers[0].attention.q_proj.weight[0, 0] = math.nan
    with pytest.raises(NonFiniteError) as error:
        trainer.run(Path(config.output))
    assert trainer.skipped == 3
    assert "the weight layers.0.attention.q_proj.weight is not finite" in str(error.value)
    assert "checkpoint" not in str(error.value)  # there is none yet


def run_with_skips(config: TrainConfig, skipped: set[int]) -> Trainer:
    """Run a trainer whose steps (from 1) are not finite where `skipped` says so."""
    trainer = Trainer(build_parts(resolve(config)))
    run_step = trainer.run_step

    def skip_some(step: int, batches: Any) -> Any:
        result = run_step(step, batches)
        if step + 1 not in skipped:
            return result
        return replace(result, loss=math.nan, is_skipped=True)

    trainer.run_step = skip_some  # type: ignore[assignment]
    trainer.run(Path(config.output or ""))
    return trainer


def test_weights_without_a_finite_loss_replace_no_checkpoint(config):
    config = replace(config, checkpoint=replace(config.checkpoint, every=1, keep=2))
    config = replace(config, log=replace(config.log, max_nonfinite=2))
    with pytest.raises(NonFiniteError, match="the last checkpoint is whole"):
        run_with_skips(config, {3, 4, 5})
    folder = Path(config.output) / "checkpoints"
    assert [step for step, _ in list_checkpoints(folder)] == [1, 2]


def test_a_save_waits_for_a_finite_step(config):
    config = replace(config, steps=8, checkpoint=replace(config.checkpoint, every=3, keep=9))
    run_with_skips(config, {3, 6, 7, 8})
    folder = Path(config.output) / "checkpoints"
    assert [step for step, _ in list_checkpoints(folder)] == [4, 8]


def test_the_op_is_named_once_in_a_row(config, monkeypatch, caplog):
    named = []
    monkeypatch.setattr(trainer_file, "name_nonfinite", lambda *a: named.append(a) or "an op")
    trainer = run_with_skips(config, {2, 3, 5})
    assert trainer.skipped == 3 and len(named) == 2
    texts = [record.getMessage() for record in caplog.records]
    told = [text.partition("skipped: ")[2] for text in texts if "skipped: " in text]
    assert told == ["an op", "as the step before", "an op"]


def test_the_compiled_step_is_explained(config):
    log = replace(config.log, explain=True)
    train(replace(config, steps=2, compile=True, log=log))
    folder = Path(config.output)
    text = (folder / "explain.txt").read_text()
    assert "backward" in text and "linear_cross_entropy" in text
    assert "Compiled step" in write_report(folder).read_text()
    with pytest.raises(ArgumentError, match="needs compile = true"):
        train(replace(config, log=log))


def test_state_of_a_trainer_loads_into_another(config, tmp_path):
    parts = build_parts(resolve(config))
    trainer = Trainer(parts)
    trainer.run(Path(config.output))
    other = Trainer(build_parts(resolve(replace(config, seed=1))))
    with CheckpointManager(tmp_path / "checkpoints") as manager:
        manager.save(trainer.step, trainer.state_dict(), wait=True)
        other.load(manager, manager.latest())
    assert other.step == 6
    for name, parameter in parts.model.named_parameters():
        assert torch.equal(parameter, other.parts.model.get_parameter(name)), name


def test_errors_come_before_the_first_step(config):
    for name, value, message in (
        ("data.sequence_length", "5000", "max_position|positions"),
        ("optimizer.name", "adam", "is not known"),
        ("precision.matmul", "fp8_rowwise", "needs compile = true"),
        ("batch_size", "5", "multiple of"),
    ):
        broken = override(config, name, value)
        if name == "data.sequence_length":
            broken = override(broken, "model.fields.max_position_embeddings", "64")
        with pytest.raises(ArgumentError, match=message):
            train(broken)
