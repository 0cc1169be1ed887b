"""`fulgurite env`: what a bug report needs."""

from __future__ import annotations

import json

import torch

from fulgurite import environment
from fulgurite.cli import main


def test_env_as_text_and_json(capsys, monkeypatch):
    monkeypatch.setenv("FULGURITE_NUM_THREADS", "1")
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["torch"].startswith(torch.__version__) and found["FULGURITE_NUM_THREADS"] == "1"
    for label in ("fulgurite", "torch", "python", "triton", "compiler", "cpu", "cache"):
        assert label in found and f"\n{label} " in f"\n{text}"


def test_a_broken_compiler_is_described(monkeypatch):
    monkeypatch.setattr(environment.native, "find_compiler", lambda: "/bin/false")
    assert "does not run" in environment.describe()["compiler"]
    monkeypatch.setattr(environment.native, "find_compiler", lambda: None)
    assert environment.describe()["compiler"] == "none"
