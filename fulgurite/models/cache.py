"""Where attention happens: queries, keys and values of new tokens in, what they attend to out.

A model does not know where keys and values live. Each attention layer hands its new ones to
`Cache.attend`, which stores them (or not) and answers. Two caches are here: `WholeSequence` keeps
nothing, `ContiguousCache` keeps one row a sequence; a paged one only has to offer the same five
names.

Who sees whom is said by positions alone: a query at position i sees the keys of its sequence at
positions j <= i, within its window or chunk. A negative position marks padding: its key is seen by
nobody else, and what comes out in its place means nothing. So no mask is passed around, and padding
leaves no trace.

Shapes: X the layout of the tokens, [T] or [B, T]; B sequences; T new tokens; S keys; N query heads;
K key heads; H size of a query or key; V size of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.elementwise.ops import Heads, Pages
from fulgurite.models.latent import LatentStep, absorbed, expanded


@dataclass(frozen=True)
class AttentionSpec:
    """What one layer's attention is; `latent`: a value is the first numbers of its key."""

    layer: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    latent: bool = False


class Cache(Protocol):
    """The whole of what a model asks of a cache."""

    def pages(self, spec: AttentionSpec) -> Pages | None:
        """Where a kernel may store the layer's new keys and values itself; None: `attend` does."""
        ...

    def attend_fresh(
        self, spec: AttentionSpec, heads: Heads, sinks_N: Tensor | None
    ) -> Tensor | None:
        """From the linears to [X, N, V] in one kernel; None where there is none: `attend` then."""
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
        """Store the new keys and values of layer `spec.layer`, then attend; returns [X, N, V].

        `v_XKV` is None for a latent layer, and both where they are in their `pages` already.
        """
        ...

    def attend_latent(self, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
        """The same for latent attention, from its raw projections; returns [X, N, V]."""
        ...

    def extent(self, positions_X: Tensor) -> Tensor:
        """How long the sequence of each token is (or is going to be); broadcastable to X."""
        ...


class Unpaged:
    """What caches without pages, and without kernels of their own, say of them."""

    def pages(self, spec: AttentionSpec) -> None:
        return None

    def attend_fresh(self, spec: AttentionSpec, heads: Heads, sinks_N: Tensor | None) -> None:
        return None


class WholeSequence(Unpaged):
    """No cache: the tokens of the call are all there is. For training, scoring and as the plain
    reference.

    A flat [T] layout is one sequence, or several where `segments_T` says which token is whose.
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
        assert k_XKH is not None, "there are no pages that keys could be in"
        values = k_XKH[..., : spec.value_dim] if v_XKV is None else v_XKV
        seen_XS = visible(spec, positions_X, positions_X) & self._together(positions_X)
        own_TT = torch.eye(positions_X.shape[-1], dtype=torch.bool, device=positions_X.device)
        return attention(spec, q_XNH, k_XKH, values, seen_XS | own_TT, sinks_N)

    def attend_latent(self, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
        return expanded(self.attend, spec, step, positions_X)

    def extent(self, positions_X: Tensor) -> Tensor:
        positions_XS = positions_X[..., None, :].where(self._together(positions_X), -1)
        return positions_XS.amax(dim=-1) + 1

    def _together(self, positions_X: Tensor) -> Tensor:
        if self.segments_T is None:
            return torch.ones((), dtype=torch.bool, device=positions_X.device)
        return self.segments_T[:, None] == self.segments_T[None, :]


class ContiguousCache(Unpaged):
    """Keys and values of `batch` sequences of up to `capacity` tokens, in the [B, T] layout.

    The key of position p lies in slot p + 1; slot 0 takes the keys of padding, which only padding
    sees. A position past the capacity is an IndexError of torch's.
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
            torch.zeros(*slots, spec.kv_heads, spec.key_dim, dtype=dtype, device=device)
            for spec in specs
        ]
        self.values = [
            torch.zeros(*slots, spec.kv_heads, spec.value_dim, dtype=dtype, device=device)
            for spec in specs
            if not spec.latent
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
        assert k_XKH is not None, "there are no pages that keys could be in"
        device = positions_X.device
        slot_BT = positions_X.clamp(min=-1) + 1
        row_B1 = torch.arange(positions_X.shape[0], device=device)[:, None]
        keys_BSKH = self.keys[spec.layer]
        keys_BSKH[row_B1, slot_BT] = k_XKH.to(keys_BSKH.dtype)
        if v_XKV is None:
            values_BSKV = keys_BSKH[..., : spec.value_dim]
        else:
            values_BSKV = self.values[spec.layer]
            values_BSKV[row_B1, slot_BT] = v_XKV.to(values_BSKV.dtype)
        slots_S = torch.arange(self.capacity + 1, device=device)
        seen_BTS = visible(spec, positions_X, slots_S - 1) | (slot_BT[..., None] == slots_S)
        return attention(spec, q_XNH, keys_BSKH, values_BSKV, seen_BTS, sinks_N)

    def attend_latent(self, spec: AttentionSpec, step: LatentStep, positions_X: Tensor) -> Tensor:
        return absorbed(self.attend, spec, step, positions_X)

    def extent(self, positions_X: Tensor) -> Tensor:
        return positions_X.amax(dim=-1, keepdim=True) + 1


def visible(spec: AttentionSpec, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """Whether each query [.., T] sees each key [.., S]: causal, within the window or chunk."""
    query, key = query_positions[..., :, None], key_positions[..., None, :]
    seen = (key >= 0) & (key <= query)
    if spec.window is not None:
        seen = seen & (query - key < spec.window)
    if spec.chunk is not None:
        seen = seen & (query // spec.chunk == key // spec.chunk)
    return seen


def attention(
    spec: AttentionSpec,
    q_BTNH: Tensor,
    k_BSKH: Tensor,
    v_BSKV: Tensor,
    seen_BTS: Tensor,
    sinks_N: Tensor | None,
) -> Tensor:
    """softmax(softcap(scale q k) over the seen keys, and the sink) v, for [B, T] or one [T]
    sequence.

    A sink is a key without a value: it takes its share of the softmax and gives nothing.
    """
    q_BNTH = q_BTNH.transpose(-2, -3)
    k_BKSH = k_BSKH.transpose(-2, -3).to(q_BTNH.dtype)
    v_BKSV = v_BSKV.transpose(-2, -3).to(q_BTNH.dtype)
    mask_B1TS = seen_BTS[..., None, :, :]
    if spec.softcap is None and sinks_N is None:
        grouped = spec.heads != spec.kv_heads
        out_BNTV = F.scaled_dot_product_attention(
            q_BNTH, k_BKSH, v_BKSV, attn_mask=mask_B1TS, scale=spec.scale, enable_gqa=grouped
        )
        return out_BNTV.transpose(-2, -3)
    group = spec.heads // spec.kv_heads
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
