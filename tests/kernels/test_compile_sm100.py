"""Compiles the hand-written kernels for sm_100 (Blackwell), in a process of its own.

The files are those that compile for sm_90; TEST_ARCH names the target. Every 24th test of a file
runs by default, all with `-m slow`. No kernel was ever run on such a GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.forked import run_pytest

FILES = sorted(str(path) for path in Path(__file__).parent.rglob("test_compile.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES, ids=lambda path: Path(path).parent.name)
def test_file_compiles_for_sm100(file, every):
    variables = {"TEST_ARCH": "100", "TEST_EVERY": str(every), "TRITON_INTERPRET": "0"}
    result = run_pytest("-x", "-m", "not gpu", file, **variables)
    assert result.returncode == 0, result.output[-3000:]
