"""What cost models know of a device: cores, cache sizes, copy bandwidth, native dtypes.

In: the hardware this process runs on. Out: a `DeviceInfo`. The copy bandwidth is measured once (a third
of a second) and stored in the cache for this CPU and number of threads, or for this GPU.
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
from fulgurite.config import read_env
from fulgurite.errors import ArgumentError


@dataclass(frozen=True)
class DeviceInfo:
    """Properties of a device that cost models use."""

    name: str
    num_cores: int  # CPU threads that kernels use; streaming multiprocessors (SMs) of a GPU
    copy_bandwidth: float  # bytes read plus bytes written per second, by all cores
    flops: float  # simple float32 operations per second, by all cores
    l1_cache_bytes: int  # per core
    l2_cache_bytes: int
    native_dtypes: tuple[torch.dtype, ...]
    shared_memory_bytes: int = 227 << 10  # of a GPU, that one block of threads may have (H200)


def num_cpu_threads() -> int:
    """Number of threads that CPU kernels use."""
    requested = read_env("FULGURITE_NUM_THREADS")
    if requested is None:
        return torch.get_num_threads()
    if not requested.isdecimal() or int(requested) < 1:
        raise ArgumentError(f"FULGURITE_NUM_THREADS={requested} must be a positive integer")
    return int(requested)


def cpu_info() -> DeviceInfo:
    """The CPU, with as many cores as kernels use threads."""
    return _cpu_info(num_cpu_threads())


@functools.cache
def _cpu_info(threads: int) -> DeviceInfo:
    l1_bytes, l2_bytes = _cache_sizes()
    flags = native.cpu_fingerprint()
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    return DeviceInfo(
        name=cpu_name(),
        num_cores=threads,
        copy_bandwidth=_cached_copy_bandwidth(threads),
        flops=threads * 2.5e9 * lanes,
        l1_cache_bytes=l1_bytes,
        l2_cache_bytes=l2_bytes,
        native_dtypes=_native_dtypes(),
    )


@functools.cache
def cuda_info(index: int = 0) -> DeviceInfo:
    """An NVIDIA GPU. Its cores are SMs; the registers of an SM take the place of the L1 cache."""
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        name=properties.name,
        num_cores=properties.multi_processor_count,
        copy_bandwidth=_cached_cuda_copy_bandwidth(index),
        flops=properties.multi_processor_count * 128 * 1.7e9,
        l1_cache_bytes=256 << 10,
        l2_cache_bytes=properties.L2_cache_size,
        native_dtypes=(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        # the driver keeps 1 KiB of each SM's for itself
        shared_memory_bytes=properties.shared_memory_per_multiprocessor - (1 << 10),
    )


def _cached_cuda_copy_bandwidth(index: int) -> float:
    key = cache.digest("copy bandwidth", torch.cuda.get_device_name(index))
    stored = cache.read_text("device", key)
    if stored is not None:
        return float(json.loads(stored)["copy_bandwidth"])
    measured = measure_cuda_copy_bandwidth(index)
    cache.write_text("device", key, json.dumps({"copy_bandwidth": measured}))
    return measured


def measure_cuda_copy_bandwidth(index: int = 0, megabytes: int = 1024, repeats: int = 20) -> float:
    """Bytes read plus written per second when torch copies into an allocated tensor."""
    device = torch.device("cuda", index)
    source = torch.ones(megabytes << 18, device=device)
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


def cpu_name() -> str:
    """The CPU's name as the system prints it."""
    for line in native.cpu_fingerprint().splitlines():
        if "model name" in line:
            return line.split(":", 1)[1].strip()
    return "cpu"


def _native_dtypes() -> tuple[torch.dtype, ...]:
    flags = native.cpu_fingerprint()
    dtypes = [torch.float32, torch.float64]
    if "avx512_bf16" in flags:
        dtypes.append(torch.bfloat16)
    if "avx512_fp16" in flags:
        dtypes.append(torch.float16)
    return tuple(dtypes)


def _cache_sizes() -> tuple[int, int]:
    """Bytes of a core's L1 and L2 data cache; common sizes if unknown."""
    sizes = {1: 32 << 10, 2: 1 << 20}
    for folder in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*"):
        try:
            level = int(Path(folder, "level").read_text())
            kind = Path(folder, "type").read_text().strip()
            size = Path(folder, "size").read_text().strip()
        except OSError:
            continue
        if kind in ("Data", "Unified") and level in sizes and size.endswith("K"):
            sizes[level] = int(size[:-1]) << 10
    return sizes[1], sizes[2]


def _cached_copy_bandwidth(threads: int) -> float:
    key = cache.digest(
        "copy bandwidth", native.cpu_fingerprint(), str(threads), str(os.cpu_count())
    )
    stored = cache.read_text("device", key)
    if stored is not None:
        return float(json.loads(stored)["copy_bandwidth"])
    measured = measure_copy_bandwidth(threads)
    cache.write_text("device", key, json.dumps({"copy_bandwidth": measured}))
    return measured


def measure_copy_bandwidth(threads: int, megabytes: int = 64, repeats: int = 7) -> float:
    """Bytes read plus written per second when torch copies into an allocated tensor."""
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


def choose_compute_dtype(stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The checkpoint's dtype; float32 on a CPU without instructions for it."""
    if device.type != "cpu" or stored == torch.float32:
        return stored
    return stored if stored in cpu_info().native_dtypes else torch.float32


COMPUTE_DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}


def resolve_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype of a name; a dtype and None stay as they are."""
    if not isinstance(dtype, str):
        return dtype
    name = dtype.removeprefix("torch.")
    if name not in COMPUTE_DTYPES:
        raise ArgumentError(
            f"dtype={dtype!r} is not supported",
            next=f"use {', '.join(COMPUTE_DTYPES)}, or quantize= for quantized weights",
        )
    return COMPUTE_DTYPES[name]


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device by name; None: a GPU if there is one. ArgumentError if it can't be used."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"{device!r} is not a device", next="use cpu or cuda") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device {device} is not supported", next="use cpu or cuda")
    if resolved.type == "cuda" and not 0 <= (resolved.index or 0) < torch.cuda.device_count():
        reason = "" if torch.version.cuda else " and is built without CUDA"
        raise ArgumentError(
            f"there is no device {device}: torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} GPUs{reason}",
            next="use cpu, or install a torch that is built for this GPU",
        )
    return resolved


# What allocators say in a plain RuntimeError: torch's on a CPU, the CUDA driver and cuBLAS.
OUT_OF_MEMORY_MESSAGES = ("can't allocate memory", "out of memory", "cublas_status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that an allocation failed."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        text in message for text in OUT_OF_MEMORY_MESSAGES
    )
