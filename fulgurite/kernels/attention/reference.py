"""Paged attention in plain torch: the reference that every kernel is compared with.

    out[t, n] = sum_j p_j value[j],   p = softmax over the visible keys j, and the sink, of
    softcap * tanh(scale * q[t, n] . key[j] / softcap)

In: the operator's arguments. Out: its result, computed sequence by sequence in float32 (float64 for
float64 queries). Nothing here is fast.

Shapes: T query tokens of all sequences, end to end; S sequences; P cache blocks of B slots; M
blocks in a row of the block table; N query heads; K key heads; H size of a key; V size of a value;
C keys of one sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import (
    AttentionMetadata,
    AttentionOptions,
    ContextShard,
)


def paged_attention(
    q_TNH: Tensor,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    shard: ContextShard | None = None,
) -> Any:
    """Attention output of each query token, [T, N, V]; zeros for tokens of no sequence.

    With a shard: to the keys of the shard, and the log-sum-exp of the scores, [T, N].
    """
    compute = torch.float64 if q_TNH.dtype == torch.float64 else torch.float32
    value_dim = options.value_dim
    if value_dim is None:
        value_dim = (key_cache_PBKH if value_cache_PBKV is None else value_cache_PBKV).shape[-1]
    out_TNV = q_TNH.new_zeros((*q_TNH.shape[:2], value_dim))
    lse_TN = torch.full(q_TNH.shape[:2], float("-inf"), device=q_TNH.device)
    starts = metadata.query_start_loc.tolist()
    for sequence, length in enumerate(metadata.seq_lens_S.tolist()):
        first, last = starts[sequence], starts[sequence + 1]
        if first == last:
            continue
        blocks_M = metadata.block_table_SM[sequence]
        key_positions = torch.arange(length, device=q_TNH.device)
        if shard is not None:
            is_local = key_positions // key_cache_PBKH.shape[1] % shard.ranks == shard.rank
            key_positions = key_positions[is_local]
        keys = len(key_positions)
        keys_CKH = gather_sequence(key_cache_PBKH, blocks_M, keys).to(compute)
        keys_CKH = keys_CKH * options.key_scale
        if value_cache_PBKV is None:
            values_CKV = keys_CKH[..., :value_dim]
        else:
            values_CKV = gather_sequence(value_cache_PBKV, blocks_M, keys).to(compute)
            values_CKV = values_CKV * options.value_scale
        positions = torch.arange(length - (last - first), length, device=q_TNH.device)
        mask_TC = attention_mask(positions, key_positions, options.window, options.chunk)
        q = q_TNH[first:last].to(compute)
        arguments = (options.scale, options.softcap, options.sinks_N)
        out, lse = attend_with_lse(q, keys_CKH, values_CKV, mask_TC, *arguments)
        out_TNV[first:last] = out.to(q_TNH.dtype)
        lse_TN[first:last] = lse
    return out_TNV if shard is None else (out_TNV, lse_TN)


def gather_sequence(cache_PBKH: Tensor, blocks_M: Tensor, length: int) -> Tensor:
    """The first `length` slots of a sequence's blocks, [C, K, H]."""
    block_size = cache_PBKH.shape[1]
    used = blocks_M[: -(-length // block_size)].long()
    return cache_PBKH[used].flatten(0, 1)[:length]


def attention_mask(
    query_positions: Tensor, key_positions: Tensor, window: int | None, chunk: int | None
) -> Tensor:
    """Whether each query sees each key: causal, within the window and the chunk."""
    query, key = query_positions[:, None], key_positions[None, :]
    visible = key <= query
    if window is not None:
        visible = visible & (query - key < window)
    if chunk is not None:
        visible = visible & (query // chunk == key // chunk)
    return visible


def attend_sequence(
    q_TNH: Tensor,
    keys_CKH: Tensor,
    values_CKV: Tensor,
    mask_TC: Tensor,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """One sequence. A sink adds to the softmax denominator and has no value."""
    return attend_with_lse(q_TNH, keys_CKH, values_CKV, mask_TC, scale, softcap, sinks_N)[0]


def attend_with_lse(
    q_TNH: Tensor,
    keys_CKH: Tensor,
    values_CKV: Tensor,
    mask_TC: Tensor,
    scale: float,
    softcap: float | None,
    sinks_N: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """One sequence, and the log-sum-exp of its scores, [T, N]. A query that sees no key has zeros."""
    tokens, heads = q_TNH.shape[:2]
    group = heads // keys_CKH.shape[1]
    keys_CNH = keys_CKH.repeat_interleave(group, dim=1)
    values_CNV = values_CKV.repeat_interleave(group, dim=1)
    scores_NTC = torch.einsum("tnh,cnh->ntc", q_TNH, keys_CNH) * scale
    if softcap is not None:
        scores_NTC = torch.tanh(scores_NTC / softcap) * softcap
    scores_NTC = scores_NTC.masked_fill(~mask_TC, float("-inf"))
    if sinks_N is not None:
        sink_NT1 = sinks_N.to(scores_NTC.dtype)[:, None, None].expand(heads, tokens, 1)
        scores_NTC = torch.cat((scores_NTC, sink_NT1), dim=-1)
    lse_NT1 = scores_NTC.logsumexp(dim=-1, keepdim=True)
    weights_NTC = scores_NTC.softmax(dim=-1)[..., : keys_CNH.shape[0]]
    weights_NTC = weights_NTC.masked_fill(~mask_TC.any(dim=1)[:, None], 0.0)
    return torch.einsum("ntc,cnv->tnv", weights_NTC, values_CNV), lse_NT1[..., 0].t()


def store_kv_cache(
    k_TKH: Tensor,
    v_TKV: Tensor | None,
    key_cache_PBKH: Tensor,
    value_cache_PBKV: Tensor | None,
    slot_mapping_T: Tensor,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write new keys and values into their slots; a token with a negative slot is skipped."""
    stored = slot_mapping_T >= 0
    slots = slot_mapping_T[stored].long()
    for new, cache, scale in (
        (k_TKH, key_cache_PBKH, key_scale),
        (v_TKV, value_cache_PBKV, value_scale),
    ):
        if new is None or cache is None:
            continue
        block_size = cache.shape[1]
        rounded = cast_to_cache_dtype(new[stored], cache.dtype, scale)
        cache[slots // block_size, slots % block_size] = rounded


def cast_to_cache_dtype(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x / scale in the cache's dtype; float8 saturates, since cached keys must stay finite."""
    if dtype.itemsize > 1:
        return (x if scale == 1.0 else x.float() / scale).to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-limit, limit).to(dtype)
