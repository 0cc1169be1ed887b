"""What attention over a paged KV cache knows of a step's sequences, checked.

In: block tables, query offsets and sequence lengths as tensors. Out: the same as kernels read them,
or an error that names what does not fit. The CPU kernels check the values as well
(include/block_table.h).

The KV cache is P blocks of B slots; a slot holds one token. Block tables map each sequence to its
blocks.

Shapes: T query tokens; S sequences; M blocks in a row of the block table.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError


class AttentionMetadata(NamedTuple):
    """The sequences of a step: which query tokens are whose, and where their KV cache is.

    block_table_SM   int32; token j of sequence s is in block block_table[s, j // B], slot j % B
    query_start_loc  int32 [S + 1]; offsets of the sequences' query tokens (cu_seqlens)
    seq_lens_S       int32; tokens of sequence s in the cache, the query tokens included
    max_query_len    the most query tokens of any sequence, if known
    max_seq_len      the largest of `seq_lens_S`, if known
    query_lens       query tokens of each sequence, if the host knows them
    seq_lens         `seq_lens_S` as a list, if the host knows it

    Tokens from query_start_loc[S] on belong to no sequence (padding); their results are zeros.
    """

    block_table_SM: Tensor
    query_start_loc: Tensor
    seq_lens_S: Tensor
    max_query_len: int | None = None
    max_seq_len: int | None = None
    query_lens: list[int] | None = None
    seq_lens: list[int] | None = None


class AttentionOptions(NamedTuple):
    """What an attention layer computes.

    value_dim    size of a value; needed where values are the first numbers of their keys
    window       sliding window: a query at position i sees keys at j > i - window
    chunk        chunked attention: a query sees keys of its own chunk
    softcap      scores become softcap * tanh(score / softcap)
    sinks_N      a score per head that takes part in the softmax and has no value
    key_scale    factor of stored keys (float8 caches); `value_scale` likewise
    """

    scale: float
    value_dim: int | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks_N: Tensor | None = None
    key_scale: float = 1.0
    value_scale: float = 1.0


class ContextShard(NamedTuple):
    """The keys that a context-parallel rank has: blocks `rank`, `rank + ranks`, .. of each sequence.

    Column m of its block table is block `m * ranks + rank` of the sequence.
    """

    rank: int
    ranks: int


def complete_metadata(
    metadata: AttentionMetadata, tokens: int, block_size: int
) -> AttentionMetadata:
    """Replace unknown maxima by upper bounds: all tokens, and a full row of the block table."""
    if metadata.max_query_len is None:
        metadata = metadata._replace(max_query_len=tokens)
    if metadata.max_seq_len is None:
        capacity = metadata.block_table_SM.shape[1] * block_size
        metadata = metadata._replace(max_seq_len=capacity)
    return metadata


def check_metadata(metadata: AttentionMetadata) -> None:
    """Raise where dtypes or shapes don't fit together."""
    block_table, query_start_loc, seq_lens = metadata[:3]
    for name, index, dim in (
        ("block_table", block_table, 2),
        ("query_start_loc", query_start_loc, 1),
        ("seq_lens", seq_lens, 1),
    ):
        if index.dtype != torch.int32:
            raise ArgumentError(f"{name} has dtype {index.dtype}", next="use torch.int32")
        if index.dim() != dim:
            raise ArgumentError(f"{name} {list(index.shape)} must have {dim} dimensions")
    sequences = seq_lens.shape[0]
    if query_start_loc.shape[0] != sequences + 1 or block_table.shape[0] != sequences:
        raise ArgumentError(
            f"seq_lens has {sequences} entries, block_table {block_table.shape[0]} rows and "
            f"query_start_loc {query_start_loc.shape[0]} entries",
            next="S sequences need S seq_lens, S rows and S + 1 offsets",
        )


def check_slot_mapping(slot_mapping: Tensor, tokens: int) -> None:
    """Raise where there is not one slot per token."""
    is_integer = slot_mapping.dtype in (torch.int64, torch.int32)
    if not is_integer or tuple(slot_mapping.shape) != (tokens,):
        dtype = str(slot_mapping.dtype).removeprefix("torch.")
        raise ArgumentError(
            f"slot_mapping is {dtype}{list(slot_mapping.shape)}",
            next=f"use int64[{tokens}], one slot per token",
        )


def as_contiguous(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same with contiguous tensors; rows of the block table may be apart."""
    block_table, query_start_loc, seq_lens = metadata[:3]
    is_strided = block_table.stride(1) != 1
    if is_strided or not query_start_loc.is_contiguous() or not seq_lens.is_contiguous():
        return metadata._replace(
            block_table_SM=block_table.contiguous() if is_strided else block_table,
            query_start_loc=query_start_loc.contiguous(),
            seq_lens_S=seq_lens.contiguous(),
        )
    return metadata
