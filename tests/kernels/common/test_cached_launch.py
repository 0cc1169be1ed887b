"""Cached launches: when the cached kernel is used, with which arguments, and when Triton is."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="its kernels are launched")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter uses Triton's own kernels", allow_module_level=True)

import triton
import triton.language as tl

from fulgurite.kernels.common import triton_launch as module
from fulgurite.kernels.common.triton_launch import cached_launch


@cached_launch(do_not_specialize=["count"])
def add_kernel(
    x_ptr, y_ptr, size, scale, count, BLOCK: tl.constexpr, EVEN: tl.constexpr = False
):  # fmt: skip
    """Never compiled here."""


class Kernel:
    """A compiled kernel, as a Triton launch returns it, that records its calls."""

    packed_metadata = "packed"

    def __init__(self, function):
        self.function, self.calls = function, []

    def run(self, *args):
        self.calls.append(args)


@pytest.fixture
def launches(monkeypatch):
    """The kernels that launches through Triton returned, in order."""
    kernels = []

    def run(self, *args, grid, warmup, **named):
        kernels.append(Kernel(len(kernels)))
        return kernels[-1]

    monkeypatch.setattr(triton.JITFunction, "run", run)
    monkeypatch.setattr(module, "current_device", lambda: 0)
    monkeypatch.setattr(module, "current_stream", lambda device: 77)
    add_kernel.signatures.clear()
    return kernels


def launch(x, y, size=48, scale=0.5, count=3, grid=(5,), **named):
    add_kernel[grid](x, y, size, scale, count, **({"BLOCK": 16, "num_warps": 2} | named))


def aligned(dtype=torch.float32):
    return torch.zeros(64, dtype=dtype)


def test_second_launch_passes_addresses(launches):
    x, y, z = aligned(), aligned(), aligned()
    launch(x, y)
    launch(z, x, size=64, scale=0.25, count=9, grid=(7, 2))
    assert len(launches) == 1
    expected = (7, 2, 1, 77, 0, "packed", None, None, None)
    expected += (z.data_ptr(), x.data_ptr(), 64, 0.25, 9, 16, False)
    assert launches[0].calls == [expected]


def test_parameters_are_tensors(launches):
    weight = nn.Parameter(aligned(), requires_grad=False)
    for _ in range(2):
        launch(weight, aligned())
    assert len(launches) == 1 and launches[0].calls[0][9] == weight.data_ptr()


CHANGES = {
    "dtype": {"x": aligned(torch.bfloat16)},
    "alignment of the first": {"x": torch.zeros(80)[1:65]},
    "alignment of the second": {"y": torch.zeros(80)[1:65]},
    "one": {"size": 1},
    "not a multiple of 16": {"size": 47},
    "a negative number": {"size": -3},
    "64 bits": {"size": 1 << 31},
    "64 bits, negative": {"size": -(1 << 31) - 16},
    "a float for an integer": {"size": 48.0},
    "none": {"size": None},
    "a constant": {"BLOCK": 32},
    "a constant with a default": {"EVEN": True},
    "a constant of another type": {"BLOCK": 16.0},
    "an option": {"num_warps": 4},
    "one option more": {"num_stages": 3},
}


@pytest.mark.parametrize("name", CHANGES)
def test_specialization_is_part_of_the_key(name, launches):
    launch(aligned(), aligned())
    changed = {"x": aligned(), "y": aligned()} | CHANGES[name]
    launch(**changed)
    assert len(launches) == 2 and not launches[0].calls, (
        "a kernel with another specialization was launched"
    )
    launch(**changed)
    launch(aligned(), aligned())
    assert [len(kernel.calls) for kernel in launches] == [1, 1]


def test_alignment_of_each_address_matters(launches):
    unaligned = torch.zeros(80)[1:65]
    launch(unaligned, aligned())
    launch(aligned(), unaligned)
    assert len(launches) == 2


def test_devices_have_separate_kernels(launches, monkeypatch):
    launch(aligned(), aligned())
    monkeypatch.setattr(module, "current_device", lambda: 1)
    launch(aligned(), aligned())
    assert len(launches) == 2


def test_tensor_subclasses_go_through_triton(launches):
    class Other(Tensor):
        pass

    for _ in range(2):
        launch(aligned().as_subclass(Other), aligned())
    assert len(launches) == 2 and not any(kernel.calls for kernel in launches)


def test_numbers_by_name_go_through_triton(launches):
    for _ in range(2):
        add_kernel[(1,)](aligned(), aligned(), 48, 0.5, count=3, BLOCK=16)
    assert len(launches) == 2


@cached_launch
def table_kernel(x_ptr, TABLE: tl.constexpr):
    """Never compiled here."""


def test_positional_constants_are_part_of_the_key(launches):
    table_kernel.signatures.clear()
    for table in ((1, 2), (1, 3), (1, 2)):
        table_kernel[(1,)](aligned(), table)
    assert len(launches) == 2 and [len(kernel.calls) for kernel in launches] == [1, 0]
    assert launches[0].calls[0][-1] == (1, 2)


def test_unhashable_constants_go_through_triton(launches):
    table_kernel.signatures.clear()
    for _ in range(2):
        table_kernel[(1,)](aligned(), [1, 2])
        table_kernel[(1,)](aligned(), TABLE=[1, 2])
    assert len(launches) == 4


def test_callable_grid_goes_through_triton(launches):
    for _ in range(2):
        add_kernel[lambda meta: (meta["size"],)](aligned(), aligned(), 48, 0.5, 3, BLOCK=16)
    assert len(launches) == 2


def test_amd_kernels_are_plain_triton(monkeypatch):
    """Triton also specializes them on tensor sizes and launches them differently."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert type(cached_launch(add_kernel.fn)) is triton.JITFunction


def test_cached_kernel_is_a_jit_function():
    assert isinstance(add_kernel, triton.JITFunction) and add_kernel.params[4].do_not_specialize
