"""The command line as a person uses it."""

from __future__ import annotations

import textwrap

import pytest

from fulgurite.cli import main

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
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "cli_example.py").write_text(textwrap.dedent(CODE))
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


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("cli_example:scale", 'y: "bf16[8]"'),
        ("cli_example.py:scale", "torch.mul(x, y)"),
        ("cli_example:plain", "torch.sin(x)"),
        ("cli_example:builds", 'x: "f32[2, 2]"'),
    ],
)
def test_targets(folder, capsys, target, says):
    assert main(["explain", target]) == 0
    assert says in capsys.readouterr().out


def test_a_script(folder, capsys):
    (folder / "script.py").write_text(
        "import torch, fulgurite\nf = fulgurite.compile(lambda x: x.cos())\nprint('ran', f(torch.ones(2)))\n"
    )
    assert main(["explain", "script.py"]) == 0
    out = capsys.readouterr().out
    assert "ran tensor" in out and "torch.cos(x)" in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["explain", "cli_example:missing"], "one of builds, lonely, plain"),
        (["explain", "cli_example:lonely"], "lonely_inputs"),
        (["explain", "no_such_module:f"], "can't be imported"),
        (["explain", "missing.py"], "no file missing.py"),
        (["explain", "--executors", "magic"], "'torch', 'inductor'"),
    ],
)
def test_mistakes_are_answered_in_words(folder, capsys, words, says):
    assert main(words) == 1
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_help_lists_commands_and_variables(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    assert "explain" in out and "bench" in out and "FULGURITE_CACHE" in out
