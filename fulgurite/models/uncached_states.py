"""MLA and linear attention without a cache in deterministic mode: the engine's kernels and bits.

    mla_deterministic          what `PagedKVCache.attend_mla` computes (absorbed)
    conv_deterministic         what its `causal_conv` computes
    delta_rule_deterministic   what its `gated_delta_rule` computes (token by token)

In: what the layers pass to a `KVCache`, and segments: [T] of a flat layout, or [B, T] documents. Out:
the layers' outputs. They may be captured. Gradients are those of plain torch ops.

Shapes: X token layout, [T] or [B, T]; T tokens; S keys; N heads; C channels or rank; others as in
`mla.py` and `linear_attention.py`.
"""

from __future__ import annotations

import operator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.attention.uncached import sequence_lengths
from fulgurite.kernels.common.recompute import recompute_gradients
from fulgurite.kernels.linear_attention import reference as linear_attention_reference
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs
from fulgurite.kernels.linear_attention.uncached import uncached_causal_conv, uncached_delta_rule
from fulgurite.kernels.mla.uncached import uncached_mla
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.mla import MLAInputs, attend_expanded
from fulgurite.models.rope import RotaryCosSin
from fulgurite.models.uncached_attention import masked_attention
from fulgurite.op import op

# ---- MLA -----------------------------------------------------------------------------------------


def mla_deterministic(
    spec: AttentionSpec,
    inputs: MLAInputs,
    positions_X: Tensor,
    segments_T: Tensor | None,
    kv_dtype: torch.dtype | None,
) -> Tensor:
    """Absorbed attention over latents in `kv_dtype` (None: the dtype of the inputs), [X, N, V]."""
    out: Tensor = _uncached_mla_op(
        inputs.q_XNH, inputs.kv_a_XL, inputs.kv_a_norm_C, inputs.kv_b_NUC, *inputs.cos_sin,
        positions_X, segments_T, spec.scale, inputs.eps, inputs.interleaved,
        kv_dtype or inputs.kv_a_XL.dtype,
    )  # fmt: skip
    return out


@op("fulgurite::uncached_mla")
def _uncached_mla_op(
    q_XNH: Tensor,
    kv_a_XL: Tensor,
    norm_C: Tensor,
    kv_b_NUC: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
    scale: float,
    eps: float,
    interleaved: bool,
    cache_dtype: torch.dtype,
) -> Tensor:
    return uncached_mla(
        q_XNH, kv_a_XL, norm_C, kv_b_NUC, cos, sin, positions_X, segments_T,
        scale=scale, eps=eps, interleaved=interleaved, cache_dtype=cache_dtype,
    )  # fmt: skip


@_uncached_mla_op.fake
def _(
    q_XNH: Tensor, kv_a_XL: Tensor, norm_C: Tensor, kv_b_NUC: Tensor, cos: Tensor, *rest: Any
) -> Tensor:
    value_dim = kv_b_NUC.shape[1] - (q_XNH.shape[-1] - 2 * cos.shape[-1])
    return q_XNH.new_empty((*q_XNH.shape[:-1], value_dim))


def _uncached_mla_reference(
    q_XNH: Tensor,
    kv_a_XL: Tensor,
    norm_C: Tensor,
    kv_b_NUC: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
    scale: float,
    eps: float,
    interleaved: bool,
    cache_dtype: torch.dtype,
) -> Tensor:
    """The same in plain torch ops, for the gradient."""
    inputs = MLAInputs(q_XNH, kv_a_XL, norm_C, eps, kv_b_NUC, RotaryCosSin(cos, sin), interleaved)
    heads, rank = q_XNH.shape[-2], norm_C.shape[0]
    spec = AttentionSpec(0, heads, 1, kv_a_XL.shape[-1], rank, scale, is_mla=True)
    index = torch.arange(positions_X.shape[-1], device=positions_X.device)
    mask_XS = index[:, None] >= index[None, :]
    if segments_T is not None:
        mask_XS = mask_XS & (segments_T[..., :, None] == segments_T[..., None, :])

    def attend(
        expanded: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, sinks: None
    ) -> Tensor:
        return masked_attention(expanded, q, k, v, mask_XS, sinks)

    return attend_expanded(attend, spec, inputs, positions_X)


