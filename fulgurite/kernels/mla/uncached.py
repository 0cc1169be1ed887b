"""MLA of whole sequences without a cache, with the kernels and the bits of the paged cache.

In: the projections of tokens, [T] or [B, T]; `segments` gives the sequence of each token of a flat
layout. Positions must count from 0 in each sequence, as in training. Out: [X, N, V]. The latents are
stored in a cache of their own, in blocks, as the engine stores them.

For forward only; `models.uncached_states` adds the gradient.

Shapes as in `ops.py`; X token layout, T all tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata
from fulgurite.kernels.attention.uncached import sequence_lengths
from fulgurite.kernels.mla.ops import mla_attention, mla_slot_shape, store_mla_cache

BLOCK_SIZE = 64


def uncached_mla(
    q_XNH: Tensor,
    kv_a_XL: Tensor,
    norm_C: Tensor,
    kv_b_NUC: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
    *,
    scale: float,
    eps: float,
    interleaved: bool,
    cache_dtype: torch.dtype,
) -> Tensor:
    """Attention of every token to the tokens of its sequence up to itself."""
    lengths = sequence_lengths(positions_X, segments_T)
    pairs, device = cos.shape[-1], q_XNH.device
    value_dim = kv_b_NUC.shape[1] - (q_XNH.shape[-1] - 2 * pairs)
    if not sum(lengths):
        return q_XNH.new_zeros((*q_XNH.shape[:-1], value_dim))
    metadata, slots_T, num_blocks = _layout(lengths, device)
    width, slot_dtype = mla_slot_shape(norm_C.shape[0], 2 * pairs, cache_dtype)
    cache = torch.empty((num_blocks, BLOCK_SIZE, width), dtype=slot_dtype, device=device)
    token_shape = q_XNH.shape[:-2]
    cos_TI, sin_TI = (
        angle.squeeze(-2).expand(*token_shape, pairs).reshape(-1, pairs).contiguous()
        for angle in (cos, sin)
    )
    kv_a_TL = kv_a_XL.reshape(-1, kv_a_XL.shape[-1])
    store_mla_cache(
        kv_a_TL, norm_C, cos_TI, sin_TI, cache, slots_T, eps=eps, interleaved=interleaved
    )
    q_TNH = q_XNH.reshape(-1, *q_XNH.shape[-2:])
    out_TNV = mla_attention(
        q_TNH, kv_b_NUC, cos_TI, sin_TI, cache, metadata, scale=scale, interleaved=interleaved
    )
    return out_TNV.view(*token_shape, *out_TNV.shape[1:])


def _layout(lengths: list[int], device: torch.device) -> tuple[AttentionMetadata, Tensor, int]:
    """Metadata of sequences in consecutive blocks, the slot of each token, and the blocks."""
    blocks = [-(-length // BLOCK_SIZE) for length in lengths]
    counts = torch.tensor([0, *lengths], dtype=torch.int32)
    first_blocks = torch.tensor([0, *blocks], dtype=torch.int32).cumsum(0, dtype=torch.int32)[:-1]
    table = first_blocks[:, None] + torch.arange(max(blocks), dtype=torch.int32)
    table = table.clamp(max=sum(blocks) - 1)
    slots = [
        first * BLOCK_SIZE + torch.arange(length)
        for first, length in zip(first_blocks.tolist(), lengths, strict=True)
    ]
    metadata = AttentionMetadata(
        table.to(device),
        counts.cumsum(0, dtype=torch.int32).to(device),
        counts[1:].to(device),
        max(lengths),
        max(lengths),
        lengths,
        lengths,
    )
    return metadata, torch.cat(slots).to(device), sum(blocks)
