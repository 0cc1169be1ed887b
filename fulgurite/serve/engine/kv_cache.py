"""The paged KV cache: queries, keys and values of a step in, attention outputs out.

`PagedKVCache` is the `KVCache` (models/kv_cache.py) of the engine. The keys of a layer lie in blocks
of `block_size` tokens; the `InputBatch` of a step has the block tables. Grouped-query layers store K
keys and K values a token. MLA layers store one compressed vector. The storage dtype is the model's,
another float dtype, or float8_e4m3fn, which needs half the memory of 16 bits.

Layers without attention have a state of fixed size a request (`StateSpec`). Its slot is the request's
row of the block tables, so it is allocated and freed with the request.

Shapes: X tokens of the step, flat; N query heads; K key heads; H size of a key; V size of a value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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
from fulgurite.kernels.linear_attention import ops as linear_attention
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout
from fulgurite.kernels.mla.ops import (
    make_prefill_plan,
    mla_attention,
    mla_slot_shape,
    store_mla_cache,
)
from fulgurite.kernels.mla.prefill_plan import MLASizes, PrefillPlan
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.kv_cache import ConvWeights
from fulgurite.models.mla import MLAInputs
from fulgurite.models.state_spec import StateSpec
from fulgurite.plan.kv_cache import KVCacheGroup
from fulgurite.serve.engine.batch import InputBatch


class LayerStates(NamedTuple):
    """The states of one layer, a slot a request; see `StateSpec`."""

    conv_RWC: Tensor
    recurrent_RNDV: Tensor | None


class PagedKVCache:
    """Key and value blocks of every layer; `group_blocks[g]` is the size of group g's pool.

    `states` are those of layers without attention, by layer; see `allocate_states`.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        groups: Sequence[KVCacheGroup],
        group_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        states: dict[int, LayerStates] | None = None,
    ) -> None:
        self.block_size = block_size
        self.states = {} if states is None else states
        self.layout: SequenceLayout | None = None
        self.group_of_layer = {
            layer: index for index, group in enumerate(groups) for layer in group.layers
        }
        self.key_caches: dict[int, Tensor] = {}  # by layer
        self.value_caches: dict[int, Tensor | None] = {}
        for spec in specs:
            if not spec.is_local:  # another pipeline stage has this layer
                continue
            layer = spec.layer_index
            blocks = group_blocks[self.group_of_layer[layer]] + 1  # and block 0
            if spec.is_mla:
                self.key_caches[layer] = _allocate_mla_blocks(
                    spec, blocks, block_size, dtype, device
                )
                self.value_caches[layer] = None
            else:
                shape = (blocks, spec.num_kv_heads, block_size)
                self.key_caches[layer] = _allocate_blocks((*shape, spec.key_dim), dtype, device)
                self.value_caches[layer] = _allocate_blocks((*shape, spec.value_dim), dtype, device)
        self.device = device
        self.batch: InputBatch | None = None
        self.metadata: list[AttentionMetadata] = []  # by group
        self.mla_sizes = _mla_sizes_of_groups(specs, self.group_of_layer)
        self.mla_plans: dict[int, PrefillPlan | None] = {}  # by group

    @property
    def num_bytes(self) -> int:
        caches = [*self.key_caches.values(), *self.value_caches.values()]
        caches += [state for states in self.states.values() for state in states]
        return sum(cache.nbytes for cache in caches if cache is not None)

    @property
    def has_states(self) -> bool:
        """Whether the model has layers with states."""
        return bool(self.states)

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
        self.mla_plans = {
            group: make_prefill_plan(self.metadata[group], sizes, self.device)
            for group, sizes in self.mla_sizes.items()
        }
        if self.states:
            assert batch.state_slots_S is not None and batch.prompt_lens_S is not None, (
                "the batch was built without state slots"
            )
            self.layout = SequenceLayout(
                batch.query_start_loc_S,
                batch.seq_lens_S,
                batch.state_slots_S,
                batch.prompt_lens_S,
                batch.max_query_len,
            )

    def cache_slots(self, spec: AttentionSpec) -> KVCacheSlots | None:
        """The layer's caches and the slots of the step's tokens; None for MLA and scaled keys."""
        value_cache = self.value_caches[spec.layer_index]
        if value_cache is None or cache_scales(spec, value_cache) != (1.0, 1.0):
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
        options = attention_options(spec, sinks_N, cache.key_cache_PBKH)
        return fused_decode_attention(qkv, cache, metadata, options)

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
            scales = cache_scales(spec, key_cache)
            slots = self._slot_mapping(spec)
            store_kv_cache(k_XKH, v_XKV, key_cache, value_cache, slots, *scales)
        options = attention_options(spec, sinks_N, key_cache)
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
            plan=self.mla_plans.get(self.group_of_layer[spec.layer_index]),
        )

    def causal_conv(
        self, spec: StateSpec, x_XC: Tensor, conv: ConvWeights, positions_X: Tensor
    ) -> Tensor:
        assert self.layout is not None, "set_batch comes before the model runs"
        weight_WC, bias_C, activation = conv
        state = self.states[spec.layer_index].conv_RWC
        return linear_attention.causal_conv(x_XC, weight_WC, bias_C, state, self.layout, activation)

    def gated_delta_rule(
        self, spec: StateSpec, inputs: DeltaRuleInputs, positions_X: Tensor
    ) -> Tensor:
        state = self.states[spec.layer_index].recurrent_RNDV
        assert self.layout is not None, "set_batch comes before the model runs"
        assert state is not None, "a layer with linear attention has a recurrent state"
        return linear_attention.gated_delta_rule(inputs, state, self.layout)

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        assert self.batch is not None, "set_batch comes before the model runs"
        assert self.batch.rope_seq_lens_T is not None, "the batch was built without rope_seq_lens"
        return self.batch.rope_seq_lens_T

    def _metadata(self, spec: AttentionSpec) -> AttentionMetadata:
        return self.metadata[self.group_of_layer[spec.layer_index]]

    def _slot_mapping(self, spec: AttentionSpec) -> Tensor:
        assert self.batch is not None, "set_batch comes before the model runs"
        return self.batch.slot_mapping_GT[self.group_of_layer[spec.layer_index]]


