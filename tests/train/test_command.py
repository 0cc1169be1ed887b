"""`fulgurite train` on the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fulgurite.cli import main
from fulgurite.errors import ArgumentError
from fulgurite.train.command import choose_output, next_commands, split_arguments
from fulgurite.train.config import ModelSection, TrainConfig
from fulgurite.train.config_file import from_mapping
from fulgurite.train.finish import RunResult
from tests.train.test_trainer import SMALL, text  # noqa: F401  # a fixture


def test_fields_are_split_from_options():
    words = [
        "run.toml",
        "--steps",
        "5",
        "--size",
        "tiny",
        "--deterministic",
        "--optimizer.name=muon",
    ]
    known, pairs = split_arguments([*words, "--drill", "--compile", "false", "--ranks=2"])
    assert known == ["run.toml", "--size", "tiny", "--drill", "--ranks=2"]
    assert pairs == [
        ("steps", "5"),
        ("deterministic", "true"),
        ("optimizer.name", "muon"),
        ("compile", "false"),
    ]
    assert split_arguments(["--deterministic", "run.toml"]) == (
        ["run.toml"],
        [("deterministic", "true")],
    )
    assert split_arguments(["--seed", "-3"])[1] == [("seed", "-3")]
    with pytest.raises(ArgumentError, match="--steps has no value"):
        split_arguments(["--steps", "--size", "tiny"])


def test_print_config_round_trips(capsys):
    assert (
        main(["train", "--print-config", "--steps", "9", "--size", "tiny", "--device", "cpu"]) == 0
    )
    config = from_mapping(tomllib.loads(capsys.readouterr().out))
    assert (config.steps, config.size) == (9, "tiny")
    assert config.optimizer.name == "muon" and config.model.architecture == "Dots1ForCausalLM"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--optimizer.lr", "1"], "did you mean optimizer.learning_rate?"),
        (["--size", "giant"], "size='giant' is not known"),
        (["missing.toml"], "there is no config file missing.toml"),
        (["--resume", "nowhere"], "nowhere is no folder of a run"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--tune.task", "chess"], "use one of text, chat, dpo, grpo"),
    ],
)
def test_errors_end_with_advice(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choose_output(TrainConfig()).output == "runs/nano-001"
    (tmp_path / "runs" / "nano-001").mkdir(parents=True)
    assert choose_output(TrainConfig()).output == "runs/nano-002"
    assert choose_output(TrainConfig(output="here")).output == "here"


def test_commands_for_the_model():
    result = RunResult("runs/x", 5, True, export="runs/x/export")
    plain = next_commands(TrainConfig(), result)
    assert plain[0] == 'fulgurite generate --raw --model runs/x/export "The"'
    chat = next_commands(TrainConfig(model=ModelSection(init_from="smollm2")), result)
    assert chat == ["fulgurite chat --model runs/x/export"]


def test_a_run_and_its_continuation(text, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    fields = [word for name, value in SMALL for word in (f"--{name}", value)]
    words = ["train", *fields, "--data.train", str(text), "--output", "run", "--log.report", "true"]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "Dots1ForCausalLM" in shown and "bits/byte" in shown
    assert "\nThe" in shown and "fulgurite generate --raw --model run/export" in shown
    assert Path("run/report.html").is_file()
    assert main(words) == 1
    assert "--resume run goes on with it" in capsys.readouterr().err
    assert main(["train", "--resume", "run", "--steps", "8"]) == 0
    assert "step 8/8" in capsys.readouterr().out
    assert main(["generate", "--raw", "--model", "run/export", "--max-tokens", "4", "sun"]) == 0
    assert main(["verify", "run", "--steps", "1", "--seed", "0"]) == 0
    assert "verified" in capsys.readouterr().out
