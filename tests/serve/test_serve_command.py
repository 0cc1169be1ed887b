"""`fulgurite serve` as a process: it starts without torch, and leaves no engine behind."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from fulgurite.bench.serve.processes import list_descendants, read_resident_bytes
from fulgurite.cli import main
from fulgurite.serve import serve_command
from fulgurite.serve.expert_options import add_expert_arguments
from fulgurite.serve.serve_command import ENGINE_FIELDS, SERVER_FIELDS
from tests.waiting import wait_for

# The modules of the HTTP process; the engine's is the last one.
SERVER_MODULES = (
    "fulgurite",
    "fulgurite.cli",
    "fulgurite.models.tokenizer",
    "fulgurite.serve.serve_command",
    "fulgurite.serve.http.engines",
    "fulgurite.serve.http.run",
    "fulgurite.serve.structured.compiler",
    "fulgurite.serve.remote.engine_main",
)
HEAVY = ("torch", "triton", "transformers", "sympy", "safetensors.torch")
MAX_SERVER_BYTES = 250 << 20  # 122 MiB here; with torch it was more than 500


def run_python(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("module", SERVER_MODULES)
def test_modules_of_the_server_import_no_torch(module):
    code = (
        "import importlib, sys\n"
        "importlib.import_module(sys.argv[1])\n"
        "print([name for name in sys.argv[2:] if name in sys.modules])"
    )
    assert run_python(code, module, *HEAVY) == "[]"


def test_help_of_serve_imports_no_torch():
    code = (
        "import sys\nfrom fulgurite.cli import main\n"
        "try:\n    main(['serve', '--help'])\n"
        "except SystemExit:\n    print('torch' in sys.modules)"
    )
    text = run_python(code)
    assert "--transport" in text and text.endswith("False")


def test_every_option_reaches_the_config():
    parser = argparse.ArgumentParser()
    serve_command.add_options(parser)
    known = {*SERVER_FIELDS, *ENGINE_FIELDS, "config", "data", "ray", "help"}
    known |= {*vars(expert_options())}
    assert {action.dest for action in parser._actions} == known
    given = parser.parse_args(["--sampling-defaults", "openai", "--max-waiting", "3"])
    config = serve_command.read_config(given)
    assert (config.sampling_defaults, config.max_waiting) == ("openai", 3)


def expert_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_expert_arguments(parser.add_argument_group())
    return parser.parse_args([])


def has_torch(pid: int) -> bool:
    return "libtorch" in Path(f"/proc/{pid}/maps").read_text()


def test_a_served_mock_engine_needs_no_torch_at_all():
    command = [sys.executable, "-m", "fulgurite", "serve", "--mock", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = [process.stderr.readline() for _ in range(2)]
        assert re.search(r"ready in \d+\.\d s", lines[0]), lines
        (url,) = re.findall(r"http://\S+", lines[1])
        grammar = {"prompt": "a", "max_tokens": 3, "structured_outputs": {"regex": "a+"}}
        for body in ({"prompt": [1, 2], "max_tokens": 3}, grammar):
            request = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps({"model": "smollm2", **body}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 3
        ((engine, _),) = list_descendants(process.pid)
        assert not has_torch(process.pid) and not has_torch(engine)
        assert read_resident_bytes(process.pid) < MAX_SERVER_BYTES
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert not Path(f"/proc/{engine}").exists()


def has_engines() -> bool:
    """Whether an engine is a descendant of this process."""
    found = [Path(f"/proc/{pid}/cmdline") for pid, _ in list_descendants(os.getpid())]
    return any(b"engine_main" in file.read_bytes() for file in found if file.exists())


def test_a_server_that_can_not_listen_ends_its_engines(capsys):
    assert main(["serve", "--mock", "--host", "203.0.113.1", "--port", "1"]) == 1
    assert "can't listen on 203.0.113.1:1" in capsys.readouterr().err
    wait_for(lambda: not has_engines())


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr("fulgurite.serve.serve_command.SERVER_PACKAGES", ("starlette", "no_such"))
    assert main(["serve", "--mock"]) == 1
    error = capsys.readouterr().err
    assert "needs the package no_such" in error and "fulgurite[serve]" in error


def test_a_model_that_does_not_exist_starts_nothing(capsys):
    assert main(["serve", "--model", "/no/such/model"]) == 1
    assert "not found" in capsys.readouterr().err
    wait_for(lambda: not has_engines())
