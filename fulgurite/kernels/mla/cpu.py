"""Multi-head latent attention (MLA) in C++: tensors in, one native call, tensors out.

In: the arguments of `mla.ops`, on the CPU. Out: the result, or `NotImplemented` for cases the
kernel does not support (float64, weights of another dtype than the queries, rows that are not
contiguous). Both calls are `replay.NativeKernel`s, so a recorded decode step runs them without
Python. One library is compiled per cache dtype, on first use.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import determinism, device, native, replay
from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.common.cpu_library import (
    DTYPE_CODES,
    build_translation_unit,
    cache_error,
)
from fulgurite.kernels.mla.prefill_plan import PrefillPlan
from fulgurite.kernels.mla.reference import fp8_row_layout
from fulgurite.kernels.tuning.mla import MLA_MIN_EXPANDED_QUERIES

HEADERS = ("vec16.h", "block_table.h", "mla.h", "mla_absorbed.h", "mla_expanded.h", "mla_run.h")
CACHE_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.uint8: "f8e4m3",
}
_pack_attention = struct.Struct("28qd4q").pack
_pack_store = struct.Struct("18qd2q").pack


def build_source(cache_dtype: torch.dtype) -> str:
    defines = [
        f"CACHE_T {CACHE_TYPES[cache_dtype]}",
        f"MIN_EXPANDED_QUERIES {MLA_MIN_EXPANDED_QUERIES}",
    ]
    return build_translation_unit(*HEADERS, defines=defines)


@functools.cache
def _load_kernels(cache_dtype: torch.dtype) -> tuple[replay.NativeKernel, replay.NativeKernel]:
    library = native.load(build_source(cache_dtype))
    attend = replay.NativeKernel(library, "mla_attention", make_error=cache_error)
    return attend, replay.NativeKernel(library, "store_mla_cache", make_error=cache_error)


def mla_attention(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    interleaved: bool,
    plan: PrefillPlan | None = None,
) -> Any:
    """`mla.ops.mla_attention`; C++ decides which sequences are expanded.

    In deterministic mode none is: the number of new tokens must not change results. It has no use
    for a `plan`.
    """
    if not _is_supported(q, cos, sin, cache) or kv_b.dtype != q.dtype or kv_b.stride(-1) != 1:
        return NotImplemented
    block_table, query_start_loc, seq_lens = metadata[:3]
    rope_dim, rank = 2 * cos.shape[1], kv_b.shape[2]
    nope_dim = q.shape[2] - rope_dim
    value_dim = kv_b.shape[1] - nope_dim
    out = replay.empty((q.shape[0], q.shape[1], value_dim), q.dtype)
    packed = _pack_attention(
        q.data_ptr(), kv_b.data_ptr(), cos.data_ptr(), sin.data_ptr(), cache.data_ptr(),
        block_table.data_ptr(), query_start_loc.data_ptr(), seq_lens.data_ptr(), out.data_ptr(),
        q.shape[0], seq_lens.shape[0], q.shape[1], nope_dim, rope_dim, rank, value_dim,
        cache.shape[1], *q.stride()[:2], *kv_b.stride()[:2], block_table.stride(0),
        *_slot_layout(cache, rank, rope_dim), DTYPE_CODES[q.dtype], interleaved, scale,
        device.num_cpu_threads(), block_table.shape[1], cache.shape[0],
        not determinism.is_deterministic(),
    )  # fmt: skip
    attend, _ = _load_kernels(cache.dtype)
    tensors = (q, kv_b, cos, sin, cache, block_table, query_start_loc, seq_lens, out)
    attend(packed, keep_alive=tensors)
    return out


def store_mla_cache(
    kv_a: Tensor,
    norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
) -> Any:
    """`mla.ops.store_mla_cache`."""
    if not _is_supported(kv_a, cos, sin, cache) or slot_mapping.dtype != torch.int64:
        return NotImplemented
    if norm.dtype not in DTYPE_CODES or not norm.is_contiguous():
        return NotImplemented
    if not slot_mapping.is_contiguous():
        return NotImplemented
    rank = norm.shape[0]
    rope_dim = kv_a.shape[1] - rank
    packed = _pack_store(
        kv_a.data_ptr(), norm.data_ptr(), cos.data_ptr(), sin.data_ptr(), cache.data_ptr(),
        slot_mapping.data_ptr(), kv_a.shape[0], rank, rope_dim, kv_a.stride(0), cache.shape[1],
        *_slot_layout(cache, rank, rope_dim), DTYPE_CODES[kv_a.dtype], DTYPE_CODES[norm.dtype],
        interleaved, eps, device.num_cpu_threads(), cache.shape[0] * cache.shape[1],
    )  # fmt: skip
    _, store = _load_kernels(cache.dtype)
    store(packed, keep_alive=(kv_a, norm, cos, sin, cache, slot_mapping))
    return None


def _slot_layout(cache: Tensor, rank: int, rope_dim: int) -> tuple[int, int, int, int]:
    """Bytes of a block and of a slot, and the offsets of the rotary key and the scale in a slot."""
    size = cache.element_size()
    row = fp8_row_layout(rank, rope_dim)
    offsets = (row.rope, row.scale) if size == 1 else (rank * size, 0)
    return cache.stride(0) * size, cache.stride(1) * size, *offsets


def _is_supported(new: Tensor, cos: Tensor, sin: Tensor, cache: Tensor) -> bool:
    if new.dtype not in DTYPE_CODES or cache.dtype not in CACHE_TYPES:
        return False
    if native.find_compiler() is None:
        return False
    if any(x.dtype != torch.float32 or not x.is_contiguous() for x in (cos, sin)):
        return False
    return new.stride(-1) == 1 and cache.stride(-1) == 1
