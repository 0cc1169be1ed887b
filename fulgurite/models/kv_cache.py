"""KV caches: queries, keys and values of new tokens in, attention outputs out.

A model does not know where keys and values are stored. Each attention layer passes its new keys and
values to `KVCache.attend`, which stores them and computes attention. Two caches are here.
`NoKVCache` stores nothing. `ContiguousKVCache` stores one row per sequence. The paged cache of the
engine (`serve/engine/kv_cache.py`) implements the same protocol. Layers with a state of fixed size
(`StateSpec`) call `causal_conv` and `gated_delta_rule` in the same way.

Positions alone define the attention mask. A query at position i attends to the keys of its sequence
at positions j <= i, within its sliding window or chunk. A negative position marks padding: only
padding attends to its key, and its output is undefined. So callers pass no mask.

Shapes: X token layout, [T] or [B, T]; B sequences; T new tokens; S keys; N query heads; K KV heads;
H size of a query or key; V size of a value; C channels; W taps of a convolution; D key size of
linear attention.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.elementwise.ops import KVCacheSlots, ProjectedQKV
from fulgurite.kernels.linear_attention import ops as linear_attention
from fulgurite.kernels.linear_attention import reference as linear_attention_reference
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout
from fulgurite.models.attention_spec import AttentionSpec, build_attention_mask
from fulgurite.models.mla import MLAInputs, attend_absorbed, attend_expanded
from fulgurite.models.state_spec import StateSpec
from fulgurite.models.uncached_attention import attend_deterministic, masked_attention
from fulgurite.models.uncached_states import (
    conv_deterministic,
    delta_rule_deterministic,
    mla_deterministic,
)


class ConvWeights(NamedTuple):
    """A causal convolution: one filter a channel. `activation` is "silu" or None."""

    weight_WC: Tensor
    bias_C: Tensor | None
    activation: str | None


class KVCache(Protocol):
    """The protocol between a model and a KV cache."""

    def cache_slots(self, spec: AttentionSpec) -> KVCacheSlots | None:
        """The slots a kernel may write the new keys and values to. None: `attend` writes them."""
        ...

    def attend_fused(
        self, spec: AttentionSpec, qkv: ProjectedQKV, sinks_N: Tensor | None
    ) -> Tensor | None:
        """QK norm, RoPE, cache write and attention in one kernel; returns [X, N, V].

        None if there is no such kernel. The caller then uses `attend`.
        """
        ...

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        """Store the new keys and values of layer `spec.layer_index`, then attend; returns [X, N,
        V].

        `v_XKV` is None for MLA. Both are None if a kernel already wrote them to `cache_slots`.
        """
        ...

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        """The same for MLA, from the raw projections; returns [X, N, V]."""
        ...

    def causal_conv(
        self, spec: StateSpec, x_XC: Tensor, conv: ConvWeights, positions_X: Tensor
    ) -> Tensor:
        """The convolution over each sequence's tokens, [X, C]; keeps the last inputs."""
        ...

    def gated_delta_rule(
        self, spec: StateSpec, inputs: DeltaRuleInputs, positions_X: Tensor
    ) -> Tensor:
        """Linear attention over each sequence's tokens, [X, N, V]; keeps the state.

        The inputs have the layout X where their names say T.
        """
        ...

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        """The length of each token's sequence, new tokens included; broadcastable to X."""
        ...


class UnpagedKVCache:
    """Base of caches without blocks and without kernels of their own."""

    def cache_slots(self, spec: AttentionSpec) -> None:
        return None

    def attend_fused(self, spec: AttentionSpec, qkv: ProjectedQKV, sinks_N: Tensor | None) -> None:
        return None


