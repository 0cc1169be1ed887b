"""Regions that can't be built or launched run with another schedule or with torch, and say so."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import fulgurite
from fulgurite import fuser, native
from fulgurite.errors import CompileError, FallbackWarning, FusionError
from fulgurite.executors import fuser as fuser_executor
from fulgurite.executors.fallback import GuardedRegion, InputForm, is_error_of_device
from fulgurite.fuser.ir.errors import KernelBuildError


@pytest.fixture(autouse=True)
def _not_strict(monkeypatch):
    monkeypatch.delenv("FULGURITE_STRICT")
    monkeypatch.setattr(fuser_executor.FUSER, "_lowered", type(fuser_executor.FUSER._lowered)())


@pytest.fixture
def failing_compiler(monkeypatch):
    """The C++ compiler rejects everything: found when a region is first called."""

    def build(source):
        raise CompileError("the C++ compiler rejected a generated kernel", where="error: no")

    monkeypatch.setattr(native, "build", build)
    monkeypatch.setattr(native, "_loaded", {})


@pytest.fixture
def failing_lowering(monkeypatch):
    def lower(module, **options):
        raise AssertionError("a bug in the fuser")

    monkeypatch.setattr(fuser, "lower_region", lower)


def fallback_warnings(caught):
    return [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]


def test_a_compiler_error_at_the_first_call_falls_back(failing_compiler):
    compiled = fulgurite.compile(lambda x: torch.softmax(x * 3, -1) + 1)
    x = torch.randn(7, 13)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.testing.assert_close(compiled(x), torch.softmax(x * 3, -1) + 1)
    (message,) = fallback_warnings(caught)
    assert "softmax" in message and "the C++ compiler rejected a generated kernel" in message
    script = re.search(r"repro +(\S+)", message)[1]
    assert "torch.softmax" in Path(script).read_text()
    assert "fallback: torch" in str(compiled.last_trace())
    explained = str(compiled.explain())
    assert "failed              softmax_0: torch (the C++ compiler rejected" in explained
    assert f"repro: {script}" in explained


def test_a_failure_while_lowering_falls_back(failing_lowering):
    compiled = fulgurite.compile(lambda x: torch.relu(x + 1) * 2)
    x = torch.randn(5, 3)
    with pytest.warns(FallbackWarning, match="AssertionError: a bug in the fuser"):
        torch.testing.assert_close(compiled(x), torch.relu(x + 1) * 2)
    assert "# torch   120 B   fallback: the executor 'fuser' failed" in str(compiled.last_trace())


def test_strict_mode_raises(failing_lowering, monkeypatch):
    monkeypatch.setenv("FULGURITE_STRICT", "1")
    with pytest.raises(CompileError, match="a bug in the fuser") as raised:
        fulgurite.compile(lambda x: x + 1)(torch.randn(4))
    assert "repro" in raised.value.details


def test_strict_mode_raises_at_the_first_call(failing_compiler, monkeypatch):
    monkeypatch.setenv("FULGURITE_STRICT", "1")
    with pytest.raises(CompileError, match="rejected") as raised:
        fulgurite.compile(lambda x: x + 1)(torch.randn(4))
    assert "repro" in raised.value.details


def test_fuse_raises(failing_lowering):
    with pytest.raises(CompileError, match="a bug in the fuser"):
        fulgurite.fuse(lambda x: x + 1)(torch.randn(4))
    with pytest.raises(FusionError):
        fulgurite.fuse(lambda x: torch.linalg.svd(x)[0])(torch.randn(4, 4))


def test_writes_to_inputs_survive_a_fallback(failing_compiler):
    def update(x, total):
        total.mul_(2).add_(x.sum(0))
        return total * 3

    compiled = fulgurite.compile(update)
    x, total = torch.randn(6, 4), torch.randn(4)
    expected_total = total.clone()
    for _ in range(3):
        expected = update(x, expected_total)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            torch.testing.assert_close(compiled(x, total), expected)
        torch.testing.assert_close(total, expected_total)


def test_donated_buffers_survive_a_fallback(failing_compiler):
    a, b = torch.randn(700, 64), torch.randn(64, 700)
    compiled = fulgurite.compile(lambda a, b: torch.relu(a @ b) * 2 + 1)
    with pytest.warns(FallbackWarning):
        torch.testing.assert_close(compiled(a, b), torch.relu(a @ b) * 2 + 1)
    torch.testing.assert_close(compiled(a, b), torch.relu(a @ b) * 2 + 1)


def test_backward_falls_back(failing_lowering):
    compiled = fulgurite.compile(lambda x: (torch.tanh(x) * x).sum())
    x = torch.randn(9, requires_grad=True)
    with pytest.warns(FallbackWarning):
        compiled(x).backward()
    reference = x.detach().clone().requires_grad_()
    (torch.tanh(reference) * reference).sum().backward()
    torch.testing.assert_close(x.grad, reference.grad)


def test_an_op_that_can_not_be_claimed_runs_with_torch(monkeypatch):
    original = fuser.can_fuse

    def can_fuse(node):
        if "sin" in str(node.target):
            raise KeyError("unforeseen form")
        return original(node)

    monkeypatch.setattr(fuser, "can_fuse", can_fuse)
    compiled = fulgurite.compile(lambda x: torch.exp(torch.sin(x + 1)) * 2)
    x = torch.randn(8)
    with pytest.warns(FallbackWarning, match=r"claiming aten.sin.default failed: KeyError"):
        torch.testing.assert_close(compiled(x), torch.exp(torch.sin(x + 1)) * 2)
    text = str(compiled.last_trace())
    assert "torch.sin" in text and text.count("fulgurite.region") == 2


def test_an_index_out_of_range_is_the_programs_own_error():
    compiled = fulgurite.compile(lambda x, i: x[i] * 2 + 1)
    compiled(torch.randn(4, 3), torch.tensor([1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with pytest.raises(IndexError, match="out of (range|bounds)"):
            compiled(torch.randn(4, 3), torch.tensor([1, 9]))
        x = torch.randn(4, 3)
        torch.testing.assert_close(compiled(x, torch.tensor([0, 3])), x[[0, 3]] * 2 + 1)


def test_users_executor_raises():
    class Broken(fulgurite.Executor):
        name = "broken"

        def __init__(self, where):
            self.where = where

        def claims(self, node):
            if self.where == "claims":
                raise KeyError("mine")
            return True

        def lower(self, region):
            raise KeyError("mine")

    for where in ("claims", "lower"):
        compiled = fulgurite.compile(lambda x: x + 1, executors=[Broken(where), "fuser", "torch"])
        with pytest.raises(CompileError, match="KeyError: 'mine'"):
            compiled(torch.randn(3))


def test_dynamic_sizes_after_a_fallback(failing_compiler):
    compiled = fulgurite.compile(lambda x: torch.softmax(x, -1) * x.shape[0], dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for rows in (3, 5, 8):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(compiled(x), torch.softmax(x, -1) * rows)


def test_a_model_trains_without_a_working_compiler(failing_compiler):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
    reference = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2))
    reference.load_state_dict(model.state_dict())
    compiled = fulgurite.compile(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        for _ in range(2):
            x = torch.randn(16, 4)
            compiled(x).square().sum().backward()
            reference(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model[1].running_mean, reference[1].running_mean)


# ---- the ladder of one region ----------------------------------------------------------------------


class Lowered:
    """A lowered region that fails, with so many other schedules that fail too."""

    def __init__(self, error, more=0, intact=True):
        self.error, self.more, self.intact = error, more, intact
        self.kernels = ("k",)

    def __call__(self, x):
        if self.error is not None:
            raise self.error
        return (x + 1,)

    def can_rerun(self, error):
        return self.intact

    def next_schedule(self, error):
        if not self.more:
            return None
        return Lowered(self.error if self.more > 1 else None, self.more - 1, self.intact)


def guard(lowered, reports):
    return GuardedRegion(
        "r", lowered, lambda: lambda x: (x + 10,), lambda e: CompileError(str(e)), reports.append
    )


def test_the_next_schedule_that_works_runs():
    reports = []
    region = guard(Lowered(KernelBuildError("k", ValueError("too large")), more=3), reports)
    assert [region(1), region(2)] == [(2,), (3,)]
    assert [f.instead for f in reports] == ["another schedule"]
    assert region.kernels == ("k",) and region.fallback is not None


def test_torch_runs_when_no_schedule_is_left():
    reports = []
    region = guard(Lowered(KernelBuildError("k", ValueError("too large"))), reports)
    assert [region(1), region(2)] == [(11,), (12,)]
    assert [f.instead for f in reports] == ["torch"] and "too large" in reports[0].reason
    assert region.cached_launch is None


@pytest.mark.parametrize("value", [torch.ones(2, 1), torch.ones(3, 1, dtype=torch.bfloat16)])
def test_torch_runs_on_inputs_of_another_form(value):
    """An op before the region may return other sizes, or another dtype, than its FakeTensor rule."""
    form = InputForm((3, None), torch.float32)
    reports = []
    region = GuardedRegion(
        "r",
        Lowered(None, more=1),
        lambda: lambda x: (x + 10,),
        lambda e: CompileError(str(e)),
        reports.append,
        forms=[form],
    )
    assert torch.equal(region(value)[0], value + 10)
    assert [f.instead for f in reports] == ["torch"]
    assert f"{value.dtype} of the sizes {tuple(value.shape)}" in reports[0].reason
    region = GuardedRegion("r", Lowered(None), None, None, None, forms=[form])
    assert region(torch.ones(3, 5))[0].sum() == 30


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        torch.OutOfMemoryError("no memory"),
    ],
)
def test_errors_of_the_device_are_raised(error):
    reports = []
    region = guard(Lowered(error, more=1), reports)
    assert is_error_of_device(error)
    with pytest.raises(type(error)):
        region(1)
    assert not reports


def test_a_launch_error_is_recoverable():
    assert not is_error_of_device(RuntimeError("Triton Error [CUDA]: invalid argument"))


def test_a_region_that_has_written_raises():
    reports = []
    with pytest.raises(ValueError, match="late"):
        guard(Lowered(ValueError("late"), more=1, intact=False), reports)(1)
    assert not reports


def test_an_error_that_torch_raises_too_is_the_programs_own():
    reports = []
    region = guard(Lowered(ValueError("ours")), reports)

    def torch_call(x):
        raise IndexError("torch's own")

    region._make_torch_call = lambda: torch_call
    for _ in range(2):
        with pytest.raises(IndexError, match="torch's own"):
            region(1)
    assert not reports and not region.runs_torch


def test_a_bound_launch_follows_the_switch():
    """The function that a trace has bound runs what the region switched to."""
    reports, calls = [], []
    lowered = Lowered(None, more=1)
    region = guard(lowered, reports)

    def launch(x):
        calls.append(x)
        if x > 2:
            raise KernelBuildError("k", ValueError("another variant"))
        return (x + 1,)

    lowered.cached_launch = launch
    bound = region.cached_launch
    assert bound(1) == (2,) and bound(2) == (3,)
    assert bound(3) == (4,) and reports[0].instead == "another schedule"
    assert bound(4) == (5,) and calls == [1, 2, 3]
