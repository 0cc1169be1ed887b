# mypy: allow-untyped-defs, allow-incomplete-defs
"""MLA on GPUs: sequences with few new tokens absorbed, long ones expanded.

In: the arguments of `mla.ops.mla_attention` on a GPU. Out: [T, N, V], or `NotImplemented`. Decode
steps, and every call whose lengths the host does not know, are absorbed without a device sync, so a
CUDA graph can capture them. In a step with prompts the host knows the lengths: sequences with few
new tokens are absorbed together, and each long sequence is expanded chunk by chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.mla import triton_decode_sm90
from fulgurite.kernels.mla.reference import LatentCache, split_latent_cache
from fulgurite.kernels.mla.triton_absorb import absorb_queries
from fulgurite.kernels.mla.triton_decode import attend_absorbed
from fulgurite.kernels.mla.triton_prefill import (
    KeyChunk,
    allocate_state,
    attend_expanded,
    gather_latents,
)
from fulgurite.kernels.mla.triton_store_kv import SUPPORTED_DTYPES, is_rope_supported
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.kernels.tuning.mla import should_expand


class LayerArguments(NamedTuple):
    """The arguments that all sequences of a call share."""

    kv_b_NUC: Tensor
    cache: LatentCache
    scale: float
    interleaved: bool
    nope_dim: int


@torch.no_grad()
def mla_attention(
    q: Tensor,
    kv_b: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    interleaved: bool,
) -> Any:
    """`mla.ops.mla_attention`."""
    if q.dtype not in SUPPORTED_DTYPES or kv_b.dtype != q.dtype or not is_rope_supported(cos, sin):
        return NotImplemented
    if any(x.stride(-1) != 1 for x in (q, kv_b, cache)) or scale <= 0:
        return NotImplemented
    if cache.dtype == torch.uint8 and any(stride % 16 for stride in cache.stride()[:2]):
        return NotImplemented
    rope_dim = 2 * cos.shape[1]
    nope_dim = q.shape[2] - rope_dim
    if q.numel() == 0 or metadata.seq_lens_S.shape[0] == 0 or metadata.max_query_len == 0:
        return q.new_zeros((*q.shape[:2], kv_b.shape[1] - nope_dim))
    views = split_latent_cache(cache, kv_b.shape[2], rope_dim)
    layer = LayerArguments(kv_b, views, scale, interleaved, nope_dim)
    expanded = _sequences_to_expand(layer, rope_dim, metadata)
    if not expanded:
        return _attend_absorbed(layer, q, cos, sin, metadata)
    return _attend_mixed(layer, q, cos, sin, metadata, expanded)


def _sequences_to_expand(
    layer: LayerArguments, rope_dim: int, metadata: AttentionMetadata
) -> list[int]:
    """The sequences whose keys are better expanded."""
    rows, rank = layer.kv_b_NUC.shape[1:]
    sizes = (rank, layer.nope_dim, rope_dim, rows - layer.nope_dim)
    lens = zip(metadata.query_lens or [], metadata.seq_lens or [], strict=True)
    return [s for s, (queries, keys) in enumerate(lens) if should_expand(queries, keys, *sizes)]


def _attend_absorbed(
    layer: LayerArguments, q: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """W_uv (attention of W_uk^T q to the latents)."""
    w_uk_NDC, w_uv_NVC = layer.kv_b_NUC[:, : layer.nope_dim], layer.kv_b_NUC[:, layer.nope_dim :]
    cache_dtype = layer.cache.latents_PBC.dtype
    queries = absorb_queries(q, w_uk_NDC, cos, sin, layer.interleaved, cache_dtype)
    assert metadata.max_query_len is not None, "the operator sets it"
    rows = metadata.max_query_len * q.shape[1]
    use_sm90 = triton_decode_sm90.is_supported(queries, layer.cache, rows)
    attend = triton_decode_sm90.attend_absorbed_sm90 if use_sm90 else attend_absorbed
    latent_TNC = attend(queries, layer.cache, metadata, layer.scale, q.dtype)
    out_TNV = q.new_empty((*q.shape[:2], w_uv_NVC.shape[1]))
    torch.bmm(latent_TNC.transpose(0, 1), w_uv_NVC.mT, out=out_TNV.transpose(0, 1))
    return out_TNV


def _attend_mixed(
    layer: LayerArguments,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    metadata: AttentionMetadata,
    expanded: list[int],
) -> Tensor:
    """Expand the sequences of `expanded` one by one; absorb all others in one call."""
    query_lens, seq_lens = metadata.query_lens, metadata.seq_lens
    assert query_lens is not None and seq_lens is not None, "sequences to expand are found by these"
    out_TNV = q.new_zeros((*q.shape[:2], layer.kv_b_NUC.shape[1] - layer.nope_dim))
    starts = _cumulative(query_lens)
    for s in expanded:
        tokens = slice(starts[s], starts[s + 1])
        blocks_M = metadata.block_table_SM[s]
        _attend_expanded(
            layer, q[tokens], cos[tokens], sin[tokens], blocks_M, seq_lens[s], out_TNV[tokens]
        )
    absorbed = [s for s, count in enumerate(query_lens) if count and s not in set(expanded)]
    if absorbed:
        tokens = torch.tensor(
            [t for s in absorbed for t in range(starts[s], starts[s + 1])], device=q.device
        )
        out_TNV[tokens] = _attend_absorbed(
            layer, q[tokens], cos[tokens], sin[tokens], _select_sequences(metadata, absorbed)
        )
    return out_TNV


def _select_sequences(metadata: AttentionMetadata, sequences: list[int]) -> AttentionMetadata:
    """The metadata of some sequences, whose tokens are gathered end to end."""
    assert metadata.query_lens is not None and metadata.seq_lens is not None
    device = metadata.seq_lens_S.device
    rows = torch.tensor(sequences, device=device)
    query_lens = [metadata.query_lens[s] for s in sequences]
    seq_lens = [metadata.seq_lens[s] for s in sequences]
    starts = torch.tensor(_cumulative(query_lens), dtype=torch.int32, device=device)
    return AttentionMetadata(
        metadata.block_table_SM[rows],
        starts,
        metadata.seq_lens_S[rows],
        max(query_lens),
        max(seq_lens),
        query_lens,
        seq_lens,
    )


def _cumulative(counts: list[int]) -> list[int]:
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    return starts


def _attend_expanded(
    layer: LayerArguments,
    q: Tensor,
    cos: Tensor,
    sin: Tensor,
    blocks_M: Tensor,
    length: int,
    out: Tensor,
) -> None:
    """One sequence, in chunks of whole cache blocks and at most `mla_max_expanded_keys` keys."""
    block_size = layer.cache.latents_PBC.shape[1]
    max_keys = heuristics_for(q.device).mla_max_expanded_keys
    chunk_size = max(max_keys // block_size, 1) * block_size
    tokens, heads, value_dim = out.shape
    state = allocate_state(tokens if length > chunk_size else 0, heads, value_dim, q.device)
    for first in range(0, length, chunk_size):
        count = min(chunk_size, length - first)
        c_KC, r_KR = gather_latents(layer.cache, blocks_M[first // block_size :], count, q.dtype)
        kv_KNU = (c_KC @ layer.kv_b_NUC.flatten(0, 1).t()).unflatten(1, (heads, -1))
        chunk = KeyChunk(kv_KNU, r_KR, length - tokens, first, first + count == length)
        attend_expanded(q, cos, sin, chunk, out, state, layer.scale, layer.interleaved)
