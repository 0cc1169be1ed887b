"""Counters: stretches of zeros that no two calls share, from any number of threads."""

from __future__ import annotations

import torch

from fulgurite.kernels.common import triton_counters
from fulgurite.kernels.common.triton_counters import CounterRing, acquire_counters
from tests.kernels.threads import in_threads


def test_no_two_threads_get_the_same_counters():
    ring = CounterRing(torch.device("cpu"))
    offsets: list[int] = []

    def acquire():
        offsets.extend(ring.acquire(count).storage_offset() for count in [1, 4, 7, 8] * 500)

    in_threads(acquire)
    assert len(set(offsets)) == len(offsets) == 16000
    assert ring.position == 16000 // 4 * (4 + 4 + 8 + 8)


def test_ring_wraps_without_splitting_a_stretch(monkeypatch):
    monkeypatch.setattr(triton_counters, "RING_SIZE", 16)
    ring = CounterRing(torch.device("cpu"))
    stretches = [
        (ring.acquire(count).storage_offset(), len(ring.acquire(1))) for count in (9, 3, 2)
    ]
    assert stretches == [(0, 4), (0, 4), (8, 4)]
    assert len(ring.acquire(40)) == 40  # larger than the ring: a tensor of its own
    assert not ring.acquire(40).any()


def test_one_ring_per_device():
    first, second = (acquire_counters(torch.device("cpu"), 3) for _ in range(2))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.data_ptr() != second.data_ptr() and first.data_ptr() % 16 == 0
