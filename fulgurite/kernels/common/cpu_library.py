"""Hand-written C++ kernels: translation units of `kernels/include`, and the GEMM library.

In: names of headers, or an instruction set. Out: C++ source for `native.load`, or the loaded
library of quantized linears, whose `linear` takes the address of a `LinearStruct`. Libraries are
compiled once for a CPU and kept in the kernel cache.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from fulgurite import native
from fulgurite.errors import ArgumentError
from fulgurite.kernels.tuning.cpu import CPU_TABLES

INCLUDE = Path(__file__).parents[1] / "include"
LINEAR_HEADERS = (
    "weight.h",
    "activations.h",
    "linear.h",
    "linear_large_m.h",
    "linear_run.h",
    "grouped_linear.h",
    "memory_read.h",
)
SIMD = {"avx512_vnni": "simd_avx512.h", "avx2": "simd_avx2.h", "generic": "simd_generic.h"}
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as C++ kernels number them

# errors of block_table.h, by status - 1
CACHE_ERRORS = (
    "query_start_loc must rise from 0 to at most the number of query tokens",
    "a sequence has more tokens than its row of block_table holds, or fewer than query tokens",
    "block_table names a cache block that does not exist",
    "slot_mapping names a slot past the last cache block",
)


def cache_error(status: int) -> ArgumentError:
    """The error that a kernel's non-zero status stands for."""
    return ArgumentError(
        CACHE_ERRORS[status - 1],
        next="check block_table, slot_mapping, query_start_loc and seq_lens",
    )


class WeightStruct(ctypes.Structure):
    """`Weight` of weight.h: a quantized weight in the kernels' layout."""

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


class LinearStruct(ctypes.Structure):
    """`LinearArgs` of linear_run.h: the arguments of one `linear` call."""

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
def best_instruction_set() -> str:
    """The best instruction set that this CPU has and the kernels support."""
    flags = set(native.cpu_fingerprint().replace("\n", " ").split())
    if {"avx512f", "avx512bw", "avx512_vnni"} <= flags:
        return "avx512_vnni"
    return "avx2" if {"avx2", "fma"} <= flags else "generic"


@functools.cache
def load_library(instructions: str | None = None) -> ctypes.CDLL:
    """The kernels of quantized linears, compiled for this CPU."""
    loaded = native.load(build_source(instructions or best_instruction_set()))
    loaded.linear.argtypes = [ctypes.c_void_p]
    loaded.linear.restype = None
    loaded.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    loaded.read_memory.restype = ctypes.c_uint64
    loaded.instructions.restype = ctypes.c_char_p
    sizes = (loaded.weight_size(), loaded.call_size())
    expected = (ctypes.sizeof(WeightStruct), ctypes.sizeof(LinearStruct))
    assert sizes == expected, f"struct sizes differ: {sizes} bytes in C++, {expected} in Python"
    return loaded


def build_source(instructions: str) -> str:
    """C++ source of the kernels of quantized linears."""
    return build_translation_unit(SIMD[instructions], *LINEAR_HEADERS, instructions=instructions)


def build_translation_unit(
    *headers: str,
    defines: Sequence[str] = (),
    shared: Sequence[str] = ("numbers.h", "math.h"),
    instructions: str | None = None,
) -> str:
    """Headers of `kernels/include` as one source, after those shared with generated kernels.

    The tuned constants of the instruction set (this CPU's by default) come in between.
    """
    texts = [
        "#define E4M3_OVERFLOW 0x7fu",
        *(f"#define {name}" for name in defines),
        *((native.INCLUDE / name).read_text() for name in shared),
        CPU_TABLES[instructions or best_instruction_set()].to_cpp(),
        *((INCLUDE / name).read_text() for name in headers),
    ]
    return "\n".join(texts)
