"""Kernels that are compiled side by side, for a GPU that need not be here."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="its kernels are compiled")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fulgurite.kernels.common import compile_ahead as module
from fulgurite.kernels.common.compile_ahead import COMPILE_AHEAD, can_compile_ahead, compile_ahead
from fulgurite.kernels.common.triton_launch import cached_launch

pytestmark = pytest.mark.skipif(not can_compile_ahead(), reason="needs Triton 3.5")


@cached_launch
def scale_kernel(x_ptr, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 2 * tl.load(x_ptr + at, at < size), at < size)


@cached_launch
def wrong_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), tl.arange(0, 3))  # 3 is no power of two


class HopperDriver:
    """A driver of an H200 that is not here: it names the target and builds launchers."""

    def __init__(self):
        self.launchers = []

    def launcher_cls(self, src, metadata):
        self.launchers.append(src.fn.__name__)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def hopper(monkeypatch):
    found = HopperDriver()
    before = driver._active
    driver.set_active(found)
    yield found
    driver._active = before
    for kernel in (scale_kernel, wrong_kernel):
        kernel.device_caches.clear()


def compiled_kernels(kernel):
    return list(kernel.device_caches[0][0].values())


def test_launches_compile_and_do_not_run(hopper):
    x = torch.ones(64)
    with compile_ahead(threads=2):
        for block in (16, 32, 16):
            scale_kernel[(4,)](x, 64, BLOCK=block, num_warps=1)
    kernels = compiled_kernels(scale_kernel)
    assert len(kernels) == 2 and all(kernel.asm["cubin"] for kernel in kernels)
    assert hopper.launchers == ["scale_kernel"] * 2
    assert torch.equal(x, torch.ones(64))
    assert not COMPILE_AHEAD.is_active and triton.runtime._async_compile.active_mode.get() is None


def test_a_compile_error_ends_the_mode(hopper):
    with pytest.raises(triton.CompilationError), compile_ahead(threads=2):
        wrong_kernel[(1,)](torch.ones(16), BLOCK=16)
    assert not COMPILE_AHEAD.is_active and triton.runtime._async_compile.active_mode.get() is None


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn, torch.uint8, torch.bfloat16])
def test_new_tensors_are_zeros(dtype):
    with torch.inference_mode(), module.ZeroAllocations():
        x = torch.empty(1000, dtype=dtype)
        found = [x, torch.empty_like(x), x.new_empty(7), torch.empty_strided((3, 2), (1, 3))]
    assert all(not tensor.float().any() for tensor in found)
