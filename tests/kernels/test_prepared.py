"""Prepared launches: when a kept kernel is launched, with what, and when Triton has to look again."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="its kernels are what is launched")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter's kernels are Triton's own", allow_module_level=True)

import triton
import triton.language as tl

from fulgurite.kernels.common import triton_launch as module
from fulgurite.kernels.common.triton_launch import prepared


@prepared(do_not_specialize=["count"])
def add_kernel(
    x_ptr, y_ptr, size, scale, count, BLOCK: tl.constexpr, EVEN: tl.constexpr = False
):  # fmt: skip
    """Never compiled here."""


class Kernel:
    """What Triton's launch gives: a compiled kernel that notes how it is run."""

    packed_metadata = "packed"

    def __init__(self, function):
        self.function, self.calls = function, []

    def run(self, *args):
        self.calls.append(args)


@pytest.fixture
def launches(monkeypatch):
    """Kernels that launches through Triton gave, in order."""
    made = []

    def run(self, *args, grid, warmup, **named):
        made.append(Kernel(len(made)))
        return made[-1]

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(module, "current_device", lambda: 0)
    monkeypatch.setattr(module, "current_stream", lambda device: 77)
    add_kernel.forms.clear()
    return made


def launch(x, y, size=48, scale=0.5, count=3, grid=(5,), **named):
    add_kernel[grid](x, y, size, scale, count, **({"BLOCK": 16, "num_warps": 2} | named))


def aligned(dtype=torch.float32):
    return torch.zeros(64, dtype=dtype)


def test_the_second_launch_hands_over_addresses(launches):
    x, y, z = aligned(), aligned(), aligned()
    launch(x, y)
    launch(z, x, size=64, scale=0.25, count=9, grid=(7, 2))
    assert len(launches) == 1
    wanted = (7, 2, 1, 77, 0, "packed", None, None, None)
    wanted += (z.data_ptr(), x.data_ptr(), 64, 0.25, 9, 16, False)
    assert launches[0].calls == [wanted]


def test_a_parameter_is_a_tensor_like_any_other(launches):
    weight = nn.Parameter(aligned(), requires_grad=False)
    for _ in range(2):
        launch(weight, aligned())
    assert len(launches) == 1 and launches[0].calls[0][9] == weight.data_ptr()


OTHERS = {
    "dtype": {"x": aligned(torch.bfloat16)},
    "alignment of the first": {"x": torch.zeros(80)[1:65]},
    "alignment of the second": {"y": torch.zeros(80)[1:65]},
    "one": {"size": 1},
    "no multiple of 16": {"size": 47},
    "a negative number": {"size": -3},
    "64 bits": {"size": 1 << 31},
    "64 bits, negative": {"size": -(1 << 31) - 16},
    "a float for a whole number": {"size": 48.0},
    "none": {"size": None},
    "a constant": {"BLOCK": 32},
    "a constant with a default": {"EVEN": True},
    "a constant of another type": {"BLOCK": 16.0},
    "an option": {"num_warps": 4},
    "one option more": {"num_stages": 3},
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_kernel_is_compiled_for_is_looked_at(name, launches):
    launch(aligned(), aligned())
    other = {"x": aligned(), "y": aligned()} | OTHERS[name]
    launch(**other)
    assert len(launches) == 2 and not launches[0].calls, "a kernel for something else was launched"
    launch(**other)
    launch(aligned(), aligned())
    assert [len(kernel.calls) for kernel in launches] == [1, 1]


def test_which_address_is_aligned_matters(launches):
    odd = torch.zeros(80)[1:65]
    launch(odd, aligned())
    launch(aligned(), odd)
    assert len(launches) == 2


def test_devices_are_apart(launches, monkeypatch):
    launch(aligned(), aligned())
    monkeypatch.setattr(module, "current_device", lambda: 1)
    launch(aligned(), aligned())
    assert len(launches) == 2


def test_other_arguments_go_tritons_way(launches):
    class Other(Tensor):
        pass

    for _ in range(2):
        launch(aligned().as_subclass(Other), aligned())
    assert len(launches) == 2 and not any(kernel.calls for kernel in launches)


def test_numbers_by_name_go_tritons_way(launches):
    for _ in range(2):
        add_kernel[(1,)](aligned(), aligned(), 48, 0.5, count=3, BLOCK=16)
    assert len(launches) == 2


@prepared
def table_kernel(x_ptr, TABLE: tl.constexpr):
    """Never compiled here."""


def test_constants_by_place_are_looked_at(launches):
    table_kernel.forms.clear()
    for table in ((1, 2), (1, 3), (1, 2)):
        table_kernel[(1,)](aligned(), table)
    assert len(launches) == 2 and [len(kernel.calls) for kernel in launches] == [1, 0]
    assert launches[0].calls[0][-1] == (1, 2)


def test_constants_that_no_launch_can_be_kept_by_go_tritons_way(launches):
    table_kernel.forms.clear()
    for _ in range(2):
        table_kernel[(1,)](aligned(), [1, 2])
        table_kernel[(1,)](aligned(), TABLE=[1, 2])
    assert len(launches) == 4


def test_a_grid_that_is_worked_out_goes_tritons_way(launches):
    for _ in range(2):
        add_kernel[lambda meta: (meta["size"],)](aligned(), aligned(), 48, 0.5, 3, BLOCK=16)
    assert len(launches) == 2


def test_kernels_of_other_makers_are_tritons_own(monkeypatch):
    """Triton compiles them for sizes of tensors too, and runs them otherwise."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert type(prepared(add_kernel.fn)) is triton.JITFunction


def test_every_kind_of_kernel_is_one_of_tritons():
    assert isinstance(add_kernel, triton.JITFunction) and add_kernel.params[4].do_not_specialize
