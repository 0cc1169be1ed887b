"""Paged attention: queries of many sequences end to end in, their attention outputs out.

    out[t, n] = sum_j p_j value[j],   p = softmax over the visible keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

Keys and values are in a paged KV cache; a row of the block table names the blocks of one sequence.
The last query of sequence s is at position seq_lens[s] - 1, the ones before it directly before. A
query at position i sees keys at j <= i, with a sliding window those with i - j < window, with
chunked attention those of its own chunk. So prefill, decode, chunked prefill and any mixture are
one call. `store_kv_cache` writes new keys and values into the cache first.

Three implementations: plain torch (`reference`), C++ (`cpu`) and Triton (`triton_attention`). The
functions here select one by device. During graph capture they are the operators
`fulgurite::paged_attention` and `fulgurite::store_kv_cache`.

Shapes: T query tokens; S sequences; P cache blocks of B slots; M blocks in a row of the block
table; N query heads; K key heads; H size of a key; V size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.attention import cpu, reference, triton_attention, triton_store_kv
from fulgurite.kernels.attention.metadata import (
    AttentionMetadata,
    AttentionOptions,
    ContextShard,
    as_contiguous,
    check_metadata,
    check_slot_mapping,
    complete_metadata,
)
from fulgurite.kernels.elementwise.ops import KVCacheSlots, ProjectedQKV

# device type -> kernel with the operator's arguments; it may return NotImplemented
PAGED_ATTENTION_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.paged_attention,
    "cuda": triton_attention.paged_attention,
}
# with the QK norm, RoPE and cache store of new tokens, for decode steps
FUSED_DECODE_KERNELS: dict[str, registry.Kernel] = {
    "cuda": triton_attention.fused_decode_attention,
}
STORE_KV_CACHE_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.store_kv_cache,
    "cuda": triton_store_kv.store_kv_cache,
}

CACHE_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def paged_attention(
    q_TNH: Tensor,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Attention output of each query token, [T, N, V]; zeros for tokens of no sequence.

    value_cache_PBKV   None where a value is the first `options.value_dim` numbers of its key (MLA)
    """
    if options.value_dim is None:
        cache = key_cache_PBKH if value_cache_PBKV is None else value_cache_PBKV
        options = options._replace(value_dim=cache.shape[-1])
    metadata = complete_metadata(metadata, q_TNH.shape[0], key_cache_PBKH.shape[1])
    _check_attention(q_TNH, key_cache_PBKH, value_cache_PBKV, metadata, options)
    if torch.compiler.is_compiling():
        arguments = (*metadata[:5], *options)
        return _paged_attention_op(q_TNH, key_cache_PBKH, value_cache_PBKV, *arguments)
    return _dispatch_paged_attention(q_TNH, key_cache_PBKH, value_cache_PBKV, metadata, options)


