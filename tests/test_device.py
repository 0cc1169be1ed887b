"""Properties of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fulgurite import device
from fulgurite.errors import ArgumentError


def test_cpu_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(tmp_path))
    device._cpu_info.cache_clear()
    info = device.cpu_info()
    assert info.num_cores == torch.get_num_threads()
    assert 1e8 < info.copy_bandwidth < 1e13
    assert 8 << 10 <= info.l1_cache_bytes < info.l2_cache_bytes
    assert torch.float32 in info.native_dtypes
    monkeypatch.setattr(device, "measure_copy_bandwidth", lambda threads: 1.0)
    device._cpu_info.cache_clear()
    assert device.cpu_info().copy_bandwidth == info.copy_bandwidth, "measured once, then cached"
    device._cpu_info.cache_clear()


def test_num_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULGURITE_NUM_THREADS", "3")
    assert device.num_cpu_threads() == 3
    monkeypatch.setenv("FULGURITE_NUM_THREADS", "")
    assert device.num_cpu_threads() == torch.get_num_threads()


def test_measuring_restores_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    assert device.measure_copy_bandwidth(1, megabytes=2, repeats=3) > 0
    assert torch.get_num_threads() == before


def test_dtypes_by_name() -> None:
    assert device.resolve_dtype(None) is None
    assert device.resolve_dtype("bfloat16") is torch.bfloat16
    assert device.resolve_dtype("torch.float16") is torch.float16
    assert device.resolve_dtype(torch.float64) is torch.float64
    with pytest.raises(ArgumentError, match="dtype='fp8'(.|\\n)*use float32, float16, bfloat16"):
        device.resolve_dtype("fp8")
