"""The kernel as machine code for an H200, compiled without a GPU: one exponential a logit and pass."""

from __future__ import annotations

import os

import pytest
import torch

from fulgurite.fuser.lowering import has_triton
from fulgurite.kernels.cross_entropy import triton_cross_entropy
from fulgurite.kernels.cross_entropy.args import CrossEntropyArgs

pytestmark = pytest.mark.skipif(
    not has_triton() or "TRITON_INTERPRET" in os.environ, reason="needs Triton's compiler"
)


@pytest.mark.parametrize(("size", "exponentials"), [(50_304, 36), (50_257, 50)])
def test_exponentials(size: int, exponentials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has 16 logits: two groups of 8 in a pass, or single ones where rows are not aligned."""
    from tests.kernels.compile_support import compile_launches  # needs Triton

    (kernel,) = compile_launches(triton_cross_entropy, monkeypatch)
    logits, labels = torch.zeros(2, size).bfloat16(), torch.zeros(2, dtype=torch.int64)
    triton_cross_entropy.cross_entropy_rows(logits, labels, CrossEntropyArgs())
    ptx = kernel.kernels[0].asm["ptx"]
    assert ptx.count("ex2.approx") <= exponentials + 16, "and those that combine the lanes"
    assert ("ld.global.v4" in ptx) == (size % 8 == 0)
