"""KV caches: queries, keys and values of new tokens in, attention outputs out.

A model does not know where keys and values are stored. Each attention layer passes its new keys and
values to `KVCache.attend`, which stores them and computes attention. Two caches are here.
`NoKVCache` stores nothing. `ContiguousKVCache` stores one row per sequence. The paged cache of the
engine (`serve/engine/kv_cache.py`) implements the same protocol.

Positions alone define the attention mask. A query at position i attends to the keys of its sequence
at positions j <= i, within its sliding window or chunk. A negative position marks padding: only
padding attends to its key, and its output is undefined. So callers pass no mask.

Shapes: X token layout, [T] or [B, T]; B sequences; T new tokens; S keys; N query heads; K KV heads;
H size of a query or key; V size of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.elementwise.ops import KVCacheSlots, ProjectedQKV
from fulgurite.models.attention_spec import AttentionSpec, build_attention_mask
from fulgurite.models.mla import MLAInputs, attend_absorbed, attend_expanded


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
    `segments_T` gives the sequence of each token.
    """

    def __init__(self, segments_T: Tensor | None = None) -> None:
        self.segments_T = segments_T

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
        mask_XS = build_attention_mask(spec, positions_X, positions_X)
        mask_XS = mask_XS & self._same_sequence(positions_X)
        diagonal_TT = torch.eye(positions_X.shape[-1], dtype=torch.bool, device=positions_X.device)
        return masked_attention(spec, q_XNH, k_XKH, values, mask_XS | diagonal_TT, sinks_N)

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        return attend_expanded(self.attend, spec, inputs, positions_X)

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        positions_XS = positions_X[..., None, :].where(self._same_sequence(positions_X), -1)
        return positions_XS.amax(dim=-1) + 1

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
        keys_BSKH = self.keys[spec.layer_index]
        keys_BSKH[row_B1, slot_BT] = k_XKH.to(keys_BSKH.dtype)
        if v_XKV is None:
            values_BSKV = keys_BSKH[..., : spec.value_dim]
        else:
            values_BSKV = self.values[spec.layer_index]
            values_BSKV[row_B1, slot_BT] = v_XKV.to(values_BSKV.dtype)
        slots_S = torch.arange(self.capacity + 1, device=device)
        mask_BTS = build_attention_mask(spec, positions_X, slots_S - 1)
        mask_BTS = mask_BTS | (slot_BT[..., None] == slots_S)
        return masked_attention(spec, q_XNH, keys_BSKH, values_BSKV, mask_BTS, sinks_N)

    def attend_mla(self, spec: AttentionSpec, inputs: MLAInputs, positions_X: Tensor) -> Tensor:
        return attend_absorbed(self.attend, spec, inputs, positions_X)

    def sequence_lengths(self, positions_X: Tensor) -> Tensor:
        return positions_X.amax(dim=-1, keepdim=True) + 1


def masked_attention(
    spec: AttentionSpec,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    mask_BTS: Tensor,
    sinks_N: Tensor | None,
) -> Tensor:
    """out = softmax(softcap(scale * q @ k.T), masked, with the sink) @ v, for [B, T] or one [T]
    sequence.

    A sink is a key without a value: it only adds to the denominator of the softmax.
    """
    q_BNTH = q_BTNH.transpose(-2, -3)
    k_BKSH = k_BSKH.transpose(-2, -3).to(q_BTNH.dtype)
    v_BKSV = v_BSKV.transpose(-2, -3).to(q_BTNH.dtype)
    mask_B1TS = mask_BTS[..., None, :, :]
    if spec.softcap is None and sinks_N is None:
        grouped = spec.num_heads != spec.num_kv_heads
        out_BNTV = F.scaled_dot_product_attention(
            q_BNTH, k_BKSH, v_BKSV, attn_mask=mask_B1TS, scale=spec.scale, enable_gqa=grouped
        )
        return out_BNTV.transpose(-2, -3)
    group = spec.num_heads // spec.num_kv_heads
    k_BNSH, v_BNSV = (x.repeat_interleave(group, dim=-3) for x in (k_BKSH, v_BKSV))
    scores_BNTS = (q_BNTH @ k_BNSH.transpose(-1, -2)).float() * spec.scale
    if spec.softcap is not None:
        scores_BNTS = torch.tanh(scores_BNTS / spec.softcap) * spec.softcap
    scores_BNTS = scores_BNTS.masked_fill(~mask_B1TS, float("-inf"))
    if sinks_N is not None:
        sinks_BNT1 = sinks_N.float()[:, None, None].expand(*scores_BNTS.shape[:-1], 1)
        scores_BNTS = torch.cat((scores_BNTS, sinks_BNT1), dim=-1)
    weights_BNTS = scores_BNTS.softmax(dim=-1)[..., : k_BNSH.shape[-2]]
    return (weights_BNTS.to(v_BNSV.dtype) @ v_BNSV).transpose(-2, -3)
