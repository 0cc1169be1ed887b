"""The fuser's tests run for C++ kernels, and again for Triton's: on a GPU, or in Triton's interpreter.

pytest tests/fuser                                C++
TRITON_INTERPRET=1 pytest tests/fuser             Triton on CPU tensors, in its interpreter
pytest -m gpu tests/fuser                         Triton on a GPU
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.fuser import support

MODULES = (
    "test_bits test_dynamic test_normalization test_pointwise test_reductions test_scans test_special "
    "test_views test_writes test_lent test_pooling test_variance test_channels test_long_rows test_complex "
    "test_programs test_single_places test_unrolled"
).split()
# what a test of C++ kernels asks that Triton's do otherwise
NOT_TRITON = {
    "test_long_row_is_cut": "rows of a GPU kernel may be longer",
    "test_gather_out_of_range_is_an_error": "a GPU kernel stops the device, as torch's do",
    "test_integers_by_integers": "a division by zero on a GPU raises nothing, as torch's",
    "test_negative_indices": "a GPU kernel stops the device, as torch's do",
}


def targets() -> list[object]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ["triton"]
    if torch.cuda.is_available():
        return ["cpp", pytest.param("cuda", marks=pytest.mark.gpu)]
    return ["cpp"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rsplit(".", 1)[-1] in MODULES:
        metafunc.parametrize("target", targets(), indirect=True)


@pytest.fixture(autouse=True)
def target(request: pytest.FixtureRequest) -> Iterator[None]:
    """Which kernels `support.fused` generates in this test."""
    kind = getattr(request, "param", "cpp")
    name = getattr(request.node, "originalname", request.node.name)
    if kind != "cpp" and name in NOT_TRITON:
        pytest.skip(NOT_TRITON[name])
    if kind == "triton":
        _patched()
    support.TARGET = kind
    yield
    support.TARGET = "cpp"


def _patched() -> None:
    from tests.fuser import interpreter

    interpreter.patch()
