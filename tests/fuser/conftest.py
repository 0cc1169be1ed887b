"""Runs the fuser's tests for C++ kernels, and again for Triton kernels.

pytest tests/fuser                                C++
TRITON_INTERPRET=1 pytest tests/fuser             Triton on CPU tensors, in its interpreter
pytest -m gpu tests/fuser                         Triton on a GPU

A test module opts in to the Triton runs with `RUNS_ON_TRITON = True`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.fuser import support

# Tests that only hold for C++ kernels, with the reason to skip them for Triton.
NOT_TRITON = {
    "test_row_longer_than_the_cache_is_split": "rows of a GPU kernel may be longer",
    "test_gather_out_of_range_raises": "a GPU kernel traps on a device-side assert, like torch's",
    "test_integer_division": "a division by zero on a GPU does not raise, in torch either",
    "test_negative_indices": "a GPU kernel traps on a device-side assert, like torch's",
}


def targets() -> list[object]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ["triton"]
    if torch.cuda.is_available():
        return ["cpp", pytest.param("cuda", marks=pytest.mark.gpu)]
    return ["cpp"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if getattr(metafunc.module, "RUNS_ON_TRITON", False):
        metafunc.parametrize("target", targets(), indirect=True)


@pytest.fixture(autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[None]:
    """Selects the kernels that `support.check_fused` generates in this test."""
    kind = getattr(request, "param", "cpp")
    name = getattr(request.node, "originalname", request.node.name)
    if kind != "cpp" and name in NOT_TRITON:
        pytest.skip(NOT_TRITON[name])
    if kind == "triton":
        _patch_triton_interpreter()
    support.TARGET = kind
    yield
    support.TARGET = "cpp"


def _patch_triton_interpreter() -> None:
    from tests.fuser import triton_interpreter

    triton_interpreter.patch()
