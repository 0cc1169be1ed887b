"""Attention without a cache: queries, keys and values of whole sequences in, outputs out.

    masked_attention      plain torch ops, for any mask
    attend_deterministic  the kernel of the paged KV cache, and so the bits of the engine

Shapes: X token layout, [T] or [B, T]; B sequences; T tokens; S keys; N query heads; K KV heads; H
size of a query or key; V size of a value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.kernels.attention.metadata import AttentionOptions
from fulgurite.kernels.attention.uncached import uncached_attention
from fulgurite.kernels.common.recompute import recompute_gradients
from fulgurite.models.attention_spec import AttentionSpec, build_attention_mask
from fulgurite.op import op


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


def attend_deterministic(
    spec: AttentionSpec,
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKV: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
    sinks_N: Tensor | None,
) -> Tensor:
    """Causal attention by the kernel of the paged cache; it may be captured and has a gradient."""
    out: Tensor = _uncached_attention_op(
        q_XNH, k_XKH, v_XKV, positions_X, segments_T, sinks_N, spec.num_heads, spec.num_kv_heads,
        spec.key_dim, spec.value_dim, spec.scale, spec.sliding_window, spec.chunk_size,
        spec.softcap,
    )  # fmt: skip
    return out


@op("fulgurite::uncached_attention")
def _uncached_attention_op(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKV: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
    sinks_N: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> Tensor:
    """Attention of `NoKVCache` in deterministic mode."""
    options = AttentionOptions(scale, value_dim, window, chunk, softcap, sinks_N)
    return uncached_attention(q_XNH, k_XKH, v_XKV, positions_X, segments_T, options)


@_uncached_attention_op.fake
def _(q_XNH: Tensor, k_XKH: Tensor, v_XKV: Tensor, *rest: Any) -> Tensor:
    return q_XNH.new_empty((*q_XNH.shape[:-1], v_XKV.shape[-1]))


def _uncached_reference(
    q_XNH: Tensor,
    k_XKH: Tensor,
    v_XKV: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
    sinks_N: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    key_dim: int,
    value_dim: int,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
) -> Tensor:
    """The same in plain torch ops, for the gradient."""
    spec = AttentionSpec(
        0, num_heads, num_kv_heads, key_dim, value_dim, scale, sliding_window=window,
        chunk_size=chunk, softcap=softcap,
    )  # fmt: skip
    mask_XS = build_attention_mask(spec, positions_X, positions_X)
    if segments_T is not None:
        mask_XS = mask_XS & (segments_T[:, None] == segments_T[None, :])
    return masked_attention(spec, q_XNH, k_XKH, v_XKV, mask_XS, sinks_N)


@_uncached_attention_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(_uncached_reference, inputs, grad_out)
