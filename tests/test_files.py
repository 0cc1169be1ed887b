"""Files that are written: whole or not at all, with the mode of `open`."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fulgurite.files import write_atomically
from fulgurite.quant.files.safetensors_io import save_quantized
from fulgurite.train.export_files import FolderWriter


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def expected_mode(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_the_umask_decides_who_reads_a_file(tmp_path: Path, expected_mode: int) -> None:
    tensors = {"weight": torch.zeros(2, 2)}
    write_atomically(tmp_path / "new" / "text", "text")
    save_quantized(tensors, tmp_path / "packed.safetensors")
    with FolderWriter(tmp_path / "export") as writer:
        writer.write_weights("model.safetensors", tensors)
        writer.finish({}, None)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {expected_mode}


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["text"]
