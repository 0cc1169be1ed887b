"""Lookup of the heuristics of a device.

    heuristics_for(x.device).small_m_gemm(m, n, k, weight)
    with override_heuristics(MyHeuristics()): ...                 tests and sweeps

In: a device. Out: the object whose methods choose launch configs on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.tuning.base import Heuristics
from fulgurite.kernels.tuning.deterministic import DeterministicHeuristics
from fulgurite.kernels.tuning.generic import GenericHeuristics
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from fulgurite.kernels.tuning.sm_100 import Sm100Heuristics

# major compute capability -> table
TABLES: dict[int, type[Heuristics]] = {9: Sm90Heuristics, 10: Sm100Heuristics}

_override: Heuristics | None = None


def heuristics_for(device: torch.device) -> Heuristics:
    """The heuristics of a device's family; in deterministic mode, those that ignore rows."""
    return _override or _find_heuristics(device, is_deterministic())


@functools.cache
def _find_heuristics(device: torch.device, deterministic: bool) -> Heuristics:
    table: type[Heuristics] = GenericHeuristics
    if device.type == "cuda" and not torch.version.hip:
        table = TABLES.get(torch.cuda.get_device_capability(device)[0], GenericHeuristics)
    if deterministic:
        table = type(f"Deterministic{table.__name__}", (DeterministicHeuristics, table), {})
    if device.type != "cuda":
        return table()
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 0)  # absent on AMD
    return table(properties.multi_processor_count, shared_memory)


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; those of an H200 in Triton's interpreter."""
    return heuristics_for(device).num_sms


@contextmanager
def override_heuristics(heuristics: Heuristics) -> Iterator[None]:
    """Use `heuristics` on every device. Cached launches keep what they were built with."""
    global _override
    before, _override = _override, heuristics
    try:
        yield
    finally:
        _override = before
