"""The command line as a person uses it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
import warnings

import pytest

from fulgurite import cli, native
from fulgurite.cli import OPENMP_SPIN_COUNT, Command, main

CODE = """
    import torch

    def scale(x: "f32[4, 8]", y: "bf16[8]"):
        return x * y

    def plain(x):
        return x.sin()

    def plain_inputs():
        return (torch.ones(3),)

    def builds():
        return plain, (torch.ones(2, 2),)

    def lonely(x):
        return x

    def constant():
        return torch.ones(3) + 1

    def optional(x: "f32[3]", factor=2, *more, **others):
        return x * factor

    number = 3

    class Kind(torch.nn.Module):
        pass

    class Halve(torch.nn.Module):
        def forward(self, x, scale=1.0):
            return {"half": x * 0.5 * scale}

    def halve():
        return Halve()

    def halve_inputs():
        return torch.ones(5, 2)  # one tensor, no tuple

    def halve_more():
        return Halve()

    def halve_more_inputs():
        return {"x": torch.ones(6, requires_grad=True), "scale": 3.0}

    def default(x=None):
        return torch.ones(2) if x is None else torch.tan(x)

    def default_inputs():
        return [torch.ones(4)]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name in ("cli_example.py", "pytest.py"):
        (tmp_path / name).write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_explain_without_arguments_shows_the_built_in_transformer(capsys, tmp_path):
    page = tmp_path / "page.html"
    assert main(["explain", "--html", str(page)]) == 0
    out = capsys.readouterr().out
    assert "# forward 0 · final" in out and "self.layers.0.attention" in out
    assert "graph breaks          none" in out and "saved for backward" in out
    assert "eager " in out and "fulgurite " in out
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.usefixtures("torch_only")
@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("cli_example:scale", 'y: "bf16[8]"'),
        ("cli_example.py:scale", "torch.mul(x, y)"),
        ("cli_example:plain", "torch.sin(x)"),
        ("cli_example:builds", 'x: "f32[2, 2]"'),
        ("cli_example:constant", "def forward():"),
        ("cli_example:halve", 'x: "f32[5, 2]"'),
        ("cli_example:halve_more", "  backward "),
        ("cli_example:default", "torch.tan(x)"),
        ("cli_example:optional", 'x: "f32[3]"'),
        ("pytest.py:scale", "torch.mul(x, y)"),  # not the module called pytest
    ],
)
def test_targets(folder, capsys, target, says):
    assert main(["explain", target]) == 0
    assert says in capsys.readouterr().out


@pytest.mark.usefixtures("torch_only")
def test_a_script(folder, capsys):
    (folder / "script.py").write_text(
        "import sys, torch, fulgurite\nf = fulgurite.compile(lambda x: x.cos())\n"
        "g = fulgurite.compile(lambda x: x.tan())\nprint('ran', f(torch.ones(2)), g(torch.ones(2)))\n"
        "print(sys.argv)\n"
    )
    assert main(["explain", "script.py", "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "ran tensor" in out and "torch.cos(x)" in out and "['script.py']" in out
    assert "torch.cos" in (folder / "page.html").read_text()
    assert "torch.tan" in (folder / "page-1.html").read_text()


@pytest.mark.usefixtures("torch_only")
def test_a_file_with_dots_in_its_name(folder, capsys):
    (folder / "one.two.py").write_text((folder / "cli_example.py").read_text())
    assert main(["explain", "one.two.py:plain"]) == 0
    assert "torch.sin" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["explain", "cli_example:missing"],
            "one of builds, constant, default, default_inputs, halve, halve_inputs",
        ),
        (["explain", "cli_example:lonely"], "lonely_inputs"),
        (["explain", "torch:sin"], "no example inputs for torch:sin"),
        (["explain", "no_such_module:f"], "can't be imported"),
        (["explain", "missing.py"], "no file missing.py"),
        (["explain", "--executors", "magic"], "'torch', 'fuser', 'inductor'"),
        (["explain", "cli_example"], "module:name"),
        (["explain", "cli_example:number"], "has no callable"),
        (["explain", "cli_example:Kind"], "is a class"),
        (["bench", "fusions", "--device", "nowhere"], "'nowhere' is not a device"),
        (["explain", "cli_example:plain", "--html", "cli_example.py/x.html"], "can't be written"),
    ],
)
def test_mistakes_are_answered_in_words(folder, capsys, words, says):
    assert main(words) == 1
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_warnings_are_words(folder, capsys, monkeypatch):
    monkeypatch.setattr(
        native, "find_compiler", lambda: warnings.warn("no compiler here", stacklevel=2)
    )
    assert main(["explain", "cli_example:plain", "--no-trace"]) == 0
    assert "warning: no compiler here\n" in capsys.readouterr().err