@_uncached_mla_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(_uncached_mla_reference, inputs, grad_out)


# ---- layers with a state -------------------------------------------------------------------------


def conv_deterministic(
    x_XC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    positions_X: Tensor,
    segments_T: Tensor | None,
) -> Tensor:
    """The convolution over each sequence's tokens, [X, C]."""
    out: Tensor = _uncached_conv_op(
        x_XC, weight_WC, bias_C, positions_X, segments_T, activation or ""
    )
    return out


@op("fulgurite::uncached_conv")
def _uncached_conv_op(
    x_XC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    positions_X: Tensor,
    segments_T: Tensor | None,
    activation: str,
) -> Tensor:
    lengths = sequence_lengths(positions_X, segments_T)
    return uncached_causal_conv(x_XC, weight_WC, bias_C, activation or None, lengths)


@_uncached_conv_op.fake
def _(x_XC: Tensor, *rest: Any) -> Tensor:
    return x_XC.new_empty(x_XC.shape)


def _uncached_conv_reference(
    x_XC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    positions_X: Tensor,
    segments_T: Tensor | None,
    activation: str,
) -> Tensor:
    """The same in plain torch ops, for the gradient."""
    x_BTC = x_XC[None] if x_XC.dim() == 2 else x_XC
    out_BTC = linear_attention_reference.convolve(
        x_BTC, weight_WC, bias_C, activation or None, segments_T
    )
    return out_BTC.view(x_XC.shape)


@_uncached_conv_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(_uncached_conv_reference, inputs, grad_out)


def delta_rule_deterministic(
    inputs: DeltaRuleInputs, positions_X: Tensor, segments_T: Tensor | None
) -> Tensor:
    """Linear attention over each sequence's tokens, [X, N, V]."""
    out: Tensor = _uncached_delta_rule_op(*inputs, positions_X, segments_T)
    return out


@op("fulgurite::uncached_delta_rule")
def _uncached_delta_rule_op(
    q_XKD: Tensor,
    k_XKD: Tensor,
    v_XNV: Tensor,
    a_XN: Tensor,
    b_XN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
) -> Tensor:
    inputs = DeltaRuleInputs(q_XKD, k_XKD, v_XNV, a_XN, b_XN, A_log_N, dt_bias_N)
    return uncached_delta_rule(inputs, sequence_lengths(positions_X, segments_T))


@_uncached_delta_rule_op.fake
def _(q_XKD: Tensor, k_XKD: Tensor, v_XNV: Tensor, *rest: Any) -> Tensor:
    return v_XNV.new_empty(v_XNV.shape)


def _uncached_delta_rule_reference(
    q_XKD: Tensor,
    k_XKD: Tensor,
    v_XNV: Tensor,
    a_XN: Tensor,
    b_XN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    positions_X: Tensor,
    segments_T: Tensor | None,
) -> Tensor:
    """The same in plain torch ops, for the gradient."""
    inputs = DeltaRuleInputs(q_XKD, k_XKD, v_XNV, a_XN, b_XN, A_log_N, dt_bias_N)
    if positions_X.dim() == 2:
        inputs = inputs.map_tokens(lambda x: x.flatten(0, 1))
    ends = list(accumulate(sequence_lengths(positions_X, segments_T)))
    parts = [
        linear_attention_reference.chunked_delta_rule(
            inputs.map_tokens(operator.itemgetter(slice(start, end))), 1
        )[0]
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    return torch.cat(parts).reshape(v_XNV.shape).to(v_XNV.dtype)


@_uncached_delta_rule_op.backward
def _(inputs: tuple, output: Tensor, grad_out: Tensor) -> tuple:  # type: ignore[type-arg]
    return recompute_gradients(_uncached_delta_rule_reference, inputs, grad_out)
