"""The layout of the KV cache: attention specs of a model in, groups of layers and bytes out.

Layers that attend equally far back form one `KVCacheGroup`. A group has one block pool and one block
table a request, so a layer with a sliding window keeps only the blocks of its window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fulgurite.errors import ArgumentError
from fulgurite.kernels.mla.ops import mla_slot_shape
from fulgurite.models.attention_spec import AttentionSpec

KV_CACHE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers with the same sliding window and attention chunk size; None: unlimited."""

    layers: tuple[int, ...]
    sliding_window: int | None
    chunk_size: int | None

    def first_visible(self, position: int) -> int:
        """The first key that the query at `position`, or any later query, attends to."""
        first = 0
        if self.sliding_window is not None:
            first = max(first, position - self.sliding_window + 1)
        if self.chunk_size is not None:
            first = max(first, position // self.chunk_size * self.chunk_size)
        return first

    def max_blocks(self, tokens: int, max_batched_tokens: int, block_size: int) -> int:
        """The most blocks that a request of `tokens` tokens holds at once."""
        all_blocks = -(-tokens // block_size)
        reach = [size for size in (self.sliding_window, self.chunk_size) if size is not None]
        if not reach:
            return all_blocks
        return min(all_blocks, (min(reach) + max_batched_tokens - 2) // block_size + 2)


def group_layers(specs: Sequence[AttentionSpec]) -> list[KVCacheGroup]:
    """The KV-cache groups of a model, in the order of their first layers."""
    layers: dict[tuple[int | None, int | None], list[int]] = {}
    for spec in specs:
        layers.setdefault((spec.sliding_window, spec.chunk_size), []).append(spec.layer_index)
    return [KVCacheGroup(tuple(members), *reach) for reach, members in layers.items()]


def kv_bytes_per_token(spec: AttentionSpec, dtype: torch.dtype) -> int:
    """Bytes that one layer caches for one token; none on other pipeline stages."""
    if not spec.is_local:
        return 0
    if spec.is_mla:
        width, slot_dtype = mla_slot_shape(spec.value_dim, spec.key_dim - spec.value_dim, dtype)
        return width * slot_dtype.itemsize
    return spec.num_kv_heads * (spec.key_dim + spec.value_dim) * dtype.itemsize


def check_context_cache(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> None:
    """ArgumentError for a KV cache that context-parallel ranks don't have."""
    if dtype.itemsize == 1 and any(spec.is_mla for spec in specs):
        raise ArgumentError(
            "context_parallel has no FP8 cache of MLA latents",
            next="leave out kv_dtype, or use bfloat16",
        )
