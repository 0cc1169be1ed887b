"""Float32 matmuls of training graphs: ours where measured faster, and left alone where not."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite.kernels.conv import cpu
from fulgurite.kernels.conv.matmul import matmul, reference
from fulgurite.transforms import matmuls, measured

TIMES = {"torch": 2.0, "fulgurite": 1.0}


@pytest.fixture
def faster(monkeypatch, tmp_path):
    """Timings in which our kernel is twice as fast; none is stored."""
    timings = []

    def timed(comparison):
        timings.append(comparison.operands)
        return TIMES

    monkeypatch.setattr(measured, "time_calls", timed)
    monkeypatch.setattr(measured, "read_decision", lambda *_: None)
    monkeypatch.setattr(measured, "write_decision", lambda *_: None)
    return timings


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("transposed", ["neither", "a", "b", "both"])
@pytest.mark.parametrize("sizes", [(1, 5, 7), (65, 70, 130), (130, 64, 48), (17, 1, 16)])
def test_matmul(sizes, transposed, bias):
    rows, depth, columns = sizes
    a, b = torch.randn(rows, depth), torch.randn(depth, columns)
    a = a.t().contiguous().t() if transposed in ("a", "both") else a
    b = b.t().contiguous().t() if transposed in ("b", "both") else b
    row = torch.randn(columns) if bias else None
    expected = a.double() @ b.double() + (0 if row is None else row.double())
    for result in (matmul(a, b, row), reference(a, b, row)):
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    assert cpu.matmul(a.bfloat16(), b.bfloat16(), row) is NotImplemented


def test_slices_and_rows_that_are_repeated():
    a, b = torch.randn(40, 100)[:, 3:53], torch.randn(1, 64).expand(50, 64)
    torch.testing.assert_close(matmul(a, b, None), a @ b, rtol=1e-5, atol=1e-4)
    torch.library.opcheck(matmul.overload, (a, b.contiguous(), None))


def train(function, module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    function(x).square().mean().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def test_a_training_step_uses_the_faster_matmul(faster):
    module = nn.Sequential(nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 100))
    x, exact = torch.randn(64, 96), copy.deepcopy(module).double()
    compiled = fulgurite.compile(module, autotune="auto")
    for _ in range(2):
        results = train(compiled, module, x)
    for ours, true in zip(results, train(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-6)
    assert str(compiled.last_trace("forward")).count(".matmul(") == 2
    assert str(compiled.last_trace("backward")).count(".matmul(") == 4
    assert "Python" not in str(compiled.explain()).split("host program")[1].splitlines()[0][30:]
    assert faster


def test_slower_or_small_matmuls_stay_with_torch(faster):
    module = nn.Sequential(nn.Linear(96, 160), nn.ReLU(), nn.Linear(160, 100))
    with mock.patch.dict(TIMES, {"fulgurite": 1.9}):
        compiled = fulgurite.compile(module, autotune="auto")
        compiled(torch.randn(64, 96)).sum().backward()
    assert ".matmul(" not in str(compiled.last_trace("backward"))
    faster.clear()
    fulgurite.compile(module, autotune="auto")(torch.randn(8, 96)).sum().backward()
    assert all(rows[0][0][0] >= matmuls.MIN_ROWS for rows in faster), "gradients of weights only"


def test_nothing_is_timed_without_autotuning_or_in_inference(faster):
    module = nn.Linear(160, 160)
    fulgurite.compile(nn.Sequential(module, nn.ReLU()), autotune=False)(torch.randn(64, 160))
    with torch.no_grad():
        fulgurite.compile(nn.Sequential(module, nn.ReLU()), autotune="auto")(torch.randn(64, 160))
    assert not faster


def test_timing_runs_both_kernels():
    layouts = ((32, 48), (48, 1)), ((48, 64), (1, 48)), ((64,), (1,))
    comparison = measured.Comparison(
        "matmul", layouts, (), lambda a, b, bias: torch.addmm(bias, a, b), cpu.matmul
    )
    seconds = measured.time_calls(comparison)
    assert seconds is None or seconds.keys() == {"torch", "fulgurite"}
