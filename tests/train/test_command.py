"""`fulgurite train` on the command line."""

from __future__ import annotations

import signal
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from fulgurite.cli import main
from fulgurite.errors import ArgumentError, RankError
from fulgurite.train import command
from fulgurite.train.checks import check_run
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
from fulgurite.train.setup import resolve
from fulgurite.train.stop import StopRequest
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
        (["--log.profile", "900:901"], "begins after the 800 steps"),
        (["--output", ""], "output is an empty text"),
        (["--model.init_from="], "model.init_from is an empty text"),
        (["--log.wandb"], "pip install wandb"),
        (["--model.architecture", "qwen3"], "did you mean Qwen3ForCausalLM?"),
        (["--model.fields.num_experts", "4"], "did you mean model.fields.n_routed_experts?"),
        (["--model.fields.hidden_size", "wide"], "hidden_size must be of type int"),
        (
            ["--model.fields.num_key_value_heads", "3"],
            "must be a multiple of num_key_value_heads=3",
        ),
        (["--model.init_from", "nowhere"], "model 'nowhere' not found"),
        (["--data.tokenizer", "nowhere"], "model 'nowhere' not found"),
        (["--data.train", "nowhere"], "no files to read at 'nowhere'"),
        (["--data.validation", "nowhere"], "no files to read at 'nowhere'"),
        (["--data.vocab_size", "100"], "set it to at least 260"),
        (["--data.sequence_length", "99", "--model.fields.max_position_embeddings", "9"], "most 9"),
        (
            ["--batch_size", "7", "--microbatch_size", "2"],
            "must be a multiple of microbatch_size 2",
        ),
        (["--ranks", "2", "--parallel.pipeline", "9"], "but there are 2"),
        (["--ranks", "3", "--parallel.tensor", "3"], "4 attention heads don't divide"),
        (["--ranks", "2", "--parallel.tensor", "2", "--deterministic"], "deterministic=true with"),
        (["--precision.matmul", "mxfp8", "--compile", "false"], "needs compile = true"),
        (["--tune.task", "dpo"], "demo has no records"),
        (["--tune.task", "chat", "--data.train", "a.jsonl"], "without a tokenizer"),
        (["--loss.balance", "bias", "--model.architecture", "MixtralForCausalLM"], "use 'aux'"),
        (["--loss.balance", "aux", "--model.architecture", "LlamaForCausalLM"], "has no experts"),
        (["broken.py"], "broken.py raised SyntaxError"),
        (["raises.py"], "raises.py:2"),
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
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "broken.py").write_text("config = (\n")
    (tmp_path / "raises.py").write_text("steps = 3\nraise RuntimeError('no config')\n")
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", *words]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before, "an error made or removed files"


def test_fields_that_nothing_reads_are_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    fields = {"attention_dropout": 0.1, "rope_parameters": {"rope_theta": 5e3}, "use_cache": True}
    config = replace(TrainConfig(device="cpu"), model=ModelSection(fields=fields))
    check_run(resolve(config, 1), 1)
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings == [
        "model.fields.attention_dropout has no effect: Dots1ForCausalLM does not read it"
    ]


def test_a_drill_is_checked_before_it_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--drill", "--model.fields.hidden_size", "0"]) == 1
    assert "hidden_size=0 must be at least 1" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_runs_are_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choose_output(TrainConfig()).output == "runs/nano-001"
    (tmp_path / "runs" / "nano-001").mkdir(parents=True)
    assert choose_output(TrainConfig()).output == "runs/nano-002"
    assert choose_output(TrainConfig(output="here")).output == "here"


def test_two_runs_that_chose_one_number_get_two(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = choose_output(TrainConfig())
    (tmp_path / "runs" / "nano-001").mkdir(parents=True)  # the other one was quicker
    with create_output(config, is_new=True, is_numbered=True) as moved:
        assert moved.output == "runs/nano-002"


@pytest.mark.parametrize("error", [ArgumentError, RankError])
@pytest.mark.parametrize(("has_step", "is_kept"), [(False, False), (True, True)])
def test_an_error_before_the_first_step_leaves_no_folder(tmp_path, has_step, is_kept, error):
    """Such as a reward that raises, in this process or in a rank."""
    folder = tmp_path / "run"
    with pytest.raises(error), create_output(TrainConfig(output=str(folder)), is_new=True):
        (folder / "config.toml").touch()
        if has_step:
            (folder / "metrics.jsonl").write_text('{"step": 0, "time": 1.0, "loss": 2.0}\n')
        raise error("the reward raised")
    assert folder.exists() == is_kept


def test_a_run_without_its_config_is_kept(tmp_path):
    """Somebody has moved it away while the run went on."""
    folder = tmp_path / "run"
    with create_output(TrainConfig(output=str(folder)), is_new=True):
        (folder / "checkpoints" / "step-000002").mkdir(parents=True)
    assert (folder / "checkpoints" / "step-000002").is_dir()


def test_a_signal_is_the_exit_status_of_one_rank_too(text, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(StopRequest, "poll", lambda self: True)
    fields = [word for name, value in SMALL for word in (f"--{name}", value)]
    with pytest.raises(SystemExit) as end:
        main(["train", *fields, "--data.train", str(text), "--output", "run"])
    assert end.value.code == 128 + signal.SIGTERM
    assert (
        "stopped after step 1; go on with\n  fulgurite train --resume run"
        in capsys.readouterr().out
    )
    assert main(["train", "--resume", "run", "--data.vocab_size", "999"]) == 1
    assert "can't change a run that is resumed" in capsys.readouterr().err


def test_a_new_run_leaves_no_tokenizer_of_an_earlier_one(tmp_path):
    config = TrainConfig(output=str(tmp_path / "run"))
    tokenizer = tmp_path / "run" / "tokenizer"
    tokenizer.mkdir(parents=True)
    with create_output(config, is_new=True):
        assert tokenizer.exists()  # no run made it
    (tmp_path / "run" / ".tokenizer.lock").touch()
    with create_output(config, is_new=False):
        assert tokenizer.exists()
    with create_output(config, is_new=True):
        assert not tokenizer.exists()


@pytest.mark.parametrize("options", [["--ranks", "1"], ["--ranks", "2"], ["--drill"]])
def test_a_run_that_does_not_begin_leaves_no_folder(options, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("short.txt").write_text("hi")
    words = ["train", "--data.train", "short.txt", "--steps", "1", *options]
    try:
        assert main(words) == 1
    except SystemExit as end:  # of ranks
        assert end.code == 1
    assert "too few to train on" in "".join(capfd.readouterr())
    assert not list(Path("runs").iterdir())


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


def test_a_sample_that_fails_is_no_failure_of_the_run(text, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A prompt beyond the context of the model: found out when the engine reads it."""
    monkeypatch.chdir(tmp_path)
    fields = [word for name, value in SMALL for word in (f"--{name}", value)]
    words = ["train", *fields, "--steps", "1", "--data.train", str(text), "--log.report", "true"]
    assert main([*words, "--output", "run", "--evaluate.sample", "sea " * 2000]) == 0
    shown = capsys.readouterr()
    assert "warning: there is no sample: " in shown.err and "may have 1024" in shown.err
    assert "report: run/report.html" in shown.out and "fulgurite chat" in shown.out


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


@pytest.mark.parametrize("rank", ["0", "1"])
def test_rank_0_of_a_launcher_shows_the_summary(rank, text, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(command, "train", lambda config: RunResult("run", 3, False, loss=2.5))
    assert main(["train", "--data.train", str(text), "--output", "run"]) == 0
    shown = "loss 2.500" in capsys.readouterr().out
    assert shown == (rank == "0")
