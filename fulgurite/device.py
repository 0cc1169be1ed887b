"""Facts of the hardware: cores, cache sizes, the measured copy bandwidth, dtypes that run natively.

In: nothing but the machine. Out: a `Device`. The bandwidth is measured once (a third of a second)
and kept in the cache for this processor and number of threads.
"""

from __future__ import annotations

import functools
import glob
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from fulgurite import cache, native
from fulgurite.config import environment
from fulgurite.errors import ArgumentError


@dataclass(frozen=True)
class Device:
    """What the cost model needs to know of a device."""

    name: str
    threads: int
    copy_bandwidth: float  # bytes read plus bytes written a second, by all threads
    flops: float  # simple float32 operations a second, by all threads
    first_level_cache: int  # bytes a core
    second_level_cache: int
    native_dtypes: tuple[torch.dtype, ...]


def cpu_threads() -> int:
    """The threads generated kernels use."""
    asked = environment("FULGURITE_THREADS")
    if asked is None:
        return torch.get_num_threads()
    if not asked.isdecimal() or int(asked) < 1:
        raise ArgumentError(f"FULGURITE_THREADS={asked} must be a whole number, 1 or more")
    return int(asked)


def cpu() -> Device:
    return _cpu(cpu_threads())


@functools.cache
def _cpu(threads: int) -> Device:
    first, second = _cache_sizes()
    lanes = 16 if "avx512f" in native.processor() else 8 if "avx2" in native.processor() else 4
    return Device(
        name=_cpu_name(),
        threads=threads,
        copy_bandwidth=_copy_bandwidth(threads),
        flops=threads * 2.5e9 * lanes,
        first_level_cache=first,
        second_level_cache=second,
        native_dtypes=_native_dtypes(),
    )


@functools.cache
def cuda(index: int = 0) -> Device:
    """An NVIDIA GPU: threads are its multiprocessors, the first level cache is their registers."""
    facts = torch.cuda.get_device_properties(index)
    return Device(
        name=facts.name,
        threads=facts.multi_processor_count,
        copy_bandwidth=_cuda_copy_bandwidth(index),
        flops=facts.multi_processor_count * 128 * 1.7e9,
        first_level_cache=256 << 10,
        second_level_cache=facts.L2_cache_size,
        native_dtypes=(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    )


def _cuda_copy_bandwidth(index: int) -> float:
    key = cache.digest("copy bandwidth", torch.cuda.get_device_name(index))
    kept = cache.read_text("device", key)
    if kept is not None:
        return float(json.loads(kept)["copy_bandwidth"])
    measured = measure_cuda_copy_bandwidth(index)
    cache.write_text("device", key, json.dumps({"copy_bandwidth": measured}))
    return measured


def measure_cuda_copy_bandwidth(index: int = 0, megabytes: int = 1024, repeats: int = 20) -> float:
    """Bytes read plus written a second when torch copies a tensor into one that exists."""
    place = torch.device("cuda", index)
    source = torch.ones(megabytes << 18, device=place)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    best = sorted(times)[len(times) // 4]
    return 2 * source.numel() * source.element_size() / best


def _cpu_name() -> str:
    for line in native.processor().splitlines():
        if "model name" in line:
            return line.split(":", 1)[1].strip()
    return "cpu"


def _native_dtypes() -> tuple[torch.dtype, ...]:
    flags = native.processor()
    dtypes = [torch.float32, torch.float64]
    if "avx512_bf16" in flags:
        dtypes.append(torch.bfloat16)
    if "avx512_fp16" in flags:
        dtypes.append(torch.float16)
    return tuple(dtypes)


def _cache_sizes() -> tuple[int, int]:
    """Bytes of the first and second level data cache of a core; common sizes where unknown."""
    found = {1: 32 << 10, 2: 1 << 20}
    for folder in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*"):
        try:
            level = int(Path(folder, "level").read_text())
            kind = Path(folder, "type").read_text().strip()
            size = Path(folder, "size").read_text().strip()
        except OSError:
            continue
        if kind in ("Data", "Unified") and level in found and size.endswith("K"):
            found[level] = int(size[:-1]) << 10
    return found[1], found[2]


def _copy_bandwidth(threads: int) -> float:
    key = cache.digest("copy bandwidth", native.processor(), str(threads), str(os.cpu_count()))
    kept = cache.read_text("device", key)
    if kept is not None:
        return float(json.loads(kept)["copy_bandwidth"])
    measured = measure_copy_bandwidth(threads)
    cache.write_text("device", key, json.dumps({"copy_bandwidth": measured}))
    return measured


def measure_copy_bandwidth(threads: int, megabytes: int = 64, repeats: int = 7) -> float:
    """Bytes read plus written a second when torch copies a tensor into one that exists."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        source = torch.ones(megabytes << 18)
        target = torch.empty_like(source)
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            target.copy_(source)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    best = sorted(times)[len(times) // 4]
    return 2 * source.numel() * source.element_size() / best
