"""FULGURITE_LOG prints compile steps, decisions, fallbacks and cache hits, with the rank."""

from __future__ import annotations

import json
import logging
import os

import pytest

from fulgurite import logs
from fulgurite.errors import ArgumentError
from tests.forked import run_program

PROGRAM = (
    "import torch, fulgurite; fulgurite.compile(lambda x: torch.softmax(x, -1))(torch.ones(3, 4))"
)


def run(level, **variables):
    environment = {**os.environ, "FULGURITE_LOG": level, "FULGURITE_AUTOTUNE": "auto", **variables}
    done = run_program(PROGRAM, environment)
    assert done.returncode == 0, done.stderr
    return done


def test_debug_shows_steps_decisions_and_the_cache():
    lines = run("debug", RANK="3").stderr.splitlines()
    assert all("fulgurite[rank 3] " in line for line in lines if "fulgurite" in line)
    for text in ("DEBUG inference 0 · claimed: ", "INFO autotuned softmax_0", "DEBUG cache "):
        assert any(text in line for line in lines), text
    assert any("INFO inference 0: 1 " in line for line in lines)


def test_warning_is_silent_where_nothing_falls_back():
    assert "fulgurite" not in run("WARNING").stderr


def test_an_unknown_level_raises(monkeypatch):
    monkeypatch.setenv("FULGURITE_LOG", "loud")
    with pytest.raises(ArgumentError, match="FULGURITE_LOG=loud is not a level"):
        logs.configure_logging()


def test_without_the_variable_a_program_sees_messages(caplog):
    with caplog.at_level(logging.INFO, logger="fulgurite"):
        logs.LOG.info("a message")
    assert "a message" in caplog.text


def test_json_lines_have_the_fields_of_a_record():
    lines = run("debug", RANK="1", FULGURITE_LOG_FORMAT="json").stderr.splitlines()
    records = [json.loads(line) for line in lines if line.startswith("{")]
    assert records and all(record["rank"] == 1 for record in records)
    assert {"debug", "info"} <= {record["level"] for record in records}
    assert any("autotuned softmax_0" in record["message"] for record in records)


def test_an_unknown_format_raises(monkeypatch):
    monkeypatch.setenv("FULGURITE_LOG", "info")
    monkeypatch.setenv("FULGURITE_LOG_FORMAT", "xml")
    with pytest.raises(ArgumentError, match="FULGURITE_LOG_FORMAT=xml is not a format"):
        logs.configure_logging()
