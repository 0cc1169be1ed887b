"""Backward passes of compiled graphs run in the calling thread if the process uses one GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fulgurite
from fulgurite.capture import training
from fulgurite.capture.backward_thread import find_thread_setter, run_backward_in_calling_thread
from fulgurite.errors import ArgumentError


@pytest.fixture(autouse=True)
def restored_setting() -> Iterator[None]:
    with torch.autograd.set_multithreading_enabled(True):
        yield


def use_gpus(monkeypatch: pytest.MonkeyPatch, *used: bool) -> list[Tensor]:
    """Pretend that there are GPUs, and which have been used; returns a tensor on each."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(used))
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", used.__getitem__, raising=False)
    with FakeTensorMode():
        return [torch.empty(2, device=f"cuda:{k}") for k in range(len(used))]


def test_one_gpu_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = use_gpus(monkeypatch, True, False)
    assert find_thread_setter([first, 3, torch.empty(2)]) is run_backward_in_calling_thread
    assert find_thread_setter([first, second]) is None


def test_several_gpus_in_use_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = use_gpus(monkeypatch, True, True)
    assert find_thread_setter([first]) is None
    assert find_thread_setter([torch.empty(2)]) is None


def test_the_environment_keeps_device_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    (only,) = use_gpus(monkeypatch, True)
    monkeypatch.setenv("FULGURITE_BACKWARD_THREAD", "device")
    assert find_thread_setter([only]) is None
    monkeypatch.setenv("FULGURITE_BACKWARD_THREAD", "main")
    with pytest.raises(ArgumentError, match="FULGURITE_BACKWARD_THREAD=main"):
        find_thread_setter([only])


def double(x: Tensor) -> Tensor:
    return x.exp() * 2


@pytest.mark.parametrize("is_native", [True, False])
def test_training_calls_turn_device_threads_off(
    is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        monkeypatch.setattr(training, "load_library", lambda: None)
    monkeypatch.setattr(
        training, "find_thread_setter", lambda inputs: run_backward_in_calling_thread
    )
    compiled = fulgurite.compile(double)
    x = torch.randn(4, requires_grad=True)
    for _ in range(2):
        torch.autograd.grad(compiled(x).sum(), x)
    assert not torch._C._is_multithreading_enabled()
    with torch.autograd.set_multithreading_enabled(True):
        with torch.no_grad():
            compiled(x)
        assert torch._C._is_multithreading_enabled()  # inference leaves it


@pytest.mark.gpu
def test_backward_on_a_gpu_runs_in_the_calling_thread() -> None:
    compiled = fulgurite.compile(double)
    x = torch.randn(4, device="cuda", requires_grad=True)
    threads: list[int] = []
    for _ in range(3):
        result = compiled(x)
        result.register_hook(lambda _: threads.append(threading.get_ident()))
        (found,) = torch.autograd.grad(result.sum(), x)
    assert threads[-1] == threading.get_ident()
    torch.testing.assert_close(found, torch.autograd.grad(double(x).sum(), x)[0])
