"""`ServerConfig`: a TOML file and options in, a checked config out; errors name the setting."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.serve import serve_command
from fulgurite.serve.http.config import Limits, ServerConfig, load_config


def parse(*words: str) -> ServerConfig:
    parser = argparse.ArgumentParser()
    serve_command.add_options(parser)
    return serve_command.read_config(parser.parse_args(words))


def test_defaults_listen_on_this_machine_only():
    config = parse()
    assert config.host == "127.0.0.1" and config.port == 8000
    assert config.allow_origins == () and not config.allow_request_template and not config.faults
    assert config.model_names == ("smollm2",) and config.limits == Limits()


def test_file_and_options(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text(
        'port = 9000\nmax_waiting = 7\napi_keys = ["a", "b"]\n'
        "[engine]\ncontext = 512\nmax_sequences = 4\n[limits]\nchoices = 2\nwrite_seconds = 5\n"
    )
    config = parse("--config", str(file), "--port", "1234", "--context", "256")
    assert (config.port, config.max_waiting, config.api_keys) == (1234, 7, ("a", "b"))
    assert config.engine == {"context": 256, "max_sequences": 4}
    assert config.limits.choices == 2 and config.limits.write_seconds == 5
    assert config.limits.body_bytes == Limits().body_bytes


def test_keys_of_the_command_line_replace_those_of_the_file(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_text('api_keys = ["old"]\n')
    assert parse("--config", str(file), "--api-key", "x", "--api-key", "y").api_keys == ("x", "y")


def test_replicas():
    assert parse("--data", "3").replicas == 3
    config = parse("--data", "2", "--expert", "2")
    assert config.replicas == 1 and config.engine == {"data": 2, "expert": 2}


BAD: list[dict[str, Any]] = [
    {"port": 70_000},
    {"port": -1},
    {"replicas": 0},
    {"replicas": 2, "prefill_replicas": 2},
    {"max_waiting": -1},
    {"routing": "random"},
    {"engine_in": "cloud"},
    {"api_keys": ("",)},
    {"engine": {"no_such_field": 1}},
    {"stall_seconds": 0.9},  # below two heartbeats
    {"stall_seconds": float("nan")},
    {"stall_timeout": 0.9},
    {"stall_timeout": -1.0},
    {"deadline": -4.0},
    {"deadline": float("nan")},
    {"threads": 0},
    {"max_tokens": 0},
    {"drain_seconds": -1.0},
    {"drain_seconds": float("inf")},
    {"engine": {"max_sequences": "a"}},
    {"engine": {"context": True}},
    {"engine": {"dtype": 5}},
]


@pytest.mark.parametrize("fields", BAD, ids=str)
def test_values_that_are_not_allowed(fields):
    with pytest.raises(ArgumentError):
        ServerConfig(**fields)


BAD_FILES = [
    "port = ",
    'port = "80"',
    "port = true",
    "nothing = 1",
    "[limits]\nnothing = 1",
    "[limits]\nchoices = 1.5",
    "limits = 3",
    'api_keys = "abc"',
    "api_keys = [1]",
    "[engine]\nnothing = 1",
    "deadline = 'soon'",
    "engine = 5",
    "[engine]\nmax_sequences = 'many'",
    "[limits]\nbody_bytes = -3",
    "[limits]\nread_seconds = nan",
    "mock_options = 3",
]


@pytest.mark.parametrize("text", BAD_FILES)
def test_files_that_are_wrong(tmp_path, text):
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ArgumentError) as error:
        load_config(file, {})
    name = text.splitlines()[-1].partition(" ")[0]
    assert name in str(error.value) or "TOML" in str(error.value)


def test_file_that_is_no_text(tmp_path):
    file = tmp_path / "serve.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match="not TOML"):
        load_config(file, {})


def test_types_of_engine_settings():
    engine = {"dtype": "float32", "device": "cpu", "record_load": "a.json", "timeout": 5}
    assert ServerConfig(engine={**engine, "context": None}).engine["timeout"] == 5


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ArgumentError, match="can't be read"):
        load_config(tmp_path / "none.toml", {})
    with pytest.raises(ArgumentError, match="can't be read"):
        load_config(tmp_path, {})