def _mla_sizes_of_groups(
    specs: Sequence[AttentionSpec], group_of_layer: dict[int, int]
) -> dict[int, MLASizes]:
    """The sizes of each group's MLA layers; layers of a group have the same ones."""
    return {
        group_of_layer[spec.layer_index]: MLASizes(
            rank=spec.value_dim,
            nope_dim=spec.mla_head_dims[0],
            rope_dim=spec.key_dim - spec.value_dim,
            value_dim=spec.mla_head_dims[1],
        )
        for spec in specs
        if spec.mla_head_dims is not None
    }


def allocate_states(
    specs: Sequence[StateSpec], num_slots: int, dtype: torch.dtype, device: torch.device
) -> dict[int, LayerStates]:
    """The states of `num_slots` requests, by layer. `dtype` is the model's."""

    def allocate(spec: StateSpec) -> LayerStates:
        recurrent = None
        if spec.recurrent_shape is not None:
            recurrent = _allocate_zeros((num_slots, *spec.recurrent_shape), torch.float32, device)
        return LayerStates(_allocate_zeros((num_slots, *spec.conv_shape), dtype, device), recurrent)

    return {spec.layer_index: allocate(spec) for spec in specs if spec.is_local}


def cache_scales(spec: AttentionSpec, cache: Tensor) -> tuple[float, float]:
    """Factors of the stored keys and values: those of the checkpoint, in an FP8 cache only."""
    return (spec.key_scale, spec.value_scale) if cache.dtype.itemsize == 1 else (1.0, 1.0)


def attention_options(
    spec: AttentionSpec, sinks_N: Tensor | None, cache: Tensor
) -> AttentionOptions:
    key_scale, value_scale = cache_scales(spec, cache)
    return AttentionOptions(
        scale=spec.scale,
        value_dim=spec.value_dim,
        window=spec.sliding_window,
        chunk=spec.chunk_size,
        softcap=spec.softcap,
        sinks_N=sinks_N,
        key_scale=key_scale,
        value_scale=value_scale,
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