def test_a_variable_that_is_no_number(folder, capsys, monkeypatch):
    monkeypatch.setenv("FULGURITE_NUM_THREADS", "many")
    assert main(["explain", "cli_example:plain"]) == 1
    assert "ArgumentError: FULGURITE_NUM_THREADS=many must be" in capsys.readouterr().err


def test_no_command_shows_the_help(capsys):
    assert main([]) == 2
    assert "generate" in capsys.readouterr().out


def test_help_lists_commands_and_variables(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "explain" in out and "bench" in out and "FULGURITE_CACHE_DIR" in out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, OPENMP_SPIN_COUNT),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "active"}, None),
    ],
)
def test_openmp_threads_spin_as_the_user_says(monkeypatch, capsys, given, expected):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main([]) == 2  # prints help
    assert os.environ.get("GOMP_SPINCOUNT") == expected


WITHOUT_EXTRAS = """
import sys

OPTIONAL = {
    "gguf", "httptools", "huggingface_hub", "llguidance", "msgspec", "prometheus_client", "pyarrow",
    "ray", "starlette", "tensorboard", "timm", "torchvision", "transformers", "uvicorn", "uvloop",
}

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in OPTIONAL:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from fulgurite.cli import main

for command in %r:
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
"""


def test_commands_start_without_optional_packages():
    """`fulgurite bench` on a machine without the extra `serve`, and so on."""
    commands = [
        "bench",
        "chat",
        "env",
        "explain",
        "embed",
        "generate",
        "plan",
        "quantize",
        "serve",
        "top",
        "train",
        "verify",
    ]
    program = [sys.executable, "-c", WITHOUT_EXTRAS % commands]
    outcome = subprocess.run(program, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


NEED_EXTRAS = {
    "serve": "starlette, uvicorn, uvloop, httptools, msgspec, prometheus_client",
    "serve --ray": "starlette",
    "top": "prometheus_client",
    "top --once": "prometheus_client",
    "bench serve --mock": "httptools",
}


@pytest.mark.parametrize("words", NEED_EXTRAS)
def test_commands_that_need_an_extra_say_which(words):
    code = WITHOUT_EXTRAS.partition("for command")[0] + f"sys.exit(main({words.split()}))"
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    what, next = outcome.stderr.splitlines()
    assert outcome.returncode == 1
    assert what.startswith("ArgumentError: ") and NEED_EXTRAS[words] in what
    assert next.split() == ["next", "pip", "install", "'fulgurite[serve]'"]


def test_a_storage_that_refuses_a_file_is_no_traceback(monkeypatch, capsys):
    def refuse(options: object) -> None:
        raise OSError(errno.EFBIG, "File too large", "out/model.safetensors")

    monkeypatch.setitem(cli.COMMANDS, "env", Command("", lambda: (lambda parser: None, refuse)))
    assert main(["env"]) == 1
    expected = "the output can't be written: File too large (out/model.safetensors)"
    assert expected in capsys.readouterr().err


def test_a_suite_takes_its_own_options_only(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "host", "--clients", "3"])  # an option of `bench serve`
    assert "unrecognized arguments: --clients 3" in capsys.readouterr().err
