"""Config files and overrides: round trips, types, and errors that help."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.config import DataSection, ModelSection, OptimizerSection, TrainConfig
from fulgurite.train.config_file import (
    check_choices,
    from_mapping,
    is_boolean,
    list_fields,
    load_config,
    override,
    to_toml,
)
from fulgurite.train.sizes import SIZES, resolve_sizes

ODD = replace(
    TrainConfig(output='a "b"\\c\n\x7fü😀', device="cpu", steps=3),
    data=DataSection(train=("x, y.txt", "ü/*.md"), validation=()),
    optimizer=OptimizerSection(learning_rate=1e-30, betas=(0.0, 0.999999)),
    model=ModelSection(
        fields={"a b": None, "rope": {"factor": 8.0, "kinds": ["x", None]}, "on": True, "n": 2**40}
    ),
)


@pytest.mark.parametrize("config", [TrainConfig(), ODD], ids=["defaults", "odd"])
def test_toml_reads_back_as_the_same_config(config):
    assert from_mapping(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize("size", SIZES)
def test_resolved_configs_read_back(size, tmp_path):
    for architecture in ("Dots1ForCausalLM", "DeepseekV3ForCausalLM", "PhimoeForCausalLM"):
        section = ModelSection(architecture=architecture)
        config = resolve_sizes(replace(TrainConfig(size=size, device="cpu"), model=section))
        path = tmp_path / "run.toml"
        path.write_text(to_toml(config))
        assert load_config(path) == config


def test_every_kind_of_override():
    pairs = [
        ("steps", "12"),
        ("compile", "false"),
        ("deterministic", "Yes"),
        ("optimizer.learning_rate", "3e-4"),
        ("optimizer.betas", "0.8, 0.9"),
        ("data.train", "[a.txt, 'b c.md']"),
        ("data.validation", "v.txt"),
        ("model.fields.hidden_size", "96"),
        ("model.fields.rope_parameters", '{"rope_type": "linear", "factor": 2.0}'),
        ("model.fields.kind", "some text"),
        ("output", "runs/x"),
        ("device", "none"),
    ]
    config = load_config(None, pairs)
    assert config.steps == 12 and config.compile is False and config.deterministic is True
    assert config.optimizer.learning_rate == 3e-4 and config.optimizer.betas == (0.8, 0.9)
    assert config.data.train == ("a.txt", "b c.md") and config.data.validation == ("v.txt",)
    assert config.model.fields == {
        "hidden_size": 96,
        "rope_parameters": {"rope_type": "linear", "factor": 2.0},
        "kind": "some text",
    }
    assert config.output == "runs/x" and config.device is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("optimizer.lr", "1", "did you mean optimizer.learning_rate"),
        ("learning_rate", "1", "did you mean optimizer.learning_rate"),
        ("optimiser.learning_rate", "1", "did you mean optimizer.learning_rate"),
        ("optimizer.learning_rat", "1", "did you mean optimizer.learning_rate"),
        ("tune.color", "1", r"\[tune\] has method, task"),
        ("steps", "many", "--steps many is not an integer"),
        ("steps", "1.5", "is not an integer"),
        ("compile", "maybe", "is not true or false"),
        ("optimizer.betas", "0.9", "is not a list of 2 numbers"),
        ("optimizer.learning_rate", "fast", "is not a number"),
        ("optimizer", "adamw", "--optimizer is a section"),
        ("steps.x", "1", "steps has no fields"),
        ("model.fields", "3", "set its parts: --model.fields.NAME"),
        ("output", "runs/\udcff", "is not UTF-8"),
    ],
)
def test_errors_of_overrides(name, text, message):
    with pytest.raises(ArgumentError) as error:
        override(TrainConfig(), name, text)
    assert re.search(message, str(error.value)), str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": "3"}, "steps = '3' is not an integer"),
        ({"steps": True}, "steps = True is not an integer"),
        ({"compile": 1}, "compile = 1 is not true or false"),
        ({"optimizer": 3}, "optimizer is a section"),
        ({"optimizer": {"betas": [0.9]}}, "is not a list of 2 numbers"),
        ({"data": {"train": 3}}, "is not a list of texts"),
        ({"optimizer": {"learning_rate": "3e-4"}}, "is not a number"),
    ],
)
def test_errors_of_files(values, message):
    with pytest.raises(ArgumentError, match=message) as error:
        from_mapping(values, "run.toml")
    assert "run.toml" in str(error.value)


def test_nested_fields_have_dotted_names():
    config = override(TrainConfig(), "model.fields.rope_parameters.rope_theta", "5000")
    config = override(config, "model.fields.rope_parameters.rope_type", "default")
    rope = {"rope_theta": 5000, "rope_type": "default"}
    assert config.model.fields == {"rope_parameters": rope}


def test_a_byte_order_mark_is_left_out(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbfsteps = 5\r\n")
    assert load_config(path).steps == 5


def test_a_number_may_be_written_as_an_integer():
    config = from_mapping({"optimizer": {"learning_rate": 1}, "data": {"train": "a.txt"}})
    assert config.optimizer.learning_rate == 1.0 and config.data.train == ("a.txt",)


def test_python_files(tmp_path):
    path = tmp_path / "run.py"
    path.write_text(
        "from fulgurite.train.config import TrainConfig\nconfig = TrainConfig(steps=5)\n"
    )
    assert load_config(path).steps == 5
    path.write_text(
        "from fulgurite.train.config import TrainConfig\n"
        "def config():\n    return TrainConfig(steps=6)\n"
    )
    assert load_config(path, [("seed", "3")]) == TrainConfig(steps=6, seed=3)
    path.write_text("settings = 3\n")
    with pytest.raises(ArgumentError, match="defines no config"):
        load_config(path)


def test_files_that_are_none(tmp_path):
    with pytest.raises(ArgumentError, match="there is no config file"):
        load_config(tmp_path / "missing.toml")
    (tmp_path / "run.yaml").write_text("a: 1")
    with pytest.raises(ArgumentError, match="ends in .toml or .py"):
        load_config(tmp_path / "run.yaml")
    (tmp_path / "run.toml").write_text("a = [1")
    with pytest.raises(ArgumentError, match="can't be parsed"):
        load_config(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="can't be parsed"):
        load_config(tmp_path / "run.toml")


def test_python_files_have_the_types_of_fields(tmp_path):
    path = tmp_path / "run.py"
    start = "from fulgurite.train.config import DataSection, TrainConfig\n"
    path.write_text(start + "config = TrainConfig(data=DataSection(train='notes/'))\n")
    assert load_config(path).data.train == ("notes/",)
    path.write_text(start + "config = TrainConfig(steps='5')\n")
    with pytest.raises(ArgumentError, match="steps = '5' is not an integer"):
        load_config(path)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a,b", ("a", "b")),
        ("(a, 'b')", ("a", "b")),
        ("docs (copy)", ("docs (copy)",)),
        ("[ab]*.txt", ("[ab]*.txt",)),
        ("part[0-9]", ("part[0-9]",)),
        ('["a,b.md", "c"]', ("a,b.md", "c")),
        ("", ()),
    ],
)
def test_brackets_of_paths_stay(text, parts):
    assert override(TrainConfig(), "data.train", text).data.train == parts


def test_choices_are_checked_before_any_work():
    check_choices(TrainConfig())
    with pytest.raises(ArgumentError, match="optimizer.name = 'adam' is not known") as error:
        check_choices(replace(TrainConfig(), optimizer=OptimizerSection(name="adam")))
    assert "did you mean adamw?" in str(error.value)


def test_fields_have_dotted_names():
    names = list_fields()
    assert "optimizer.learning_rate" in names and "steps" in names and "optimizer" not in names
    assert is_boolean("deterministic") and is_boolean("log.live")
    assert not is_boolean("steps") and not is_boolean("nothing.at.all")
