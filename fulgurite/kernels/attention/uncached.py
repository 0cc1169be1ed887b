"""Attention of whole sequences without a cache, with the kernel and the bits of the paged cache.

    out[t, n] = sum_j p_j value[j],   p = softmax over the keys j <= t of the same sequence

In: queries, keys and values of tokens, [T] or [B, T]; `segments` gives the sequence of each token of
a flat layout. Positions must count from 0 in each sequence, as in training. Out: [X, N, V]. The keys
are read as if they were a cache with one block a sequence (or, with segments, one a token).

For forward only; `models.uncached_attention` adds the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.attention.metadata import AttentionMetadata, AttentionOptions
from fulgurite.kernels.attention.ops import paged_attention


def uncached_attention(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKV: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
    options: AttentionOptions,
) -> Tensor:
    """Attention of every token to the tokens of its sequence up to itself."""
    lengths = sequence_lengths(positions_X, segments_T)
    total, longest = sum(lengths), max(lengths, default=0)
    if total == 0:
        return q_XNH.new_zeros((*q_XNH.shape[:-1], v_XKV.shape[-1]))
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    block_size = longest if total == longest * len(lengths) else 1
    blocks = -(-longest // block_size)
    table = starts[:-1, None] // block_size + torch.arange(blocks, dtype=torch.int32)
    table = table.clamp(max=total // block_size - 1)
    q, k, v = (x.reshape(total, *x.shape[-2:]) for x in (q_XNH, k_XKH, v_XKV))
    device = q.device
    metadata = AttentionMetadata(
        table.to(device), starts.to(device), seq_lens.to(device), longest, longest
    )
    k, v = (x.reshape(-1, block_size, *x.shape[1:]).contiguous() for x in (k, v))
    out = paged_attention(q.contiguous(), k, v, metadata, options)
    return out.view(*q_XNH.shape[:-1], -1)


def sequence_lengths(positions_X: Tensor, segments: Tensor | None) -> list[int]:
    """The number of tokens of each sequence, in the order of the tokens.

    Segments [B, T] number the documents of each row; padding is one of them, at any positions. Without
    segments, padding at the end of a row counts as its last tokens: no other token sees it.
    """
    if segments is not None and segments.dim() == 2:
        is_first = torch.ones(segments.shape, dtype=torch.bool)
        is_first[:, 1:] = (segments[:, 1:] != segments[:, :-1]).cpu()
        starts = is_first.flatten().nonzero()[:, 0]
        return torch.diff(starts, append=torch.tensor([segments.numel()])).tolist()
    size = positions_X.shape[-1]
    lengths = [size] * (positions_X.shape[0] if positions_X.dim() == 2 else 1)
    if segments is not None:
        lengths = torch.unique_consecutive(segments, return_counts=True)[1].tolist()
    expected = torch.cat([torch.arange(0), *(torch.arange(length) for length in lengths)])
    positions = positions_X.cpu()
    if positions.dim() == 2 and segments is None:
        is_padding = (positions < 0).flip(-1).int().cumprod(-1).flip(-1).bool()
        positions = torch.where(is_padding, expected.view(positions.shape), positions)
    if not torch.equal(positions.flatten(), expected):
        raise ArgumentError(
            "attention without a cache in deterministic mode needs positions 0, 1, .. of each sequence",
            next="leave out padding, or give sequences end to end with NoKVCache(segments)",
        )
    return lengths
