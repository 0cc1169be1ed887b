"""Facts of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fulgurite import device


def test_cpu_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULGURITE_CACHE", str(tmp_path))
    device._cpu.cache_clear()
    facts = device.cpu()
    assert facts.threads == torch.get_num_threads()
    assert 1e8 < facts.copy_bandwidth < 1e13
    assert 8 << 10 <= facts.first_level_cache < facts.second_level_cache
    assert torch.float32 in facts.native_dtypes
    monkeypatch.setattr(device, "measure_copy_bandwidth", lambda threads: 1.0)
    device._cpu.cache_clear()
    assert device.cpu().copy_bandwidth == facts.copy_bandwidth, "measured once, then kept"
    device._cpu.cache_clear()


def test_threads_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULGURITE_THREADS", "3")
    assert device.cpu_threads() == 3
    monkeypatch.setenv("FULGURITE_THREADS", "")
    assert device.cpu_threads() == torch.get_num_threads()


def test_measuring_keeps_the_number_of_threads() -> None:
    before = torch.get_num_threads()
    assert device.measure_copy_bandwidth(1, megabytes=2, repeats=3) > 0
    assert torch.get_num_threads() == before
