"""The Triton kernels' tests in Triton's interpreter, which must be chosen before triton is imported.

The interpreter is slow: every third test of a file by default, all of them with `-m slow`.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FILES = sorted(str(path) for path in Path(__file__).parent.glob("test_triton_*.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(torch.cuda.is_available(), reason="these tests run on the GPU here")
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", FILES, ids=lambda path: Path(path).stem)
def test_in_the_interpreter(file, every):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process runs them itself")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", file]
    environment = os.environ | {"TRITON_INTERPRET": "1", "TEST_EVERY": str(every)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
