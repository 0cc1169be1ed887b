"""Baselines: liger-kernel's functions by a module of the same interface, and precompilation."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from fulgurite.bench.fusions import baselines, gpu, gpu_cases
from fulgurite.bench.fusions.baselines import Job

ROWS = (6, 8)
HEADS = (2, 4, 3, 8)  # of rope: batch, heads, tokens, width


class Twice(torch.autograd.Function):
    """Doubles; its gradient is written over what it was given, as liger-kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        g.data.mul_(2)
        return g


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Looks at the left half of cosine and sine alone, and wants heads of a token side by side."""
    assert q.transpose(1, 2).is_contiguous() and k.transpose(1, 2).is_contiguous()
    half = cos.shape[-1] // 2
    angles = [torch.cat([t[:, :half], t[:, :half]], -1) for t in (cos, sin)]
    return gpu_cases.rope(q, *angles), gpu_cases.rope(k, *angles)


LIGER = SimpleNamespace(
    liger_rms_norm=lambda X, W, eps: F.rms_norm(Twice.apply(X) / 2, X.shape[-1:], W, eps),
    liger_layer_norm=lambda X, W, B, eps: F.layer_norm(X, X.shape[-1:], W, B, eps),
    liger_softmax=lambda x: torch.softmax(x, -1),
    liger_swiglu=lambda a, b: F.silu(a) * b,
    liger_rope=liger_rope,
    liger_cross_entropy=lambda input, target: F.cross_entropy(input, target),
)
NAMES = ("rms_norm", "layer_norm", "softmax", "silu_mul", "rope", "cross_entropy")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs_of(group: str, name: str) -> tuple[Tensor, ...]:
    """As the cases have them, small and on the CPU."""
    x, w, b = normal(*ROWS), normal(ROWS[1]), normal(ROWS[1]) + 1
    if name == "rope":
        return normal(*HEADS), normal(*HEADS[2:]), normal(*HEADS[2:]) - 1
    if name == "cross_entropy":
        return x, torch.arange(ROWS[0])
    forward = {"rms_norm": (x, w), "layer_norm": (x, w, b), "softmax": (x,), "silu_mul": (x, x + 1)}
    if group == "forward":
        return forward[name]
    saved = normal(ROWS[0], 1)
    backward = {"rms_norm": (x, saved, w), "layer_norm": (x, saved, saved, w)}
    return (x * 2 - 1, *backward.get(name, forward[name]))


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_called_as_torchs_is(name: str) -> None:
    calls = baselines.bind_calls("forward", name, LIGER, inputs_of("forward", name))
    assert calls is not None
    torchs, ligers = (pytree.tree_leaves(call()) for call in calls)
    torch.testing.assert_close(ligers, torchs)


@pytest.mark.parametrize("name", NAMES[:-1])
def test_backward_is_called_as_torchs_is_and_more_than_once(name: str) -> None:
    g, *rest = inputs_of("backward", name)
    with torch.no_grad():  # as the suite is
        calls = baselines.bind_calls("backward", name, LIGER, (g, *rest))
        assert calls is not None
        torchs, ligers = (call() for call in calls)
        torch.testing.assert_close(ligers, torchs)
        assert all(t.norm() > 0 for t in torchs)
        calls[1]()


def test_rope_turns_all_heads_by_the_gradients_of_the_case() -> None:
    g, cos, sin = inputs_of("backward", "rope")
    half = cos[:, : HEADS[-1] // 2]
    cos, sin = torch.cat([half, half], -1), torch.cat([half, half], -1)
    calls = baselines.bind_calls("backward", "rope", LIGER, (g, cos, sin))
    assert calls is not None
    torch.testing.assert_close(torch.cat(calls[1](), 1), gpu_cases.rope_backward(g, cos, sin))


def test_norms_have_the_gradients_of_the_case() -> None:
    g, x, _, w = inputs_of("backward", "rms_norm")
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    calls = baselines.bind_calls("backward", "rms_norm", LIGER, (g, x, rstd, w))
    assert calls is not None
    torch.testing.assert_close(calls[1](), gpu_cases.rms_norm_backward(g, x, rstd, w))


@pytest.mark.parametrize(("group", "name"), [("forward", "cumsum"), ("backward", "cross_entropy")])
def test_what_it_does_not_have(group: str, name: str) -> None:
    assert baselines.bind_calls(group, name, LIGER, (normal(1), normal(1))) is None


def test_nothing_is_imported_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert baselines.import_liger() is None
    assert not any(name.startswith("liger_kernel") for name in sys.modules)


def test_a_row_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [inputs_of("forward", "silu_mul") for _ in range(3)]
    timed: list[Any] = []
    monkeypatch.setattr(gpu, "make_input_sets", lambda case: sets)
    monkeypatch.setattr(gpu, "time_on_device", lambda calls: timed.append(calls) or 1e-3)
    case = next(case for case in gpu_cases.forward_cases() if case.name == "silu_mul")
    found = gpu.measure_liger("forward", case, LIGER, moved=10**9, copy=2e12)
    assert found == {"liger_ms": 1.0, "liger_percent": 50.0, "liger_difference": 0.0}
    assert len(timed[0]) == 3
    softmax = next(case for case in gpu_cases.forward_cases() if case.name == "cumsum")
    assert gpu.measure_liger("forward", softmax, LIGER, moved=1, copy=1.0) is None


# ---- compiling ahead -----------------------------------------------------------------------------


def test_jobs_are_dealt_and_a_failure_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shares: list[Any] = []

    def start(share: list[Job]) -> subprocess.Popen[str]:
        shares.append(share)
        code = "raise ValueError('no such case')" if len(shares) == 2 else ""
        command = [sys.executable, "-S", "-c", code]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    monkeypatch.setattr(baselines, "WORKERS", 3)
    monkeypatch.setattr(baselines, "_start_worker", start)
    jobs = [Job("forward", name, None) for name in "abcd"]
    baselines.precompile(jobs)
    assert shares == [[jobs[0], jobs[3]], [jobs[1]], [jobs[2]]]
    assert capsys.readouterr().out == "precompilation failed (1): ValueError: no such case\n"


def test_processes_that_take_too_long_are_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    start = lambda share: subprocess.Popen(command, stderr=subprocess.PIPE, text=True)  # noqa: E731
    monkeypatch.setattr(baselines, "_start_worker", start)
    monkeypatch.setattr(baselines, "TIMEOUT_SECONDS", 0.1)
    baselines.precompile([Job("forward", "softmax", None)])
    assert "failed (-9)" in capsys.readouterr().out


def test_a_process_compiles_what_it_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._inductor.runtime.benchmarking import benchmarker

    called: list[Any] = []

    def compile_(function: Callable[..., Any], mode: str | None) -> Callable[..., Any]:
        return lambda *inputs: called.append((function(*inputs), mode, torch.is_grad_enabled()))

    known = {("forward", "add"): (torch.add, lambda: (torch.tensor(1), torch.tensor(2)))}
    monkeypatch.setattr(baselines, "find_functions", lambda: known)
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(benchmarker, "benchmark_gpu", lambda call: call())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    baselines.compile_jobs([Job("forward", "add", "max-autotune")])
    assert called == [(3, "max-autotune", False)]
    assert benchmarker.benchmark_gpu(lambda: 5) == 5
    assert (tmp_path / "inductor" / "timing.lock").exists()


def test_only_one_times_at_a_time(tmp_path: Path) -> None:
    at_once, most = 0, 0

    def time_kernel() -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.01)
        at_once -= 1

    alone = baselines.serialize_timing(time_kernel, tmp_path / "lock")
    threads = [threading.Thread(target=alone) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
