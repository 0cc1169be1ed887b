"""The C++ of this folder as a loaded library, and its structures as ctypes.

In: nothing but the machine (or a named instruction set, for tests). Out: `Library.linear(call)`, the
address of a `Call` in, the work done. Built once for a machine and kept in the cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

from fulgurite import native
from fulgurite.errors import ArgumentError

INCLUDE = Path(__file__).parents[1] / "include"
PARTS = (
    "weight.h",
    "activations.h",
    "linear.h",
    "linear_many.h",
    "linear_run.h",
    "grouped_linear.h",
    "read.h",
)
SIMD = {"avx512_vnni": "simd_avx512.h", "avx2": "simd_avx2.h", "plain": "simd_plain.h"}


# what the checks of paged.h found
PAGING_PROBLEMS = (
    "query_starts rise from 0 to at most the number of queries, and these don't",
    "a sequence has more keys than its row of the table has room for, or fewer than new tokens",
    "the table names a page that does not exist",
    "a slot lies behind the last page",
)


def paging_problem(status: int) -> ArgumentError:
    return ArgumentError(PAGING_PROBLEMS[status - 1], next="check the tables of pages and lengths")


class Weight(ctypes.Structure):
    """`Weight` of weight.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("codes_kind", ctypes.c_int32),
        ("scale_type", ctypes.c_int32),
        ("minimum_type", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
        ("row_scales", ctypes.c_void_p),
        ("super_scales", ctypes.c_void_p),
        ("super_minimums", ctypes.c_void_p),
        ("table", ctypes.c_uint8 * 16),
        ("values", ctypes.c_float * 16),
    )


class Call(ctypes.Structure):
    """`Call` of linear.h."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("up_bias", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("given", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("out_stride", ctypes.c_int64),
        ("type", ctypes.c_int32),
        ("integer", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


@functools.cache
def best_instructions() -> str:
    """The instruction set this machine's kernels use."""
    flags = set(native.processor().replace("\n", " ").split())
    if {"avx512f", "avx512bw", "avx512_vnni"} <= flags:
        return "avx512_vnni"
    return "avx2" if {"avx2", "fma"} <= flags else "plain"


@functools.cache
def library(instructions: str | None = None) -> ctypes.CDLL:
    """The kernels, compiled for this machine."""
    loaded = native.load(source(instructions or best_instructions()))
    loaded.linear.argtypes = [ctypes.c_void_p]
    loaded.linear.restype = None
    loaded.plain_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    loaded.plain_read.restype = ctypes.c_uint64
    loaded.instructions.restype = ctypes.c_char_p
    sizes = (loaded.weight_size(), loaded.call_size())
    expected = (ctypes.sizeof(Weight), ctypes.sizeof(Call))
    assert sizes == expected, f"structures of {sizes} bytes in C++ and {expected} in Python"
    return loaded


def source(instructions: str) -> str:
    """The text of the kernels of linears."""
    return translation_unit(SIMD[instructions], *PARTS)


def translation_unit(
    *parts: str, defines: Sequence[str] = (), shared: Sequence[str] = ("numbers.h", "math.h")
) -> str:
    """Files of this folder as one text, after numbers and functions shared with generated kernels."""
    texts = [
        "#define E4M3_OVERFLOW 0x7fu",
        *(f"#define {name}" for name in defines),
        *((native.INCLUDE / name).read_text() for name in shared),
        *((INCLUDE / name).read_text() for name in parts),
    ]
    return "\n".join(texts)
