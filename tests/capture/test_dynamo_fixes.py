"""Programs that eager mode runs and TorchDynamo refuses, or gets wrong."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fulgurite
from fulgurite.errors import FallbackWarning, OpError

OFFSETS = torch.tensor([16, 16, 40, 64], dtype=torch.int32)


def make_inputs(dtype: torch.dtype = torch.float32):
    torch.manual_seed(0)
    return torch.randn(64, 16).to(dtype), torch.randn(4, 16, 8).to(dtype)


def experts(x, weight):
    """torch's FakeTensor rule of this op takes bfloat16 only."""
    return F.grouped_mm(x.sin(), weight, offs=OFFSETS).relu()


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")


@pytest.mark.usefixtures("lenient")
def test_a_refused_op_runs_between_two_graphs():
    compiled = fulgurite.compile(experts)
    inputs = make_inputs()
    with pytest.warns(FallbackWarning, match=r"could not be captured(.|\n)*grouped_mm"):
        torch.testing.assert_close(compiled(*inputs), experts(*inputs))
    assert len(compiled.graphs) == 2
    assert "fake tensor call" in str(compiled.explain())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(compiled(*inputs), experts(*inputs))
        other = make_inputs(torch.bfloat16)  # captured whole
        torch.testing.assert_close(compiled(*other), experts(*other))
    assert len(compiled.graphs) == 3


def test_strict_mode_raises():
    with pytest.raises(OpError, match="BF16"):
        fulgurite.compile(experts)(*make_inputs())


@pytest.mark.usefixtures("lenient")
def test_fullgraph_raises():
    with pytest.raises(OpError, match="BF16"):
        fulgurite.compile(experts, fullgraph=True)(*make_inputs())


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_later_parts_of_a_call():
    def function(x, weight):
        x.add_(1)
        torch._dynamo.graph_break()
        return experts(x, weight)

    x, weight = make_inputs()
    expected = experts(x + 1, weight)
    torch.testing.assert_close(fulgurite.compile(function)(x, weight), expected)


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_an_op_that_fails_raises_its_own_error():
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"\(2x3 and 2x3\)"):
        fulgurite.compile(lambda x: x @ x)(x)


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore::fulgurite.errors.FallbackWarning")
def test_powers_of_negative_numbers():
    def f(x, a):
        return x * a + a**2

    compiled, x = fulgurite.compile(f), torch.randn(3)
    for a in (0.5, 0.25, -1.0, 3.0, -2.5):
        torch.testing.assert_close(compiled(x, a), f(x, a))


INTEGERS = [(1, 2), (3, 4), (5, 1), (2, 5), (-3, 7), (5, 5), (0, 0), (4, 9)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n, m: x + (1 if 5 in (n, m) else 2),
        lambda x, n, m: x + (1 if n in [m, 4, 0] else 2),
        lambda x, n, m: x + (1 if n not in range(m) else 2),
        lambda x, n, m: x + (n, m, 5).count(5) + [n, m, 5].index(5),
        lambda x, n, m: x + (1 if 5 in {1: n, 2: m}.values() else 2),
    ],
)
def test_symbols_in_containers(function):
    compiled, x = fulgurite.compile(function), torch.randn(3)
    for n, m in INTEGERS:
        torch.testing.assert_close(compiled(x, n, m), function(x, n, m))


def test_layers_chosen_by_an_argument():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

        def forward(self, x, skip):
            for index, layer in enumerate(self.layers):
                if index not in skip:
                    x = x + layer(x)
            return x

    model, x = Model(), torch.randn(2, 4)
    compiled = fulgurite.compile(model)
    for skip in ((), (1,), (0, 4), (2, 3), (1, 2), ()):
        torch.testing.assert_close(compiled(x, skip), model(x, skip))
