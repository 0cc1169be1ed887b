"""Launch plans in native code: replayed on the CPU with a launch function that notes its arguments."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="its kernels are launched")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no cached launches", allow_module_level=True)

from fulgurite.determinism import deterministic
from fulgurite.errors import FulguriteError
from fulgurite.host_api import unavailable_reason
from fulgurite.kernels.common import launch_plan, native_plan
from fulgurite.kernels.common.launch_plan import _PlannedFunction
from fulgurite.kernels.moe.router_config import RouterConfig
from fulgurite.kernels.registry import RECORDING

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="no host programs here")

FUNCTION, METADATA, GRID = 4242, (4, 1, 1024), (3, 2)
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int32, ctypes.c_void_p, *[ctypes.c_uint32] * 7, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_void_p,
)  # fmt: skip
TYPES = ("*fp32", "*fp32", "*fp32", "i32", "fp32", "constexpr")


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


class Launcher:
    """Stands for Triton's launcher of a compiled kernel."""

    launch_pdl = False


class Device:
    """Notes native launches; `error` is what they return."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = 0
        self.function = LAUNCH(self.launch)

    @property
    def address(self) -> int:
        return ctypes.cast(self.function, ctypes.c_void_p).value or 0

    def launch(self, function: int, *rest: Any) -> int:
        *numbers, _stream, parameters, _extra = rest
        pointers = (ctypes.c_void_p * 7).from_address(parameters)
        words = [ctypes.c_int64.from_address(p or 0).value for p in pointers]
        number = ctypes.c_float.from_address(pointers[4] or 0).value
        self.calls.append((function, tuple(numbers), (*words[:4], number, *words[5:])))
        return self.error


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(native_plan, "find_launch_function", lambda: made.address)
    monkeypatch.setattr(launch_plan, "_is_on_current_gpu", lambda tensor: True)

    def allocate(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype)

    monkeypatch.setattr(launch_plan, "allocate", allocate)
    monkeypatch.setattr("fulgurite.kernels.common.launch_recorder.allocate", allocate)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    return made


class Operator:
    """An operator of one kernel; counts the calls that run its host code."""

    def __init__(self, launcher: Any = None) -> None:
        self.host_calls = 0
        self.launcher = launcher or Launcher()
        self.call = _PlannedFunction(self.run, (RouterConfig,))

    def run(self, x: Tensor, config: RouterConfig, more: Any = None, *, scale: float = 1.0) -> Pair:
        self.host_calls += 1
        out, hidden = torch.empty(x.shape[0], 2), x.new_empty(40)
        whole = torch.empty(9)
        if RECORDING.recorder is not None:
            tensors = [(0, x), (1, hidden), (2, out)]
            raw = [x.data_ptr(), hidden.data_ptr(), out.data_ptr(), -5, scale, 64]
            tail = (FUNCTION, METADATA, None, None, None)
            RECORDING.recorder.add_launch(self.launcher, GRID, tail, raw, tensors, TYPES)
        return Pair(out, whole[:4])


def warm(operator: Operator, *arguments: Any, **named: Any) -> None:
    """Record the plan, and replay it once by Python."""
    operator.launcher.__class__.__call__ = lambda *_: None
    for _ in range(2):
        operator.call(*arguments, **named)


def test_a_call_of_the_same_kind_is_replayed(device: Device) -> None:
    operator, config = Operator(), RouterConfig(2)
    warm(operator, torch.randn(8), config, scale=0.5)
    calls = operator.host_calls
    x = torch.randn(8)
    result = operator.call(x, RouterConfig(2), scale=0.5)
    assert operator.host_calls == calls
    assert type(result) is Pair
    assert result.first.shape == (8, 2) and result.second.shape == (4,)
    ((function, numbers, parameters),) = device.calls
    assert function == FUNCTION and numbers == (3, 2, 1, 128, 1, 1, 1024)
    assert parameters[0] == x.data_ptr() and parameters[2] == result.first.data_ptr()
    assert parameters[3:] == (-5, 0.5, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda x, config: ((x.double(), config), {"scale": 0.5}),
        lambda x, config: ((x[:6], config), {"scale": 0.5}),
        lambda x, config: ((x.view(4, 2), config), {"scale": 0.5}),
        lambda x, config: ((torch.randn(16)[::2], config), {"scale": 0.5}),
        lambda x, config: ((torch.randn(9)[1:], config), {"scale": 0.5}),
        lambda x, config: ((x, RouterConfig(3)), {"scale": 0.5}),
        lambda x, config: ((x, config), {"scale": 0.25}),
        lambda x, config: ((x, config), {"scale": True}),
        lambda x, config: ((x, config), {}),
        lambda x, config: ((x, config, None), {"scale": 0.5}),
        lambda x, config: ((x, config), {"more": None, "scale": 0.5}),
        lambda x, config: ((x, config, (x.clone(), 3)), {"scale": 0.5}),
        lambda x, config: ((x.requires_grad_(), config), {"scale": 0.5}),
    ],
)
def test_a_call_of_another_kind_is_not(device: Device, change: Any) -> None:
    operator, config = Operator(), RouterConfig(2)
    warm(operator, torch.randn(8), config, scale=0.5)
    calls = operator.host_calls
    arguments, named = change(torch.randn(8), config)
    operator.call(*arguments, **named)
    assert operator.host_calls == calls + 1
    assert not device.calls


def test_tuples_of_tensors_and_numbers(device: Device) -> None:
    operator, config = Operator(), RouterConfig(2)
    warm(operator, torch.randn(8), config, (torch.randn(4), 3))
    calls = operator.host_calls
    operator.call(torch.randn(8), config, (torch.randn(4), 3))
    assert operator.host_calls == calls
    operator.call(torch.randn(8), config, (torch.randn(4), 4))
    operator.call(torch.randn(8), config, (torch.randn(5), 3))
    operator.call(torch.randn(8), config, Pair(torch.randn(4), 3))  # type: ignore[arg-type]
    assert operator.host_calls == calls + 3


def test_modes_are_part_of_the_key(device: Device) -> None:
    operator, config = Operator(), RouterConfig(2)
    warm(operator, torch.randn(8), config)
    calls = operator.host_calls
    with deterministic():
        operator.call(torch.randn(8), config)
    assert operator.host_calls == calls + 1


def test_kernels_that_need_more_than_a_grid_stay_with_triton(device: Device) -> None:
    class PdlLauncher(Launcher):
        launch_pdl = True

    operator, config = Operator(PdlLauncher()), RouterConfig(2)
    warm(operator, torch.randn(8), config)
    calls = operator.host_calls
    operator.call(torch.randn(8), config)
    assert operator.host_calls == calls and not device.calls


def test_several_plans_and_cleared_ones(device: Device) -> None:
    operator, config = Operator(), RouterConfig(2)
    for size in (4, 8, 12):
        warm(operator, torch.randn(size), config)
    calls = operator.host_calls
    for size in (4, 8, 12, 4, 8):
        assert operator.call(torch.randn(size), config).first.shape == (size, 2)
    assert operator.host_calls == calls and len(device.calls) == 5
    operator.call.clear()
    operator.call(torch.randn(4), config)
    assert operator.host_calls == calls + 1


def test_an_error_of_the_driver_is_raised(device: Device) -> None:
    operator, config = Operator(), RouterConfig(2)
    warm(operator, torch.randn(8), config)
    device.error = 719
    with pytest.raises(FulguriteError, match="error 719"):
        operator.call(torch.randn(8), config)


def test_nothing_leaks(device: Device) -> None:
    operator, config, x = Operator(), RouterConfig(2), torch.randn(8)
    warm(operator, x, config)

    def run(count: int) -> tuple[list[int], int]:
        for _ in range(count):
            operator.call(x, config)
            device.calls.clear()
        gc.collect()
        held = [sys.getrefcount(value) for value in (x, config, None.__class__)]
        return held, len(gc.get_objects())

    before = run(20)
    after = run(200)
    assert after[0] == before[0] and after[1] - before[1] < 20
