"""`fulgurite train` on the command line."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from fulgurite.cli import main
from fulgurite.errors import ArgumentError
from fulgurite.train.command import (
    choose_output,
    create_output,
    next_commands,
    refit_microbatch,
    split_arguments,
)
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


def test_lists_take_all_words_that_a_shell_expands():
    words = ["--data.train", "a.md", "b,c.md", "run.toml", "--data.train", "x", "--seed", "3"]
    known, pairs = split_arguments(words)
    assert known == ["run.toml"]
    assert pairs == [("data.train", '["a.md", "b,c.md"]'), ("data.train", "x"), ("seed", "3")]


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
        (["--tune.reference", "none"], "use one of precomputed, live"),
        (["--tune.method", "lora"], "--model.init_from CHECKPOINT"),
        (["--compile", "maybe"], "--compile maybe is not true or false"),
        (["--ranks", "0"], "--ranks 1 or more"),
        (["--log.profile", "3"], "write steps as A:B"),
        (["--model.fields.hidden_sizee", "64"], "did you mean model.fields.hidden_size?"),
        (["--output", "file/run"], "the run can't be written to file/run"),
        (["--output", "foreign"], "foreign has a folder 'export' already"),
        (["--resume", "run", "--size", "tiny"], "can't change a run that is resumed"),
        (["--resume", "run", "--output", "other"], "can't change a run that is resumed"),
    ],
)
def test_errors_end_with_advice(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "foreign" / "export").mkdir(parents=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    assert main(["train", *words]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choose_output(TrainConfig()).output == "runs/nano-001"
    (tmp_path / "runs" / "nano-001").mkdir(parents=True)
    assert choose_output(TrainConfig()).output == "runs/nano-002"
    assert choose_output(TrainConfig(output="here")).output == "here"


def test_a_new_run_leaves_no_tokenizer_of_an_earlier_one(tmp_path):
    config = TrainConfig(output=str(tmp_path / "run"))
    create_output(config, is_new=True)
    tokenizer = tmp_path / "run" / "tokenizer"
    tokenizer.mkdir()
    create_output(config, is_new=True)
    assert tokenizer.exists()  # no run made it
    (tmp_path / "run" / ".tokenizer.lock").touch()
    create_output(config, is_new=False)
    assert tokenizer.exists()
    create_output(config, is_new=True)
    assert not tokenizer.exists()


def test_a_run_goes_on_with_more_ranks():
    config = TrainConfig(batch_size=8, microbatch_size=4)
    assert refit_microbatch(config, 2).microbatch_size == 4
    assert refit_microbatch(config, 4).microbatch_size is None
    fixed = TrainConfig(batch_size=8, microbatch_size=4, deterministic=True)
    assert refit_microbatch(fixed, 4) == fixed


def test_commands_for_the_model():
    result = RunResult("runs/x", 5, True, export="runs/x/export")
    plain = next_commands(TrainConfig(), result)
    assert plain[0] == 'fulgurite generate --raw --model runs/x/export "The"'
    chat = next_commands(TrainConfig(model=ModelSection(init_from="smollm2")), result)
    assert chat == ["fulgurite chat --model runs/x/export"]
    quoted = next_commands(TrainConfig(), RunResult("my run", 1, True, export="my run/export"))
    assert quoted[-1] == "fulgurite chat --model 'my run/export'"


def test_a_run_without_export_and_sample_has_a_report(text, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    fields = [word for name, value in SMALL for word in (f"--{name}", value)]
    words = ["train", *fields, "--steps", "1", "--data.train", str(text), "--log.report"]
    assert main([*words, "--output", "plain", "--checkpoint.export", "false"]) == 0
    assert Path("plain/report.html").is_file() and not Path("plain/export").exists()
    assert main([*words, "--output", "mute", "--evaluate.sample", ""]) == 0
    assert "fulgurite generate" in capsys.readouterr().out


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
    config = Path("run/config.toml").read_bytes()
    for change in (["--steps", "7"], ["--steps", "9", "--optimizer.name", "adamw"]):
        assert main(["train", "--resume", "run", *change]) == 1
        assert Path("run/config.toml").read_bytes() == config  # the run can still go on
    assert "is of another model or optimizer" in capsys.readouterr().err
    assert main(["generate", "--raw", "--model", "run/export", "--max-tokens", "4", "sun"]) == 0
    assert main(["verify", "run", "--steps", "1", "--seed", "0"]) == 0
    assert "verified" in capsys.readouterr().out
