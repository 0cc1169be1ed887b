"""Runs the tests of Triton kernels in Triton's interpreter, in a process of its own.

The interpreter is slow: every tenth test of a file runs by default, all with `-m slow`.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from tests.forked import run_pytest

FILES = sorted(str(path) for path in Path(__file__).parent.rglob("test_triton_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="these tests run on the GPU")
@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES, ids=lambda path: Path(path).stem)
def test_file_in_the_interpreter(file, every):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process is interpreted already")
    result = run_pytest("-x", file, TRITON_INTERPRET="1", TEST_EVERY=str(every))
    assert result.returncode == 0, result.output[-3000:]
