"""Memory for results and temporaries of fused regions.

In: sizes, strides, a dtype. Out: an uninitialised tensor. Most of the time of a large CPU kernel is the
page faults of its fresh result, so large ones come from blocks that are kept when they are released
(`codegen/include/memory.h`): a block returns when the last tensor that shares its storage is gone, never before.
`set_reuse(False)` turns that off, `release()` gives what is kept back to the system.
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

# torch.empty_strided(sizes, strides, dtype=dtype) on the CPU, in half its time: no keywords, no dispatcher
empty_strided = _empty_strided_cpu

SMALLEST = 1 << 19  # bytes; below, malloc keeps memory by itself
MOST_KEPT = 4  # a fraction of the machine's memory: one part in so many

# DLPack's codes of the dtypes it has
CODES: dict[torch.dtype, tuple[int, int]] = {
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

_reuse = True


ALIGNMENT = 64  # bytes: a line of the cache


@dataclass(frozen=True, order=True)
class Lifetime:
    """A temporary: from the kernel that writes it to the last one that reads it."""

    first: int
    last: int
    bytes: int


def plan(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Where each temporary lies in one buffer, and how large that is: large ones first, each at the
    lowest place where nothing that lives at the same time is in its way."""
    places: dict[int, int] = {}
    for k in sorted(range(len(lifetimes)), key=lambda k: -lifetimes[k].bytes):
        one, place = lifetimes[k], 0
        for start, other in sorted((places[j], lifetimes[j]) for j in places):
            together = other.first <= one.last and one.first <= other.last
            if together and start < place + one.bytes and place < start + other.bytes:
                place = -(-(start + other.bytes) // ALIGNMENT) * ALIGNMENT
        places[k] = place
    total = max((places[k] + lifetimes[k].bytes for k in places), default=0)
    return [places[k] for k in range(len(lifetimes))], total


def set_reuse(on: bool) -> None:
    """Whether large results come from kept blocks (the default) or fresh from torch."""
    global _reuse
    _reuse = on
    if not on:
        release()


def release() -> None:
    """Gives the kept blocks back to the system; what anyone holds stays as it is."""
    if _pool.cache_info().currsize:
        _pool().release()


def kept_bytes() -> int:
    """Bytes kept for the next results."""
    return int(_pool().kept()) if _pool.cache_info().currsize else 0


def allocate(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor."""
    elements = 1
    for size in sizes:
        elements *= size
    if elements * dtype.itemsize < SMALLEST or not _reuse or dtype not in CODES:
        return replay.keep(empty_strided(sizes, strides, dtype))
    return _from_pool(sizes, strides, dtype)


def is_small(sizes: Sequence[Index], strides: Sequence[Index], dtype: torch.dtype) -> bool:
    """Whether `empty_strided` is what `allocate` would come to, for sizes that are known beforehand."""
    if not all(number.is_constant for number in (*sizes, *strides)):
        return False
    return math.prod(size.constant for size in sizes) * dtype.itemsize < SMALLEST


@functools.cache
def _pool() -> ctypes.CDLL:
    library = native.load((native.INCLUDE / "memory.h").read_text())
    library.make.restype = ctypes.c_void_p
    library.make.argtypes = [*[ctypes.c_int64] * 4, ctypes.c_char_p]
    library.kept.restype = ctypes.c_int64
    library.set_limit.argtypes = [ctypes.c_int64]
    library.set_limit(_machine_memory() // MOST_KEPT)
    return library


def _machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _from_pool(
    sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    reach = 1
    for size, stride in zip(sizes, strides, strict=True):
        reach += (size - 1) * stride
    code, bits = CODES[dtype]
    rank = len(sizes)
    numbers = struct.pack(f"{2 * rank}q", *sizes, *strides)
    managed = _pool().make(reach * dtype.itemsize, code, bits, rank, numbers)
    if managed is None:
        return torch.empty_strided(sizes, strides, dtype=dtype)  # raises torch's own error
    return replay.keep(from_dlpack(_capsule(managed, b"dltensor", None)))
