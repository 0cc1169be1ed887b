"""Paged attention in C++: tensors in, one native call, tensors out.

In: the arguments of `attention.ops`, on the CPU. Out: the result, or `NotImplemented` for cases the
kernel does not support (float64, caches whose last dimension is not contiguous). Both calls are
`replay.NativeKernel`s, so a recorded decode step runs them without Python. One library is compiled
per cache dtype, on first use.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.attention.metadata import (
    AttentionMetadata,
    AttentionOptions,
    ContextShard,
)
from fulgurite.kernels.common.cpu_library import (
    DTYPE_CODES,
    build_translation_unit,
    cache_error,
)

HEADERS = ("vec16.h", "block_table.h", "attention.h", "attention_run.h")
CACHE_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}
_pack_attention = struct.Struct("28q3d6q").pack
_pack_store = struct.Struct("13qd13qd2q").pack


def build_source(cache_dtype: torch.dtype) -> str:
    return build_translation_unit(*HEADERS, defines=[f"CACHE_T {CACHE_TYPES[cache_dtype]}"])


@functools.cache
def _load_kernels(cache_dtype: torch.dtype) -> tuple[replay.NativeKernel, replay.NativeKernel]:
    library = native.load(build_source(cache_dtype))
    attend = replay.NativeKernel(library, "paged_attention", make_error=cache_error)
    return attend, replay.NativeKernel(library, "store_kv_cache", make_error=cache_error)


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    shard: ContextShard | None = None,
) -> Any:
    """`attention.ops.paged_attention`; with a shard also the log-sum-exp."""
    sinks, value_dim = options.sinks_N, options.value_dim
    assert value_dim is not None, "the operator sets it"
    if not _is_supported(q, key_cache, value_cache):
        return NotImplemented
    if sinks is not None and sinks.dtype not in DTYPE_CODES:
        return NotImplemented
    block_table, query_start_loc, seq_lens = metadata[:3]
    out = replay.empty((q.shape[0], q.shape[1], value_dim), q.dtype)
    lse = None if shard is None else torch.full(q.shape[:2], float("-inf"))
    value_source = key_cache if value_cache is None else value_cache
    packed = _pack_attention(
        q.data_ptr(),
        key_cache.data_ptr(),
        0 if value_cache is None else value_cache.data_ptr(),
        block_table.data_ptr(),
        query_start_loc.data_ptr(),
        seq_lens.data_ptr(),
        0 if sinks is None else sinks.data_ptr(),
        out.data_ptr(),
        *q.shape[:1],
        seq_lens.shape[0],
        q.shape[1],
        key_cache.shape[2],
        key_cache.shape[3],
        value_dim,
        key_cache.shape[1],
        *q.stride()[:2],
        block_table.stride(0),
        *key_cache.stride()[:3],
        *value_source.stride()[:3],
        options.window or 0,
        options.chunk or 0,
        DTYPE_CODES[q.dtype],
        0 if sinks is None else DTYPE_CODES[sinks.dtype],
        options.scale * options.key_scale,
        options.softcap or 0.0,
        options.value_scale if value_cache is not None else options.key_scale,
        device.num_cpu_threads(),
        block_table.shape[1],
        key_cache.shape[0],
        0 if lse is None else lse.data_ptr(),
        *((0, 1) if shard is None else shard),
    )
    attend, _ = _load_kernels(key_cache.dtype)
    tensors = (q, key_cache, value_cache, block_table, query_start_loc, seq_lens, sinks, out, lse)
    attend(packed, keep_alive=tensors)
    return out if lse is None else (out, lse)


def store_kv_cache(
    k: Tensor,
    v: Tensor | None,
    key_cache: Tensor,
    value_cache: Tensor | None,
    slot_mapping: Tensor,
    key_scale: float,
    value_scale: float,
) -> Any:
    """`attention.ops.store_kv_cache`."""
    if not _is_supported(k, key_cache, value_cache):
        return NotImplemented
    if slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        return NotImplemented
    if v is not None and (v.dtype not in DTYPE_CODES or v.stride(-1) != 1):
        return NotImplemented
    has_values = v is not None and value_cache is not None
    packed = _pack_store(
        *_pack_rows(k, key_cache, slot_mapping),
        key_scale,
        *(_pack_rows(v, value_cache, slot_mapping) if has_values else [0] * 13),
        value_scale,
        device.num_cpu_threads(),
        key_cache.shape[0] * key_cache.shape[1],
    )
    _, store = _load_kernels(key_cache.dtype)
    store(packed, keep_alive=(k, v, key_cache, value_cache, slot_mapping))
    return None


def _pack_rows(new: Any, cache: Any, slot_mapping: Tensor) -> tuple[int, ...]:
    return (
        new.data_ptr(),
        cache.data_ptr(),
        slot_mapping.data_ptr(),
        *new.shape,
        *new.stride()[:2],
        *cache.stride()[:3],
        cache.shape[1],
        DTYPE_CODES[new.dtype],
    )


def _is_supported(new: Tensor, key_cache: Tensor, value_cache: Tensor | None) -> bool:
    if new.dtype not in DTYPE_CODES or key_cache.dtype not in CACHE_TYPES:
        return False
    if native.find_compiler() is None:
        return False
    if value_cache is not None and (
        value_cache.dtype != key_cache.dtype or value_cache.stride(-1) != 1
    ):
        return False
    return new.stride(-1) == 1 and key_cache.stride(-1) == 1