class NoKVCache(UnpagedKVCache):
    """No cache: tokens attend only to the tokens of the same call.

    For training, for scoring and as a reference. A flat [T] layout is one sequence, or several if
    `segments_T` gives the sequence of each token. Keys and values are rounded to `kv_dtype`, if given,
    as a KV cache of that dtype would.
    """

    def __init__(
        self, segments_T: Tensor | None = None, kv_dtype: torch.dtype | None = None
    ) -> None:
        self.segments_T, self.kv_dtype = segments_T, kv_dtype

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        assert k_XKH is not None, "this cache has no slots that a kernel could have written to"
        values = k_XKH[..., : spec.value_dim] if v_XKV is None else v_XKV
        if self.kv_dtype is not None:
            k_XKH, values = k_XKH.to(self.kv_dtype), values.to(self.kv_dtype)
        if is_deterministic():
            return attend_deterministic(
                spec, q_XNH, k_XKH, values, positions_X, self.segments_T, sinks_N
            )
        mask_XS = build_attention_mask(spec, positions_X, positions_X)
        mask_XS = mask_XS & self._same_sequence(positions_X)
        diagonal_TT = torch.eye(positions_X.shape[-1], dtype=torch.bool, device=positions_X.device)
        return masked_attention(spec, q_XNH, k_XKH, values, mask_XS | diagonal_TT, sinks_N)

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        if is_deterministic():
            return mla_deterministic(spec, inputs, positions_X, self.segments_T, self.kv_dtype)
        return attend_expanded(self.attend, spec, inputs, positions_X)

    def causal_conv(
        self, spec: StateSpec, x_XC: Tensor, conv: ConvWeights, positions_X: Tensor
    ) -> Tensor:
        if is_deterministic():
            return conv_deterministic(x_XC, *conv, positions_X, self.segments_T)
        x_XC = x_XC.masked_fill((positions_X < 0)[..., None], 0)
        x_BTC = x_XC[None] if x_XC.dim() == 2 else x_XC
        out_BTC = linear_attention_reference.convolve(x_BTC, *conv, self.segments_T)
        return out_BTC.view(x_XC.shape)

    def gated_delta_rule(
        self, spec: StateSpec, inputs: DeltaRuleInputs, positions_X: Tensor
    ) -> Tensor:
        if is_deterministic():
            return delta_rule_deterministic(inputs, positions_X, self.segments_T)
        is_padding = (positions_X < 0)[..., None]  # it neither decays nor updates the state
        never = float("-inf")
        gates = (gate.masked_fill(is_padding, never) for gate in (inputs.a_TN, inputs.b_TN))
        inputs = inputs._replace(**dict(zip(("a_TN", "b_TN"), gates, strict=True)))
        shape, dtype = inputs.v_TNV.shape, inputs.v_TNV.dtype
        if positions_X.dim() == 2:
            flat = inputs.map_tokens(lambda x: x.flatten(0, 1))
            out = linear_attention_reference.chunked_delta_rule(flat, positions_X.shape[0])
            return out.reshape(shape).to(dtype)
        parts = [
            linear_attention_reference.chunked_delta_rule(part, 1)[0]
            for part in self._split_segments(inputs)
        ]
        return torch.cat(parts).to(dtype)

    def _split_segments(self, inputs: DeltaRuleInputs) -> list[DeltaRuleInputs]:
        """The inputs of each run of tokens of one segment."""
        if self.segments_T is None or not len(self.segments_T):
            return [inputs]
        _, counts = torch.unique_consecutive(self.segments_T, return_counts=True)
        ends = counts.cumsum(0).tolist()
        return [
            inputs.map_tokens(operator.itemgetter(slice(start, end)))
            for start, end in zip([0, *ends], ends, strict=False)
        ]

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        positions_XS = positions_X[..., None, :].where(self._same_sequence(positions_X), -1)
        return _last_position(positions_XS) + 1

    def _same_sequence(self, positions_X: Tensor) -> Tensor:
        if self.segments_T is None:
            return torch.ones((), dtype=torch.bool, device=positions_X.device)
        return self.segments_T[:, None] == self.segments_T[None, :]


