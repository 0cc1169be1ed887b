"""Instrumentation: `find_nonfinite`, profiler ranges, `TimeOps`."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fulgurite
from fulgurite.errors import NonFiniteError
from fulgurite.transforms import annotate, find_nonfinite

pytestmark = pytest.mark.usefixtures("torch_only")


def produces_nan(x):
    y = x - 2
    z = torch.log(y)  # the culprit
    return (z * 0).sum()


def test_first_op_that_produced_nan_is_named():
    f = fulgurite.compile(produces_nan, transforms=[find_nonfinite])
    assert f(torch.full((3,), 4.0)) == 0
    with pytest.raises(NonFiniteError) as caught:
        f(torch.full((3,), 1.0))
    assert "log" in caught.value.what and "NaN (3 of 3 values)" in caught.value.what
    assert "the culprit" in caught.value.details["where"]
    assert "from -1 to -1" in caught.value.details["input"]


def test_infinities_are_found_but_masks_are_not():
    f = fulgurite.compile(lambda x: 1 / x, transforms=[find_nonfinite])
    with pytest.raises(NonFiniteError, match="reciprocal.*an infinity"):
        f(torch.zeros(2))

    def masked(x, keep):
        return x.masked_fill(~keep, -torch.inf).softmax(-1)

    g = fulgurite.compile(masked, transforms=[find_nonfinite])
    keep = torch.tensor([[True, False], [True, True]])
    assert torch.equal(g(torch.ones(2, 2), keep), masked(torch.ones(2, 2), keep))
    with pytest.raises(NonFiniteError, match="softmax"):
        g(torch.ones(2, 2), torch.zeros(2, 2, dtype=torch.bool))


def test_a_mask_that_a_fused_region_computes_is_no_finding():
    def attend(places, x):
        hidden = places[:, None] < places
        bias = torch.zeros(64, 64).masked_fill(hidden, float("-inf"))
        return torch.softmax(x @ x + bias, -1), bias

    compiled = fulgurite.compile(attend, transforms=[find_nonfinite])
    assert compiled(torch.arange(64), torch.ones(64, 64))[1].isinf().any()
    with pytest.raises(NonFiniteError, match="mm.default produced an infinity"):
        compiled(torch.arange(64), torch.full((64, 64), 1e30))


def test_nan_in_backward_is_found():
    f = fulgurite.compile(lambda x: x.sqrt().sum(), transforms=[find_nonfinite])
    x = torch.zeros(2, requires_grad=True)
    with pytest.raises(NonFiniteError, match="backward|div|mul"):
        f(x).backward()


def test_profiler_ranges_by_module_path():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    f = fulgurite.compile(model, transforms=[annotate])
    x = torch.randn(2, 4)
    assert torch.equal(f(x), model(x))
    with torch.profiler.profile() as profile:
        f(x).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"forward self.0", "forward self.2"} <= names
    assert any(name.startswith("backward self.") for name in names)


def test_time_ops_table():
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64))
    times = fulgurite.TimeOps()
    f = fulgurite.compile(model, transforms=[times.transform])
    x = torch.randn(256, 64)
    for _ in range(3):
        assert torch.allclose(f(x), model(x))
    f(x).sum().backward()
    rows = [row for row in times.rows if row.calls]
    assert {row.calls for row in rows if row.graph == "forward 0"} == {4}
    text = str(times)
    assert "addmm" in text and "backward 0" in text and "self.0" in text
    times.clear()
    assert str(times).count("\n") == 0


def test_instrumented_stages_round_trip():
    times = fulgurite.TimeOps()
    f = fulgurite.compile(
        lambda x: (x + 1).exp(), transforms=[find_nonfinite, annotate, times.transform]
    )
    x = torch.randn(3)
    expected = f(x)
    for trace in f.history:
        torch.testing.assert_close(trace.load()(x)[0], expected)


def test_find_nonfinite_with_tuple_items_and_fp8():
    def f(x):
        return F.layer_norm(x, (4,)), x.to(torch.float8_e4m3fn).to(torch.float32)

    compiled = fulgurite.compile(f, transforms=[find_nonfinite])
    compiled(torch.randn(2, 4))
    compiled(torch.full((2, 4), math.nan))  # a NaN of the input raises nothing

    def g(x):
        return torch.var_mean(x / x)

    with pytest.raises(NonFiniteError, match="div"):
        fulgurite.compile(g, transforms=[find_nonfinite])(torch.zeros(4))
