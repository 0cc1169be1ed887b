"""Kernel modules without Triton: importable, and a launch raises a clear error."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import importlib, pkgutil
import torch
import fulgurite.kernels
from fulgurite.errors import CompileError
from fulgurite.kernels.common.triton_import import HAS_TRITON

assert not HAS_TRITON
packages = pkgutil.walk_packages(fulgurite.kernels.__path__, "fulgurite.kernels.")
names = [module.name for module in packages]
for name in names:
    importlib.import_module(name)
assert len(names) > 60, names
from fulgurite.kernels.elementwise import triton_elementwise
try:
    triton_elementwise.elementwise_binary(torch.ones(2, 3), torch.ones(2, 3), "add")
except CompileError as error:
    assert "binary_kernel can't run: Triton is not installed" in str(error), error
else:
    raise AssertionError("a launch without Triton")
from fulgurite.kernels.elementwise.ops import add
with torch.no_grad():
    assert add(torch.ones(3), torch.ones(3)).tolist() == [2, 2, 2]
"""


def test_kernels_without_triton():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