def paged_attention_shard(
    q_TNH: Tensor,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    shard: ContextShard,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` to the keys of a context-parallel rank, and log-sum-exps [T, N] in float32.

    Sequence lengths and positions are those of whole sequences; the block table has the blocks of this
    rank. A query that sees none of its keys has zeros and -inf. Not part of captured graphs.
    """
    if options.value_dim is None:
        cache = key_cache_PBKH if value_cache_PBKV is None else value_cache_PBKV
        options = options._replace(value_dim=cache.shape[-1])
    if not 0 <= shard.rank < shard.ranks:
        raise ArgumentError(f"shard {shard.rank} of {shard.ranks}")
    block_size = key_cache_PBKH.shape[1] * shard.ranks
    metadata = complete_metadata(metadata, q_TNH.shape[0], block_size)
    _check_attention(q_TNH, key_cache_PBKH, value_cache_PBKV, metadata, options)
    return _dispatch_paged_attention(
        q_TNH, key_cache_PBKH, value_cache_PBKV, metadata, options, shard
    )


def fused_decode_attention(
    qkv: ProjectedQKV,
    cache: KVCacheSlots,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor | None:
    """`paged_attention` of a decode step, fused with QK norm, RoPE and the cache store.

    One kernel where the device has it and every sequence has one query token; None elsewhere.
    """
    kernel = registry.find_kernel(FUSED_DECODE_KERNELS, qkv.q_XNH.device)
    if kernel is None or metadata.max_query_len != 1 or not registry.can_skip_dispatcher(*qkv[:3]):
        return None
    if is_deterministic():  # prefill has no such kernel
        return None
    if options.value_dim is None:
        options = options._replace(value_dim=qkv.v_XKV.shape[-1])
    metadata = complete_metadata(metadata, qkv.q_XNH.shape[0], cache.key_cache_PBKH.shape[1])
    _check_attention(qkv.q_XNH, cache.key_cache_PBKH, cache.value_cache_PBKV, metadata, options)
    out = kernel(qkv, cache, metadata, options)
    return None if out is NotImplemented else out


def store_kv_cache(
    k_TKH: Tensor,
    v_TKV: Tensor | None,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    slot_mapping_T: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write new keys and values into the KV cache, in place.

    slot_mapping_T   int64; token t goes to block slot // B, slot slot % B; negative: not stored
    k_TKH            is divided by `key_scale` and rounded to the cache's dtype; float8 saturates
    """
    for new, cache in ((k_TKH, key_cache_PBKH), (v_TKV, value_cache_PBKV)):
        if (new is None) != (cache is None):
            raise ArgumentError("new values and a value cache must be given together")
        if new is not None and cache is not None and new.shape[1:] != cache.shape[2:]:
            raise ArgumentError(
                f"new keys or values are [T, {', '.join(map(str, new.shape[1:]))}], "
                f"slots of the cache are {list(cache.shape[2:])}"
            )
    check_slot_mapping(slot_mapping_T, k_TKH.shape[0])
    if v_TKV is not None and v_TKV.shape[0] != k_TKH.shape[0]:
        raise ArgumentError(f"{k_TKH.shape[0]} new keys and {v_TKV.shape[0]} new values")
    call = _store_kv_cache_op if torch.compiler.is_compiling() else _dispatch_store_kv_cache
    call(k_TKH, v_TKV, key_cache_PBKH, value_cache_PBKV, slot_mapping_T, key_scale, value_scale)


def _check_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> None:
    value_dim, sinks = options.value_dim, options.sinks_N
    assert value_dim is not None, "value_dim is set before the check"
    if q.dim() != 3 or key_cache.dim() != 4 or q.shape[2] != key_cache.shape[3]:
        raise ArgumentError(
            f"queries {list(q.shape)} and key cache {list(key_cache.shape)} don't fit together",
            next="queries are [T, N, H], the key cache [P, B, K, H]",
        )
    if key_cache.shape[2] == 0 or q.shape[1] % key_cache.shape[2]:
        raise ArgumentError(
            f"{q.shape[1]} query heads are not a multiple of {key_cache.shape[2]} key heads"
        )
    if value_cache is not None:
        expected = (*key_cache.shape[:3], value_dim)
        if tuple(value_cache.shape) != expected:
            raise ArgumentError(
                f"value cache {list(value_cache.shape)} does not fit key cache "
                f"{list(key_cache.shape)}",
                next=f"the value cache must be {list(expected)}",
            )
    elif value_dim > key_cache.shape[3]:
        raise ArgumentError(
            f"value_dim={value_dim} is larger than a key of {key_cache.shape[3]} numbers"
        )
    if key_cache.dtype not in CACHE_DTYPES and key_cache.dtype != q.dtype:
        raise ArgumentError(f"KV cache of {key_cache.dtype}", next=f"use one of {CACHE_DTYPES}")
    check_metadata(metadata)
    if sinks is not None and sinks.shape != q.shape[1:2]:
        raise ArgumentError(f"sinks are {list(sinks.shape)} for {q.shape[1]} query heads")
    limits = (("window", options.window), ("chunk", options.chunk), ("softcap", options.softcap))
    for name, value in limits:
        if value is not None and not value > 0:
            raise ArgumentError(f"{name}={value} must be positive", next="or None to disable it")


def _dispatch_paged_attention(
    q_TNH: Tensor,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    shard: ContextShard | None = None,
) -> Any:
    """Run the kernel of this device."""
    if options.sinks_N is not None:
        options = options._replace(sinks_N=options.sinks_N.contiguous())
    arguments = (
        q_TNH, key_cache_PBKH, value_cache_PBKV, as_contiguous(metadata), options
    )  # fmt: skip
    sharded = () if shard is None else (shard,)
    return registry.dispatch(
        PAGED_ATTENTION_KERNELS, q_TNH.device, reference.paged_attention, *arguments, *sharded
    )


def _paged_attention_schema(
    q_TNH: Tensor,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    block_table_SM: Tensor,
    query_start_loc: Tensor,
    seq_lens_S: Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    value_dim: int,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks_N: Tensor | None,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    """`paged_attention` with a flat argument list, which a torch operator's schema needs."""
    metadata = AttentionMetadata(
        block_table_SM, query_start_loc, seq_lens_S, max_query_len, max_seq_len
    )
    options = AttentionOptions(
        scale, value_dim, window, chunk, softcap, sinks_N, key_scale, value_scale
    )
    return _dispatch_paged_attention(q_TNH, key_cache_PBKH, value_cache_PBKV, metadata, options)


def _dispatch_store_kv_cache(
    k_TKH: Tensor,
    v_TKV: Tensor | None,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    slot_mapping_T: Tensor,
    key_scale: float,
    value_scale: float,
) -> None:
    """Run the kernel of this device."""
    caches = (key_cache_PBKH, value_cache_PBKV, slot_mapping_T)
    arguments = (k_TKH, v_TKV, *caches, key_scale, value_scale)
    registry.dispatch(STORE_KV_CACHE_KERNELS, k_TKH.device, reference.store_kv_cache, *arguments)


_paged_attention_op = torch.library.custom_op(
    "fulgurite::paged_attention", _paged_attention_schema, mutates_args=()
)
_store_kv_cache_op = torch.library.custom_op(
    "fulgurite::store_kv_cache",
    _dispatch_store_kv_cache,
    mutates_args=("key_cache_PBKH", "value_cache_PBKV"),
)


@_paged_attention_op.register_fake
def _(q_TNH, key_cache, value_cache, *rest):  # type: ignore[no-untyped-def]
    value_dim = rest[6]
    return q_TNH.new_empty((q_TNH.shape[0], q_TNH.shape[1], value_dim))


@_store_kv_cache_op.register_fake
def _(*args):  # type: ignore[no-untyped-def]
    return None
