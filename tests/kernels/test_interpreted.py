"""The Triton kernels' tests in Triton's interpreter, which must be chosen before triton is imported."""

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
@pytest.mark.parametrize("file", FILES, ids=lambda path: Path(path).stem)
def test_in_the_interpreter(file):
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("this process runs them itself")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", file]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
