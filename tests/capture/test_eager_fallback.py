"""Ops that eager runs and that capture refuses: eager mode runs the call."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.capture.eager_fallback import PACKAGES
from fulgurite.errors import FallbackWarning, OpError

OFFSETS = torch.tensor([16, 16, 40, 64], dtype=torch.int32)


def make_inputs(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return torch.randn(64, 16).to(dtype), torch.randn(4, 16, 8).to(dtype)


def experts(x, weight):
    """torch's FakeTensor rule of this op takes bfloat16 only."""
    return F.grouped_mm(x, weight, offs=OFFSETS).relu()


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")


@pytest.mark.usefixtures("lenient")
def test_eager_runs_what_capture_refuses():
    compiled = fulgurite.compile(experts)
    inputs = make_inputs()
    with pytest.warns(FallbackWarning, match="could not be captured: _grouped_mm"):
        assert torch.equal(compiled(*inputs), experts(*inputs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(*inputs), experts(*inputs))
        other = make_inputs(torch.bfloat16)  # captured as ever
        torch.testing.assert_close(compiled(*other), experts(*other))
    assert len(compiled.graphs) == 1
    assert "capture failed, eager mode runs the function" in str(compiled.explain())


def test_strict_mode_raises():
    with pytest.raises(OpError, match="BF16"):
        fulgurite.compile(experts)(*make_inputs())


@pytest.mark.usefixtures("lenient")
def test_fullgraph_raises():
    with pytest.raises(OpError, match="BF16"):
        fulgurite.compile(experts, fullgraph=True)(*make_inputs())


@pytest.mark.usefixtures("lenient")
def test_nothing_runs_twice():
    """The first part of the function has run when its second part fails to be captured."""

    def function(x, weight):
        x.add_(1)
        torch._dynamo.graph_break()
        return experts(x, weight)

    x, weight = make_inputs()
    expected = x + 1
    with pytest.raises(OpError, match="BF16"):
        fulgurite.compile(function)(x, weight)
    assert torch.equal(x, expected)


@pytest.mark.usefixtures("lenient")
def test_errors_of_the_program_are_raised():
    with pytest.raises(OpError, match="matmul"):
        fulgurite.compile(lambda x: x @ x)(torch.randn(2, 3))


def test_only_our_code_and_torchs_counts_as_capture():
    torch_file, neighbour = (
        f"{PACKAGES[0]}nn/functional.py",
        f"{PACKAGES[0].rstrip('/')}vision/ops.py",
    )
    assert torch_file.startswith(PACKAGES) and not neighbour.startswith(PACKAGES)
