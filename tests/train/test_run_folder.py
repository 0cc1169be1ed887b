"""The lock of a run's folder, and what killed processes left in it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fulgurite.errors import ArgumentError
from fulgurite.train.command import choose_number
from fulgurite.train.config import TrainConfig
from fulgurite.train.run_folder import CONFIG, LOCK, hold_run


def test_a_second_run_in_a_folder_is_refused(tmp_path: Path) -> None:
    with hold_run(tmp_path):
        message = f"in use by another run.*process {os.getpid()}"
        with pytest.raises(ArgumentError, match=message), hold_run(tmp_path):
            pass
    with hold_run(tmp_path):
        pass


def test_the_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with hold_run(tmp_path):
            os.write(writer, b"x")
            signal.pause()
    os.read(reader, 1)
    with pytest.raises(ArgumentError, match=f"process {child} "), hold_run(tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with hold_run(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} ")


def test_the_folder_of_a_run_that_was_killed_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/nano-001")
    (folder / "tokenizer").mkdir(parents=True)
    assert choose_number(TrainConfig()).output == "runs/nano-002"  # no run made it
    with hold_run(folder):
        assert choose_number(TrainConfig()).output == "runs/nano-002"
    assert choose_number(TrainConfig()).output == "runs/nano-001" and not folder.exists()
    folder.mkdir()
    (folder / LOCK).touch()  # another run is about to sign it
    assert choose_number(TrainConfig()).output == "runs/nano-002"
    with hold_run(folder):
        (folder / CONFIG).touch()
    assert choose_number(TrainConfig()).output == "runs/nano-002"


def test_unfinished_files_are_removed_and_no_others(tmp_path: Path) -> None:
    (tmp_path / ".export.partial-x1_y").mkdir()
    (tmp_path / ".export.partial-x1_y" / "model.safetensors").touch()
    (tmp_path / ".tokenizer-a1b2").mkdir()
    (tmp_path / ".config.toml.4711-139").touch()
    kept = ("export", "tokenizer", "config.toml", ".hidden", ".tokenizer.lock", "notes.partial-1")
    for name in kept:
        (tmp_path / name).touch()
    with hold_run(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {*kept, LOCK}
