# mypy: allow-untyped-defs, allow-incomplete-defs
"""Paged attention on GPUs: one FlashAttention-style Triton kernel for prefill and decode.

    out[t, n] = sum_j p_j value[j],   p = softmax over the visible keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

In: the arguments of `attention.ops`, on a GPU. Out: the result, or `NotImplemented`. This file
chooses the launch and allocates memory; the kernel is in `triton_kernel.py`.

    T  query tokens    S  sequences    N  query heads    K  key heads    H  key    V  value
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.attention.metadata import (
    AttentionMetadata,
    AttentionOptions,
    ContextShard,
)
from fulgurite.kernels.attention.triton_kernel import attention_kernel
from fulgurite.kernels.common.pdl import in_pdl_region
from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_pdl import pdl_options
from fulgurite.kernels.elementwise.ops import KVCacheSlots, ProjectedQKV, QKNorm
from fulgurite.kernels.elementwise.triton_elementwise import (
    SUPPORTED_DTYPES,
    is_cache_supported,
    is_rope_supported,
)
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning.heuristics import heuristics_for

MAX_PARTIAL_BYTES = 32 << 20  # of the parts of all contexts of a step


class LaunchKey(NamedTuple):
    """What a launch depends on besides its tensors."""

    device: torch.device
    query_dtype: torch.dtype
    cache_dtype: torch.dtype
    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    sequences: int
    max_query_len: int
    max_seq_len: int
    window: int | None
    chunk: int | None
    has_softcap: bool
    has_sinks: bool
    values_in_keys: bool
    is_fused: bool
    has_norm: bool
    has_rope: bool
    interleaved: bool
    use_pdl: bool
    is_deterministic: bool
    is_sharded: bool


class AttentionLaunch(NamedTuple):
    """The part of a launch that is the same for every layer of a step."""

    grid: tuple[int, int, int]
    tiles: int
    splits: int
    parts: int  # partial results of a row, at most
    cache_max: float  # a float8 cache saturates here
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def build_launch(key: LaunchKey) -> AttentionLaunch:
    """Blocks, KV splits and the kernel's constants."""
    heuristics = heuristics_for(key.device)
    group, compute = key.heads // key.key_heads, _compute_dtype(key.query_dtype, key.cache_dtype)
    is_float32 = compute is tl.float32
    max_keys = min(key.max_seq_len, key.window or key.max_seq_len, key.chunk or key.max_seq_len)
    rows = key.max_query_len * group
    config = heuristics.attention_config(
        rows, key.key_dim, is_float32, key.sequences * key.key_heads, max(max_keys, 1)
    )
    splits = parts = config.split_k
    if config.part_k:
        parts = count_parts(key.max_seq_len, config.part_k)
        query_rows = key.sequences * key.max_query_len * key.heads
        splits = limit_splits(splits, parts, query_rows * next_power_of_2(key.value_dim))
    first_width = max(1 << (key.key_dim.bit_length() - 1), 16)
    rest_width = max(16, next_power_of_2(max(key.key_dim - first_width, 1)))
    value_width = max(16, next_power_of_2(key.value_dim))
    tiles = cdiv(rows, config.block_m)
    merge_splits = min(heuristics.attention_merge_splits, next_power_of_2(splits))
    merge_rows = max(1, heuristics.attention_merge_elements // (merge_splits * value_width))
    constants = dict(
        HEADS=key.heads, GROUP=group, H=key.key_dim, H1=first_width, H2=rest_width,
        V=key.value_dim, BV=value_width, BLOCK_SIZE=key.block_size,
        VALUES_IN_KEYS=key.values_in_keys, HAS_SINKS=key.has_sinks, SOFTCAP=key.has_softcap,
        SPLIT=splits > 1,
        # one masked loop: a window or chunk masks most blocks; a decode step waits for memory once
        ONE_LOOP=bool(key.window or key.chunk) or key.max_query_len == 1,
        PRECISION="ieee" if is_float32 else "tf32", COMPUTE=compute, BM=config.block_m,
        BN=config.block_n, MIN_SPLIT_KEYS=heuristics.attention_min_split_keys,
        PART_KEYS=config.part_k,
        MERGE_SPLITS=merge_splits,
        MERGE_ROWS=min(config.block_m, next_power_of_2(rows), merge_rows),
        FUSED=key.is_fused, NORM=key.has_norm, ROPE=key.has_rope, INTERLEAVED=key.interleaved,
        SHARDED=key.is_sharded,
        num_warps=config.num_warps, num_stages=config.num_stages,
        **pdl_options(key.device, key.use_pdl),
    )  # fmt: skip
    is_float8 = key.cache_dtype.itemsize == 1
    cache_max = torch.finfo(key.cache_dtype).max if is_float8 else float("inf")
    grid = (key.sequences * tiles + 1, key.key_heads, splits)
    return AttentionLaunch(grid, tiles, splits, parts, cache_max, constants)


def count_parts(keys: int, part_keys: int) -> int:
    """Parts of a context of so many keys (`triton_kernel.find_part`)."""
    level = (max(keys - 1, 0) // (16 * part_keys) + 1).bit_length() - 1
    first = 16 * part_keys * ((1 << level) - 1)
    return level * 16 + max(cdiv(keys - first, part_keys << level), 1)


def limit_splits(splits: int, parts: int, elements: int) -> int:
    """Programs that share the parts of a context: one if all partial results are too large to store.

    elements   of the results of one part
    """
    return min(splits, parts) if 4 * elements * parts <= MAX_PARTIAL_BYTES else 1


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    shard: ContextShard | None = None,
    new: tuple[ProjectedQKV, Tensor] | None = None,
) -> Any:
    """`attention.ops.paged_attention`; with a shard also the log-sum-exp.

    `new`: heads to norm, rotate and store, and their slots.
    """
    scale, value_dim = options.scale * options.key_scale, options.value_dim
    if q.dtype not in SUPPORTED_DTYPES or q.stride(-1) != 1 or key_cache.stride(-1) != 1:
        return NotImplemented
    if scale <= 0:
        return NotImplemented
    if value_cache is not None and (
        value_cache.dtype != key_cache.dtype or value_cache.stride(-1) != 1
    ):
        return NotImplemented
    block_table, query_start_loc, seq_lens, max_query_len, max_seq_len = metadata[:5]
    assert value_dim is not None and max_query_len is not None and max_seq_len is not None
    tokens, heads, key_dim = q.shape
    sequences, key_heads = seq_lens.shape[0], key_cache.shape[2]
    lse = None if shard is None else torch.full((tokens, heads), -torch.inf, device=q.device)
    if q.numel() == 0 or sequences == 0 or max_query_len == 0:
        out = torch.zeros((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
        return out if lse is None else (out, lse)
    qkv, slot_mapping = new or (_NO_NEW_TOKENS, seq_lens)
    launch = build_launch(LaunchKey(
        q.device, q.dtype, key_cache.dtype, heads, key_heads, key_dim, value_dim,
        key_cache.shape[1], sequences, max_query_len, max_seq_len, options.window, options.chunk,
        options.softcap is not None, options.sinks_N is not None, value_cache is None,
        new is not None, qkv.norms is not None, qkv.cos is not None, qkv.interleaved,
        in_pdl_region(), is_deterministic(), shard is not None,
    ))  # fmt: skip
    splits = launch.splits
    out = torch.empty((tokens, heads, value_dim), dtype=q.dtype, device=q.device)
    partial_acc = partial_max = partial_sum = counters = out
    if splits > 1:
        count = tokens * heads * launch.parts
        partial_acc = torch.empty(count * launch.constants["BV"], device=q.device)
        partial_max, partial_sum = torch.empty(2, count, device=q.device).unbind(0)
        counters = acquire_counters(q.device, sequences * launch.tiles * key_heads)
    new_k, new_v = (q, q) if new is None else (qkv.k_XKH, qkv.v_XKV)
    norms = qkv.norms or QKNorm(q, q, 0.0, 0.0)
    cos, sin = (q, q) if qkv.cos is None or qkv.sin is None else (qkv.cos, qkv.sin)
    value_source = key_cache if value_cache is None else value_cache
    attention_kernel[launch.grid](
        q, key_cache, value_source, block_table, query_start_loc, seq_lens,
        q if options.sinks_N is None else options.sinks_N, out,
        partial_acc, partial_max, partial_sum, counters,
        scale, options.softcap or 1.0,
        options.key_scale if value_cache is None else options.value_scale,
        options.window or 0, options.chunk or 0, launch.tiles, splits, launch.parts, tokens, sequences,
        *q.stride()[:2], block_table.stride(0), *key_cache.stride()[:3],
        *value_source.stride()[:3],
        new_k, new_v, slot_mapping, norms.query, norms.key, cos, sin, *new_k.stride()[:2],
        *new_v.stride()[:2], 0 if qkv.cos is None else cos.shape[-1], norms.eps, norms.offset,
        launch.cache_max, q if lse is None else lse, *((0, 1) if shard is None else shard),
        **launch.constants,
    )  # fmt: skip
    return out if lse is None else (out, lse)


_NOTHING: Any = None
_NO_NEW_TOKENS = ProjectedQKV(_NOTHING, _NOTHING, _NOTHING, None, None, None, False)


def fused_decode_attention(
    qkv: ProjectedQKV,
    cache: KVCacheSlots,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Any:
    """`attention.ops.fused_decode_attention`."""
    q, size = qkv.q_XNH, qkv.q_XNH.shape[-1]
    is_one_tile = size == next_power_of_2(size) and size >= 16
    same_dtype = all(t.dtype == q.dtype and t.dim() == 3 and t.stride(-1) == 1 for t in qkv[:3])
    if q.shape[0] == 0 or not is_one_tile or not same_dtype:
        return NotImplemented
    if not is_rope_supported(q, qkv.cos, qkv.sin) or not is_cache_supported(cache):
        return NotImplemented
    new = (qkv, cache.slot_mapping_T)
    caches = cache.key_cache_PBKH, cache.value_cache_PBKV
    return paged_attention(q, *caches, metadata, options, new=new)


def _compute_dtype(query: torch.dtype, cache: torch.dtype) -> Any:
    """Dtype of the dot products: 16 bits where both operands are exact in it."""
    if query == cache or cache.itemsize == 1:
        return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(query, tl.float32)
    return tl.float32