class ContiguousKVCache(UnpagedKVCache):
    """Keys and values of `batch` sequences of up to `capacity` tokens, in the [B, T] layout.

    The key of position p is in slot p + 1. Slot 0 takes the keys of padding; only padding attends
    to it. A position past the capacity raises torch's IndexError.
    """

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.capacity = capacity
        self.batch = batch
        self.row_of_layer = {spec.layer_index: row for row, spec in enumerate(specs)}
        self.states: dict[int, tuple[Tensor, Tensor | None]] = {}  # by layer, from its first use on
        slots = (batch, capacity + 1)
        self.keys = [
            torch.zeros(*slots, spec.num_kv_heads, spec.key_dim, dtype=dtype, device=device)
            for spec in specs
        ]
        self.values = [
            torch.zeros(*slots, spec.num_kv_heads, spec.value_dim, dtype=dtype, device=device)
            for spec in specs
            if not spec.is_mla
        ]

    def attend(
        self,
        spec: AttentionSpec,
        q_XNH: Tensor,
        k_XKH: Tensor | None,
        v_XKV: Tensor | None,
        positions_X: Tensor,
        sinks_N: Tensor | None,
    ) -> Tensor:
        assert k_XKH is not None, "this cache has no slots that a kernel could have written to"
        device = positions_X.device
        slot_BT = positions_X.clamp(min=-1) + 1
        row_B1 = torch.arange(positions_X.shape[0], device=device)[:, None]
        row = self.row_of_layer[spec.layer_index]
        keys_BSKH = self.keys[row]
        keys_BSKH[row_B1, slot_BT] = k_XKH.to(keys_BSKH.dtype)
        if v_XKV is None:
            values_BSKV = keys_BSKH[..., : spec.value_dim]
        else:
            values_BSKV = self.values[row]
            values_BSKV[row_B1, slot_BT] = v_XKV.to(values_BSKV.dtype)
        slots_S = torch.arange(self.capacity + 1, device=device)
        mask_BTS = build_attention_mask(spec, positions_X, slots_S - 1)
        mask_BTS = mask_BTS | (slot_BT[..., None] == slots_S)
        return masked_attention(spec, q_XNH, keys_BSKH, values_BSKV, mask_BTS, sinks_N)

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        return attend_absorbed(self.attend, spec, inputs, positions_X)

    def causal_conv(
        self, spec: StateSpec, x_XC: Tensor, conv: ConvWeights, positions_X: Tensor
    ) -> Tensor:
        is_token, layout = self._layout(positions_X)
        out_XC = torch.zeros_like(x_XC, memory_format=torch.contiguous_format)
        conv_state, _ = self._states(spec, x_XC)
        weight_WC, bias_C, activation = conv
        out_XC[is_token] = linear_attention.causal_conv(
            x_XC[is_token], weight_WC, bias_C, conv_state, layout, activation
        )
        return out_XC

    def gated_delta_rule(
        self, spec: StateSpec, inputs: DeltaRuleInputs, positions_X: Tensor
    ) -> Tensor:
        is_token, layout = self._layout(positions_X)
        out_XNV = torch.zeros_like(inputs.v_TNV, memory_format=torch.contiguous_format)
        _, state = self._states(spec, inputs.v_TNV)
        assert state is not None, "a layer with linear attention has a recurrent state"
        tokens = inputs.map_tokens(lambda x: x[is_token])
        out_XNV[is_token] = linear_attention.gated_delta_rule(tokens, state, layout)
        return out_XNV

    def _layout(self, positions_BT: Tensor) -> tuple[Tensor, SequenceLayout]:
        """Which entries are tokens, and the layout of the tokens alone, without padding."""
        is_token = positions_BT >= 0
        counts_B = is_token.sum(dim=1, dtype=torch.int32)
        starts = F.pad(counts_B.cumsum(0, dtype=torch.int32), (1, 0))
        lengths_B = (_last_position(positions_BT) + 1).to(torch.int32)
        slots_B = torch.arange(self.batch, dtype=torch.int32, device=positions_BT.device)
        lengths_B = torch.maximum(lengths_B, counts_B)
        longest = int(counts_B.max())
        return is_token, SequenceLayout(starts, lengths_B, slots_B, lengths_B, longest)

    def _states(self, spec: StateSpec, x: Tensor) -> tuple[Tensor, Tensor | None]:
        if spec.layer_index not in self.states:
            recurrent = None
            if spec.recurrent_shape is not None:
                shape = (self.batch, *spec.recurrent_shape)
                recurrent = torch.zeros(shape, dtype=torch.float32, device=x.device)
            conv_state = torch.zeros((self.batch, *spec.conv_shape), dtype=x.dtype, device=x.device)
            self.states[spec.layer_index] = conv_state, recurrent
        return self.states[spec.layer_index]

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        return _last_position(positions_X)[..., None] + 1


def _last_position(positions_XS: Tensor) -> Tensor:
    """The largest position of each row; -1 without tokens, as on a rank that has none in a step."""
    if not positions_XS.shape[-1]:
        return positions_XS.new_full(positions_XS.shape[:-1], -1)
    return positions_XS.amax(dim=-1)
