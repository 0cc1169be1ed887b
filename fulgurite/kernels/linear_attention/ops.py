"""Linear attention with states in slots: tokens of many sequences end to end in, outputs out.

    causal_conv         out[t] = activation(bias + sum_w weight[w] x[t - W + 1 + w])
    gated_delta_rule    S = decay S + k (beta (v - k^T decay S))^T,   out[t] = q^T S

A sequence's state is in one slot of a pool: the last W - 1 inputs of a convolution, or the matrix S.
Both operators read the state, and write it after the sequence's last token, in place. A sequence
that begins in this call starts from zeros, so slots need no clearing. `SequenceLayout` says where
sequences and slots are; prefill, decode and any mixture are one call.

On CPUs, both run token by token. Outputs don't depend on how a sequence is cut into calls. On GPUs
whole blocks of `CHUNK` prompt tokens run in chunked form; the rest, and all replies, token by token.
Blocks begin at multiples of `CHUNK`, so cuts at such multiples don't change the outputs. In
deterministic mode GPUs run token by token, too.

Three implementations: plain torch (`reference`), C++ (`cpu`) and Triton (`triton_causal_conv`,
`triton_delta_rule`). The functions here select one by device.

Shapes: T tokens; C channels; W taps; K key heads; N value heads; D key size; V value size; R slots.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels import registry
from fulgurite.kernels.linear_attention import (
    cpu,
    reference,
    triton_causal_conv,
    triton_delta_rule,
)
from fulgurite.kernels.linear_attention.metadata import (
    DeltaRuleInputs,
    SequenceLayout,
    check_conv,
    check_delta_rule,
    check_layout,
)

# device type -> kernel with the operator's arguments; it may return NotImplemented
CAUSAL_CONV_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.causal_conv,
    "cuda": triton_causal_conv.causal_conv,
}
GATED_DELTA_RULE_KERNELS: dict[str, registry.Kernel] = {
    "cpu": cpu.gated_delta_rule,
    "cuda": triton_delta_rule.gated_delta_rule,
}
# Sequences may be cut at multiples of this without changing the outputs' bits.
CUT_ALIGNMENT = {"cpu": 1, "cuda": triton_delta_rule.CHUNK}
ACTIVATIONS = (None, "silu")


def causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state_RWC: Tensor,
    layout: SequenceLayout,
    activation: str | None = "silu",
) -> Tensor:
    """A short convolution over time, channel by channel; returns [T, C].

    state_RWC   [R, W - 1, C] in x's dtype: the last inputs of each sequence, the latest last
    """
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"activation={activation!r}", next=f"one of {ACTIVATIONS}")
    check_conv(x_TC, weight_WC, bias_C, state_RWC)
    check_layout(layout, x_TC.shape[0])
    if torch.compiler.is_compiling():
        return _causal_conv_op(x_TC, weight_WC, bias_C, state_RWC, *layout, activation)
    return _dispatch_causal_conv(x_TC, weight_WC, bias_C, state_RWC, layout, activation)


def gated_delta_rule(inputs: DeltaRuleInputs, state_RNDV: Tensor, layout: SequenceLayout) -> Tensor:
    """Gated linear attention with the delta rule; returns [T, N, V].

    Queries and keys are normalized to length 1, queries scaled by 1 / sqrt(D).
    """
    check_delta_rule(inputs, state_RNDV)
    check_layout(layout, inputs.q_TKD.shape[0])
    if torch.compiler.is_compiling():
        return _gated_delta_rule_op(*inputs, state_RNDV, *layout)
    return _dispatch_delta_rule(inputs, state_RNDV, layout)


def gated_delta_rule_meta(inputs: DeltaRuleInputs) -> Tensor:
    """The allocations of `gated_delta_rule` on a GPU, for plans on the meta device."""
    tokens, heads, _ = inputs.v_TNV.shape
    workspace = inputs.v_TNV.new_empty(
        (tokens, heads, triton_delta_rule.CHUNK), dtype=torch.float32
    )
    out_TNV = inputs.v_TNV.new_empty(inputs.v_TNV.shape)
    del workspace
    return out_TNV


def _dispatch_causal_conv(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state_RWC: Tensor,
    layout: SequenceLayout,
    activation: str | None,
) -> Tensor:
    """Run the kernel of this device."""
    arguments = (x_TC, weight_WC, bias_C, state_RWC, layout, activation)
    out: Tensor = registry.dispatch(
        CAUSAL_CONV_KERNELS, x_TC.device, reference.causal_conv, *arguments
    )
    return out


def _dispatch_delta_rule(
    inputs: DeltaRuleInputs, state_RNDV: Tensor, layout: SequenceLayout
) -> Tensor:
    """Run the kernel of this device."""
    out: Tensor = registry.dispatch(
        GATED_DELTA_RULE_KERNELS,
        state_RNDV.device,
        reference.gated_delta_rule,
        inputs,
        state_RNDV,
        layout,
    )
    return out


def _causal_conv_schema(
    x_TC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    state_RWC: Tensor,
    query_start_loc: Tensor,
    seq_lens_S: Tensor,
    slots_S: Tensor,
    prompt_lens_S: Tensor,
    max_query_len: int,
    activation: str | None,
) -> Tensor:
    """`causal_conv` with a flat argument list, which a torch operator's schema needs."""
    layout = SequenceLayout(query_start_loc, seq_lens_S, slots_S, prompt_lens_S, max_query_len)
    return _dispatch_causal_conv(x_TC, weight_WC, bias_C, state_RWC, layout, activation)


def _gated_delta_rule_schema(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TNV: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    state_RNDV: Tensor,
    query_start_loc: Tensor,
    seq_lens_S: Tensor,
    slots_S: Tensor,
    prompt_lens_S: Tensor,
    max_query_len: int,
) -> Tensor:
    """`gated_delta_rule` with a flat argument list, which a torch operator's schema needs."""
    inputs = DeltaRuleInputs(q_TKD, k_TKD, v_TNV, a_TN, b_TN, A_log_N, dt_bias_N)
    layout = SequenceLayout(query_start_loc, seq_lens_S, slots_S, prompt_lens_S, max_query_len)
    return _dispatch_delta_rule(inputs, state_RNDV, layout)


_causal_conv_op = torch.library.custom_op(
    "fulgurite::causal_conv", _causal_conv_schema, mutates_args=("state_RWC",)
)
_gated_delta_rule_op = torch.library.custom_op(
    "fulgurite::gated_delta_rule", _gated_delta_rule_schema, mutates_args=("state_RNDV",)
)


@_causal_conv_op.register_fake
def _(x_TC, *rest):  # type: ignore[no-untyped-def]
    return x_TC.new_empty(x_TC.shape)


@_gated_delta_rule_op.register_fake
def _(q_TKD, k_TKD, v_TNV, *rest):  # type: ignore[no-untyped-def]
    return v_TNV.new_empty(v_TNV.shape)
