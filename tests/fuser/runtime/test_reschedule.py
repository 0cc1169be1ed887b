"""A Triton kernel that can't be built or launched gets another schedule."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

import fulgurite
from fulgurite.errors import CompileError, FallbackWarning
from fulgurite.executors import fuser as fuser_executor
from fulgurite.executors.fallback import GuardedRegion
from fulgurite.fuser import lower_region, lowering
from fulgurite.fuser.ir.errors import KernelBuildError, Unsupported
from fulgurite.fuser.runtime.compile_triton import CompiledVariants
from tests.fuser import support

needs_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter"
)


@pytest.fixture(autouse=True)
def _patched_interpreter():
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.fuser import triton_interpreter

        triton_interpreter.patch()


def program(x, total):
    total.copy_(total * 2 + x.sum(0))
    return torch.softmax(x, -1)


def lower(*inputs):
    return lower_region(support.trace(program, inputs), use_triton=True)


@pytest.fixture
def failing_builds(monkeypatch):
    """Kernels named here can't be built while their schedule is the first one."""
    monkeypatch.delenv("FULGURITE_STRICT", raising=False)
    failing: set[str] = set()
    original = CompiledVariants.__missing__

    def missing(self, variant):
        for kernel in self.kernel_module(variant).kernels:
            if kernel.text in failing:
                raise KernelBuildError(kernel.name, RuntimeError("out of resource: shared memory"))
        return original(self, variant)

    monkeypatch.setattr(CompiledVariants, "__missing__", missing)
    return failing


@needs_interpreter
def test_a_failed_kernel_gets_another_schedule(failing_builds):
    x, total = torch.randn(60, 50), torch.randn(50)
    region = lower(x, total)
    failed = region.kernel_module.kernels[0]
    failing_builds.add(failed.text)
    expected_total = total * 2 + x.sum(0)
    reports = []
    guarded = GuardedRegion(
        "r", region, lambda: None, lambda error: CompileError(str(error)), reports.append
    )
    (result,) = guarded(x, total)
    torch.testing.assert_close(result, torch.softmax(x, -1))
    torch.testing.assert_close(total, expected_total)
    assert [report.instead for report in reports] == ["another schedule"]
    assert guarded.lowered.kernel_module.kernels[0].text != failed.text


@needs_interpreter
def test_schedules_end(failing_builds, monkeypatch):
    x, total = torch.randn(60, 50), torch.randn(50)
    region, tried = lower(x, total), 0
    error = KernelBuildError(region.kernel_module.kernels[0].name, RuntimeError("no"))
    while region is not None:
        region, tried = region.next_schedule(error), tried + 1
    assert 1 < tried <= lowering.MAX_ATTEMPTS


@needs_interpreter
def test_an_error_inside_a_kernel_is_raised():
    """In the interpreter a kernel fails while it runs: inputs may have changed."""
    region = lower(torch.randn(60, 50), torch.randn(50))
    line = region._launch_lines[0]
    code = compile("\n" * (line - 1) + "raise RuntimeError('x')", "<fused region>", "exec")
    with pytest.raises(RuntimeError) as raised:
        exec(code)
    assert not region.can_rerun(raised.value)
    region.device = torch.device("cuda")  # there, a launch that fails has run nothing
    assert region.can_rerun(raised.value)
    region._launch_lines[0] -= 1  # but the kernel before may have written to an input
    assert not region.can_rerun(raised.value)


@needs_interpreter
def test_a_grid_beyond_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(lowering, "MAX_PROGRAMS", (3, 2**16 - 1))
    with pytest.raises(fulgurite.errors.FusionError, match="programs") as raised:
        lower(torch.randn(60, 50), torch.randn(50))
    assert isinstance(raised.value.__cause__, Unsupported)


def wide_norm_backward(*inputs):
    x, total = inputs[0].float(), sum(x.float() for x in inputs)
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    n = x * r
    return r * (total - n * (total * n).mean(-1, keepdim=True)), (total * n).sum(0)


@pytest.mark.gpu
def test_too_much_shared_memory_on_a_gpu(monkeypatch):
    """Schedules that know no limit: the driver refuses the kernel, and a smaller one runs."""
    monkeypatch.delenv("FULGURITE_STRICT")
    monkeypatch.setattr(fuser_executor.FUSER, "_lowered", type(fuser_executor.FUSER._lowered)())
    limited = lowering.gpu_info
    monkeypatch.setattr(
        lowering, "gpu_info", lambda d: replace(limited(d), shared_memory_bytes=1 << 30)
    )
    inputs = [torch.randn(64, 16384, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    compiled = fulgurite.compile(wide_norm_backward)
    with pytest.warns(FallbackWarning, match="shared memory"):
        result = compiled(*inputs)
    expected = wide_norm_backward(*(x.double() for x in inputs))
    for ours, exact in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-3, atol=1e-2)
    assert "fallback: another schedule" in str(compiled.last_trace())


@pytest.mark.gpu
def test_known_limits_need_no_fallback_on_a_gpu():
    inputs = [torch.randn(64, 16384, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    result = fulgurite.compile(wide_norm_backward)(*inputs)
    expected = wide_norm_backward(*(x.double() for x in inputs))
    torch.testing.assert_close(result[0], expected[0], rtol=1e-3, atol=1e-2)
