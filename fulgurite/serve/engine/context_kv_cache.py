"""The paged KV cache of a context-parallel rank: its tokens' keys in, their attention outputs out.

A block of the block manager has C * B tokens: B of them on each of C ranks (parallel/context.py). All
ranks have the same block tables. The rank of position p is (p // B) % C, and its slot in the rank's
block is p % B.

MLA layers attend in the absorbed form: queries meet latents, of which each rank has its blocks.

Shapes: X tokens of this rank; T tokens of the step; N query heads; K key heads; H size of a key; V size
of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.attention.metadata import ContextShard
from fulgurite.kernels.attention.ops import paged_attention_shard, store_kv_cache
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.mla import MLAInputs, attend_absorbed
from fulgurite.parallel.context import ContextParallel
from fulgurite.plan.kv_cache import KVCacheGroup, check_context_cache
from fulgurite.serve.engine.batch import InputBatch
from fulgurite.serve.engine.kv_cache import (
    LayerStates,
    PagedKVCache,
    attention_options,
    cache_scales,
)


def build_kv_cache(
    context: ContextParallel | None,
    specs: Sequence[AttentionSpec],
    groups: Sequence[KVCacheGroup],
    group_blocks: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    states: dict[int, LayerStates],
) -> PagedKVCache:
    """The KV cache of a rank; see `PagedKVCache` for the arguments."""
    if context is None:
        return PagedKVCache(specs, groups, group_blocks, block_size, dtype, device, states)
    assert not states, "layers with states are refused before their weights are loaded"
    return ContextKVCache(context, specs, groups, group_blocks, block_size, dtype, device)


class ContextKVCache(PagedKVCache):
    """A `PagedKVCache` that has this rank's keys of every sequence. `block_size` is the block manager's."""

    def __init__(
        self,
        context: ContextParallel,
        specs: Sequence[AttentionSpec],
        groups: Sequence[KVCacheGroup],
        group_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        assert block_size % context.count == 0, f"blocks of {block_size} over {context.count} ranks"
        local_size = block_size // context.count
        super().__init__(specs, groups, group_blocks, local_size, dtype, device)
        self.context = context
        self.shard = ContextShard(context.index, context.count)
        check_context_cache(specs, dtype)

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, on all ranks."""
        assert self.batch is not None, "set_batch comes before the model runs"
        return len(self.batch.positions_T)

    def set_batch(self, batch: InputBatch) -> None:
        """Set the batch of all tokens; the model then runs those of `context.local_range`."""
        slots_GT = [self._local_slots(slots_T) for slots_T in batch.slot_mapping_GT]
        super().set_batch(replace(batch, slot_mapping_GT=slots_GT))

    def _local_slots(self, slots_T: Tensor) -> Tensor:
        """Slots of this rank for those of the block manager; -1: another rank has the key."""
        size, count = self.block_size, self.shard.ranks
        block_T, offset_T = slots_T // (size * count), slots_T % (size * count)
        is_local_T = (offset_T // size == self.shard.rank) & (slots_T >= 0)
        return (block_T * size + offset_T % size).where(is_local_T, -1)

    def cache_slots(self, spec: AttentionSpec) -> None:
        return None

    def attend_fused(self, *arguments: Any) -> None:
        return None

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        assert k_XKH is not None, "this cache gives no slots to other kernels"
        new = [x for x in (q_XNH, k_XKH, v_XKV) if x is not None]
        q_TNH, k_TKH, *values = self.context.gather_inputs(new, self.num_tokens)
        v_TKV = values[0] if values else None
        key_cache = self.key_caches[spec.layer_index]
        key_cache = key_cache[:, :, None] if spec.is_mla else key_cache
        value_cache = self.value_caches[spec.layer_index]
        scales = cache_scales(spec, key_cache)
        store_kv_cache(k_TKH, v_TKV, key_cache, value_cache, self._slot_mapping(spec), *scales)
        options = attention_options(spec, sinks_N if self.shard.rank == 0 else None, key_cache)
        out_TNV, lse_TN = paged_attention_shard(
            q_TNH, key_cache, value_cache, self._metadata(spec), options, self.shard
        )
        return self.context.merge_outputs(out_TNV, lse_TN)

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        return attend_absorbed(self.attend, spec, inputs, positions_X)

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        start, stop = self.context.local_range(self.num_tokens)
        return super().sequence_lengths(positions_X)[start:stop]
