"""The commands on terminals as they are: narrow, without Unicode, interrupted, closed, full."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fulgurite.cli import main
from fulgurite.serve.engine.engine import Engine
from tests.serve.tiny_checkpoint import save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("small"))


def generate(folder: Path, *words: str, prompt: str = "hello") -> int:
    return main(["generate", prompt, "--model", str(folder), "--max-tokens", "30", *words])


def stream(encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def written(file: io.TextIOWrapper) -> str:
    file.flush()
    return file.buffer.getvalue().decode(file.encoding)  # type: ignore[attr-defined]


def test_a_stream_without_unicode(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = stream("ascii"), stream("ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    assert generate(folder, prompt="h\u00e9llo") == 0
    assert "?" in written(out) and "tokens/s" in written(err)
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0 and "q8_0" in written(out)


def test_invalid_utf8_prompt_raises(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    assert generate(folder, prompt="a\udcff") == 1  # how Python gives a byte of the command line
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff"), encoding="utf-8"))
    assert main(["generate", "--model", str(folder)]) == 1
    error = capsys.readouterr().err
    assert error.count("is not valid Unicode") == 2 and error.count("from UTF-8") == 2


@pytest.mark.parametrize("width", [30, 40, 60])
def test_bars_on_a_narrow_terminal(
    folder: Path, width: int, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert generate(folder) == 0
    loading, compiling, *rest = capsys.readouterr().err.splitlines()
    assert loading.startswith("loading") and compiling.startswith("compiling")
    assert loading.rstrip().endswith(" s") and compiling.rstrip().endswith(" s")
    assert max(len(loading), len(compiling)) <= width and rest[0] == ""


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Interrupts as in a terminal: a process in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("step", [0, 1, 4])
def test_ctrl_c_ends_a_reply_with_its_status(
    folder: Path, step: int, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first step of a long prompt, between two of its pieces, and while it writes."""
    run, steps = Engine.step, []

    def press(engine: Engine):
        if len(engine.requests) and engine.requests[next(iter(engine.requests))].prompt_length > 9:
            if len(steps) == step:
                os.kill(os.getpid(), signal.SIGINT)
            steps.append(step)
        return run(engine)

    monkeypatch.setattr(Engine, "step", press)
    assert generate(folder, prompt="word " * 20) == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "interrupted" and " MB" in err.splitlines()[-2]
    assert len(steps) == step + 1 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert out.endswith("\n")


def test_ctrl_c_before_the_first_token_drops_the_message(
    folder: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines, asked, run = iter(["first", "second"]), [], Engine.step

    def read(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    def press(engine: Engine):
        for request in engine.requests.values():
            if request.prompt_length > 9 and request.length == request.prompt_length:
                asked.append(
                    bytes(engine.tokenizer.decode(request.tokens[: request.length]), "utf8")
                )
                if len(asked) == 1:
                    engine.cancel(request.id)
                    return []
        return run(engine)

    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(Engine, "step", press)
    assert main(["chat", "--model", str(folder), "--max-tokens", "3"]) == 0
    assert b"first" in asked[0] and b"first" not in asked[1] and b"second" in asked[1]


def test_a_full_disk(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert generate(folder) == 1
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.close()
    assert "the output can't be written: No space left" in capsys.readouterr().err


def test_closed_streams(folder: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert generate(folder) == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", "--model", str(folder)]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--threads", "1000000"], "--threads 1000000 must be 1 to"),
        (["--tensor", "0"], "tensor=0 must be 1 or more"),
        (["--expert", "0"], "expert=0"),
        (["--model", ""], "model '' not found"),
    ],
)
def test_more_invalid_options_give_clear_errors(
    folder: Path, capsys, words: list[str], says: str
) -> None:
    assert generate(folder, *words) == 1
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_profile_writes_a_trace(folder: Path, tmp_path: Path, capsys) -> None:
    file = tmp_path / "trace.json"
    assert generate(folder, "--profile", str(file)) == 0
    assert "profile written to" in capsys.readouterr().err
    names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
    assert any(str(name).endswith(": decode 1") for name in names)
    assert generate(folder, "--profile", "/proc/nothing/trace.json") == 1
    assert "can't write the profile" in capsys.readouterr().err
