"""The paged KV cache: queries, keys and values of a step in, attention outputs out.

`PagedKVCache` is the `KVCache` (models/kv_cache.py) of the engine. The keys of a layer lie in blocks
of `block_size` tokens; the `InputBatch` of a step has the block tables. Grouped-query layers store K
keys and K values a token. MLA layers store one compressed vector. The storage dtype is the model's,
another float dtype, or float8_e4m3fn, which needs half the memory of 16 bits.

Shapes: X tokens of the step, flat; N query heads; K key heads; H size of a key; V size of a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionMetadata, AttentionOptions
from fulgurite.kernels.attention.ops import (
    fused_decode_attention,
    paged_attention,
    store_kv_cache,
)
from fulgurite.kernels.elementwise.ops import KVCacheSlots, ProjectedQKV
from fulgurite.kernels.mla.ops import mla_attention, mla_slot_shape, store_mla_cache
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.mla import MLAInputs
from fulgurite.plan.kv_cache import KVCacheGroup
from fulgurite.serve.engine.batch import InputBatch


class PagedKVCache:
    """Key and value blocks of every layer; `group_blocks[g]` is the size of group g's pool."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        groups: Sequence[KVCacheGroup],
        group_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        self.group_of_layer = {
            layer: index for index, group in enumerate(groups) for layer in group.layers
        }
        self.key_caches: list[Tensor] = []
        self.value_caches: list[Tensor | None] = []
        for spec in specs:
            blocks = group_blocks[self.group_of_layer[spec.layer_index]] + 1  # and block 0
            if spec.is_mla:
                self.key_caches.append(
                    _allocate_mla_blocks(spec, blocks, block_size, dtype, device)
                )
                self.value_caches.append(None)
            else:
                shape = (blocks, spec.num_kv_heads, block_size)
                self.key_caches.append(_allocate_blocks((*shape, spec.key_dim), dtype, device))
                self.value_caches.append(_allocate_blocks((*shape, spec.value_dim), dtype, device))
        self.batch: InputBatch | None = None
        self.metadata: list[AttentionMetadata] = []  # by group

    @property
    def num_bytes(self) -> int:
        caches = [*self.key_caches, *self.value_caches]
        return sum(cache.nbytes for cache in caches if cache is not None)

    def set_batch(self, batch: InputBatch) -> None:
        """Set the batch that the next call of the model computes."""
        self.batch = batch
        self.metadata = [
            AttentionMetadata(
                block_tables_SB,
                batch.query_start_loc_S,
                batch.seq_lens_S,
                batch.max_query_len,
                batch.max_seq_len,
                batch.query_lens_host,
                batch.seq_lens_host,
            )
            for block_tables_SB in batch.block_tables_GSB
        ]

    def cache_slots(self, spec: AttentionSpec) -> KVCacheSlots | None:
        """The layer's caches and the slots of the step's tokens; None for MLA."""
        value_cache = self.value_caches[spec.layer_index]
        if value_cache is None:
            return None
        return KVCacheSlots(
            self.key_caches[spec.layer_index], value_cache, self._slot_mapping(spec)
        )

    def attend_fused(
        self, spec: AttentionSpec, qkv: ProjectedQKV, sinks_N: Tensor | None
    ) -> Tensor | None:
        metadata, cache = self._metadata(spec), self.cache_slots(spec)
        if metadata.max_query_len != 1 or cache is None:
            return None
        return fused_decode_attention(qkv, cache, metadata, _attention_options(spec, sinks_N))

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        key_cache = self.key_caches[spec.layer_index]
        value_cache = self.value_caches[spec.layer_index]
        if k_XKH is not None:
            store_kv_cache(k_XKH, v_XKV, key_cache, value_cache, self._slot_mapping(spec))
        options = _attention_options(spec, sinks_N)
        return paged_attention(q_XNH, key_cache, value_cache, self._metadata(spec), options)

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        cache = self.key_caches[spec.layer_index]
        cos_sin = inputs.cos_sin.cos.squeeze(-2), inputs.cos_sin.sin.squeeze(-2)
        store_mla_cache(
            inputs.kv_a_XL,
            inputs.kv_a_norm_C,
            *cos_sin,
            cache,
            self._slot_mapping(spec),
            eps=inputs.eps,
            interleaved=inputs.interleaved,
        )
        return mla_attention(
            inputs.q_XNH,
            inputs.kv_b_NUC,
            *cos_sin,
            cache,
            self._metadata(spec),
            scale=spec.scale,
            interleaved=inputs.interleaved,
        )

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        assert self.batch is not None, "set_batch comes before the model runs"
        assert self.batch.rope_seq_lens_T is not None, "the batch was built without rope_seq_lens"
        return self.batch.rope_seq_lens_T

    def _metadata(self, spec: AttentionSpec) -> AttentionMetadata:
        return self.metadata[self.group_of_layer[spec.layer_index]]

    def _slot_mapping(self, spec: AttentionSpec) -> Tensor:
        assert self.batch is not None, "set_batch comes before the model runs"
        return self.batch.slot_mapping_GT[self.group_of_layer[spec.layer_index]]


def _attention_options(spec: AttentionSpec, sinks_N: Tensor | None) -> AttentionOptions:
    return AttentionOptions(
        scale=spec.scale,
        value_dim=spec.value_dim,
        window=spec.sliding_window,
        chunk=spec.chunk_size,
        softcap=spec.softcap,
        sinks_N=sinks_N,
    )


def _allocate_blocks(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of [blocks, heads, block_size, H], viewed as [blocks, block_size, heads, H].

    The keys of one head in a block are then contiguous.
    """
    return _allocate_zeros(shape, dtype, device).transpose(1, 2)


def _allocate_mla_blocks(
    spec: AttentionSpec, blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[blocks, block_size, W]: W values or bytes hold a latent and its rotary key."""
    width, slot_dtype = mla_slot_shape(spec.value_dim, spec.key_dim - spec.value_dim, dtype)
    return _allocate_zeros((blocks, block_size, width), slot_dtype, device)


def _allocate_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU from calloc, which takes memory only once it is written."""
    count = math.prod(shape) * dtype.itemsize
    if device.type == "cpu":
        memory = torch.from_numpy(np.zeros(count, dtype=np.uint8))
    else:
        memory = torch.zeros(count, dtype=torch.uint8, device=device)
    return memory.view(dtype).view(shape)
