"""Counters: stretches of zeros that no two calls share, from any number of threads."""

from __future__ import annotations

import torch

from fulgurite.kernels.common import triton_counters
from fulgurite.kernels.common.triton_counters import Counters, take_counters
from tests.kernels.threads import in_threads


def test_no_two_threads_get_the_same_counters():
    held = Counters(torch.device("cpu"))
    taken: list[int] = []

    def take():
        taken.extend(held.take(count).storage_offset() for count in [1, 4, 7, 8] * 500)

    in_threads(take)
    assert len(set(taken)) == len(taken) == 16000
    assert held.position == 16000 // 4 * (4 + 4 + 8 + 8)


def test_the_ring_begins_again_and_no_stretch_is_cut_short(monkeypatch):
    monkeypatch.setattr(triton_counters, "COUNTERS", 16)
    held = Counters(torch.device("cpu"))
    found = [(held.take(count).storage_offset(), len(held.take(1))) for count in (9, 3, 2)]
    assert found == [(0, 4), (0, 4), (8, 4)]
    assert len(held.take(40)) == 40  # more than the ring has: zeros of its own
    assert not held.take(40).any()


def test_one_ring_a_device():
    first, second = (take_counters(torch.device("cpu"), 3) for _ in range(2))
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.data_ptr() != second.data_ptr() and first.data_ptr() % 16 == 0
