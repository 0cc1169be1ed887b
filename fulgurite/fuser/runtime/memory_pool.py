"""The memory pool for outputs and temporaries of fused regions on the CPU.

In: sizes, strides, a dtype. Out: an uninitialized tensor. Most of the time of a large CPU kernel goes into page
faults of its fresh output. So large outputs come from pooled blocks (`include/memory_pool.h`). A block returns to the pool
when the last tensor that shares its storage is gone, never before. `set_pooling(False)` turns the pool off;
`release_pool()` returns free blocks to the system.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._C._dynamo.guards import _empty_strided_cpu  # type: ignore[attr-defined]
from torch.utils.dlpack import from_dlpack

from fulgurite import native, replay
from fulgurite.fuser.ir.index import Index

# torch.empty_strided(sizes, strides, dtype=dtype) on the CPU in half its time: no keywords, no dispatcher
empty_strided = _empty_strided_cpu

MIN_POOLED_BYTES = 1 << 19  # malloc reuses smaller blocks by itself
POOL_MEMORY_DIVISOR = 4  # the pool keeps at most this part of the total memory

# dtypes that DLPack supports: type code and bits
DLPACK_CODES: dict[torch.dtype, tuple[int, int]] = {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.bool: (6, 8),
}

_pooling = True


ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, order=True)
class Lifetime:
    """The lifetime of a temporary: from the kernel that writes it to the last that reads it."""

    first: int
    last: int
    bytes: int


def assign_offsets(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Place temporaries in one arena: return the offset of each, and the arena's size.

    Large ones first, each at the lowest offset where no temporary with an overlapping lifetime lies.
    """
    offsets: dict[int, int] = {}
    for k in sorted(range(len(lifetimes)), key=lambda k: -lifetimes[k].bytes):
        lifetime, offset = lifetimes[k], 0
        for start, other in sorted((offsets[j], lifetimes[j]) for j in offsets):
            overlaps = other.first <= lifetime.last and lifetime.first <= other.last
            collides = start < offset + lifetime.bytes and offset < start + other.bytes
            if overlaps and collides:
                offset = -(-(start + other.bytes) // ALIGNMENT) * ALIGNMENT
        offsets[k] = offset
    total = max((offsets[k] + lifetimes[k].bytes for k in offsets), default=0)
    return [offsets[k] for k in range(len(lifetimes))], total


def set_pooling(enabled: bool) -> None:
    """Allocate large outputs from the pool (the default), or from torch."""
    global _pooling
    _pooling = enabled
    if not enabled:
        release_pool()


def release_pool() -> None:
    """Return free blocks to the system; blocks in use are not affected."""
    if _pool.cache_info().currsize:
        _pool().release_pool()


def pooled_bytes() -> int:
    """Bytes of the free blocks in the pool."""
    return int(_pool().get_pooled_bytes()) if _pool.cache_info().currsize else 0


def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialized tensor; large ones come from the pool."""
    elements = 1
    for size in sizes:
        elements *= size
    if elements * dtype.itemsize < MIN_POOLED_BYTES or not _pooling or dtype not in DLPACK_CODES:
        return replay.hold_tensor(empty_strided(sizes, strides, dtype))
    return _allocate_from_pool(sizes, strides, dtype)


def is_small(sizes: Sequence[Index], strides: Sequence[Index], dtype: torch.dtype) -> bool:
    """Whether sizes are static and `allocate` would use `empty_strided`."""
    if not all(index.is_constant for index in (*sizes, *strides)):
        return False
    return math.prod(size.constant for size in sizes) * dtype.itemsize < MIN_POOLED_BYTES


@functools.cache
def _pool() -> ctypes.CDLL:
    library = native.load((native.INCLUDE / "memory_pool.h").read_text())
    library.allocate_tensor.restype = ctypes.c_void_p
    library.allocate_tensor.argtypes = [*[ctypes.c_int64] * 4, ctypes.c_char_p]
    library.get_pooled_bytes.restype = ctypes.c_int64
    library.set_limit.argtypes = [ctypes.c_int64]
    library.set_limit(_total_memory() // POOL_MEMORY_DIVISOR)
    return library


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _allocate_from_pool(
    sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    extent = 1
    for size, stride in zip(sizes, strides, strict=True):
        extent += (size - 1) * stride
    code, bits = DLPACK_CODES[dtype]
    rank = len(sizes)
    layout = struct.pack(f"{2 * rank}q", *sizes, *strides)
    managed = _pool().allocate_tensor(extent * dtype.itemsize, code, bits, rank, layout)
    if managed is None:
        return torch.empty_strided(sizes, strides, dtype=dtype)  # raises torch's own error
    return replay.hold_tensor(from_dlpack(_new_capsule(managed, b"dltensor", None)))
