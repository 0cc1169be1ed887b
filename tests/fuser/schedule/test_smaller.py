"""Smaller schedules: every step computes the same, needs no more shared memory, and ends."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F

from fulgurite.device import DeviceInfo
from fulgurite.fuser import lowering
from fulgurite.fuser.schedule.gpu import choose
from fulgurite.fuser.schedule.gpu.shared_memory import estimate_shared_bytes
from fulgurite.fuser.schedule.gpu.smaller import smaller_schedule
from tests.fuser import support
from tests.fuser.codegen.test_triton import make_schedules

RUNS_ON_TRITON = True
H200 = DeviceInfo("H200", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,))


def norm_backward(x, g, w):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    n, gw = x * r, g * w
    return r * (gw - n * (gw * n).mean(-1, keepdim=True)), (g * n).sum(0)


PROGRAMS = {
    "pointwise": (lambda x, y: torch.tanh(x) * y + 1, [(37, 3000), (37, 3000)]),
    "transpose": (lambda x, y: x.t() + y, [(130, 140), (140, 130)]),
    "rows": (lambda x: F.softmax(x, -1), [(5, 700)]),
    "short_rows": (lambda x: F.layer_norm(x, (24,)), [(50, 24)]),
    "resident_rows": (lambda x: F.softmax(x, -1), [(1, 17000)]),
    "scan": (lambda x: torch.cumsum(x, -1) * 2, [(4, 600)]),
    "columns": (lambda x, y: ((x * y).sum(0), x.amax(0)), [(150, 20), (150, 20)]),
    "softmax_columns": (lambda x: F.softmax(x, 0), [(300, 20)]),
    "welford_columns": (lambda x: torch.var_mean(x, 0), [(600, 20)]),
    "persistent": (norm_backward, [(20, 300), (20, 300), (300,)]),
    "total": (lambda x: x.exp().sum(), [(20, 300)]),
}


def steps_of(schedule, device=H200):
    """The schedule and every smaller one."""
    found = [schedule]
    while (smaller := smaller_schedule(found[-1], device)) is not None:
        found.append(smaller)
        assert len(found) < 40, "the steps don't end"
    return found


def schedules_of(name):
    function, shapes = PROGRAMS[name]
    return make_schedules(function, [torch.empty(shape) for shape in shapes])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_step_computes_the_same(name, monkeypatch):
    """Takes one, two, ... steps with every kernel; on the CPU they only have to end."""
    function, shapes = PROGRAMS[name]
    most = max(len(steps_of(s)) for s in schedules_of(name))
    assert most > 1
    if support.TARGET == "cpp":
        return
    original = lowering.choose_gpu_schedule
    for steps in {1, most // 2, most - 1}:

        def choose_smaller(nest, device, steps=steps):
            ladder = steps_of(original(nest, device), device)
            return ladder[min(steps, len(ladder) - 1)]

        monkeypatch.setattr(lowering, "choose_gpu_schedule", choose_smaller)
        with support.target_device():
            inputs = [torch.randn(shape) for shape in shapes]
            region = support.lower_for_target(function, inputs)
            support.check_against_eager(region(*inputs), function, inputs, slack=64)


@pytest.mark.parametrize("name", PROGRAMS)
def test_later_steps_need_no_more_shared_memory(name):
    for schedule in schedules_of(name):
        ladder = steps_of(schedule)
        assert estimate_shared_bytes(ladder[-1]) <= estimate_shared_bytes(ladder[0])


def wide_norm_backward(*inputs):
    total = sum(x.float() for x in inputs)
    return norm_backward(inputs[0].float(), total, torch.ones(()))


def column_product(*inputs):
    product = inputs[0].float()
    for x in inputs[1:]:
        product = product * x
    return product.sum(0)


# The fastest schedules need 802,816 bytes and 409,600: 232,448 are there.
TOO_LARGE = {
    "pipelined rows of 16384": (wide_norm_backward, [(64, 16384)] * 8, torch.bfloat16),
    "pipelined columns": (column_product, [(4096, 2304)] * 12, torch.float32),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_chosen_schedules_fit_the_device(name, monkeypatch):
    function, shapes, dtype = TOO_LARGE[name]
    inputs = [torch.empty(shape, dtype=dtype) for shape in shapes]
    (fastest,) = [choose._choose_fastest(s.nest, H200) for s in make_schedules(function, inputs)]
    assert estimate_shared_bytes(fastest) > H200.shared_memory_bytes
    (chosen,) = make_schedules(function, inputs)
    assert estimate_shared_bytes(chosen) <= H200.shared_memory_bytes
    if importlib.util.find_spec("triton") is None or support.TARGET != "cpp":
        return
    from tests.fuser.codegen.test_machine_code import compile_schedule

    assert compile_schedule(chosen).metadata.shared <= H200.shared_memory_bytes


def test_a_smaller_device_gets_smaller_blocks():
    small = DeviceInfo(
        "small", 132, 4.2e12, 2.9e13, 256 << 10, 50 << 20, (torch.float32,), 48 << 10
    )
    function, shapes = PROGRAMS["columns"]
    (schedule,) = make_schedules(function, [torch.empty(shape) for shape in shapes])
    assert estimate_shared_bytes(schedule) > small.shared_memory_bytes
    fitting = choose.choose_gpu_schedule(schedule.nest, small)
    assert estimate_shared_bytes(fitting) <= small.shared_memory_bytes
