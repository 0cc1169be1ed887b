"""Where Triton kernels run in tests: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).

TRITON_INTERPRET=1 pytest tests/kernels        kernels on CPU tensors, in the interpreter
pytest tests/kernels                           kernels on a GPU; without one, test_interpreted.py
                                               runs these files in the interpreter
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
CAN_RUN = importlib.util.find_spec("triton") and (INTERPRETED or torch.cuda.is_available())
if not CAN_RUN:
    pytest.skip("needs a GPU, or TRITON_INTERPRET=1", allow_module_level=True)


def on_device(*tensors: Tensor) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in tensors]


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, message: str = "") -> None:
    """Equal on a GPU. The interpreter multiplies by numpy, whose sums depend on the sizes of a tile."""
    if not INTERPRETED:
        assert torch.equal(actual, expected), message
    else:
        tolerance = min(2**-7, 4 * max(torch.finfo(actual.dtype).eps, 2**-18))
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
