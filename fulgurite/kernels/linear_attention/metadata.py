"""What linear attention reads beside its tensors: the sequences of a step and their state slots."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError


class SequenceLayout(NamedTuple):
    """The sequences of a step, end to end along T.

    query_start_loc   int32 [S + 1]; the tokens of sequence s are
                      query_start_loc[s]:query_start_loc[s + 1]
    seq_lens_S        int32; tokens of each sequence, with those of this step. A sequence whose first
                      token is in this step starts from a zero state, whatever its slot holds
    slots_S           int32; slot of each sequence's state; negative: padding, its output is undefined
    prompt_lens_S     int32; tokens of each prompt. GPUs run whole blocks of a prompt in chunked form
    max_query_len     most tokens of a sequence in this step
    """

    query_start_loc: Tensor
    seq_lens_S: Tensor
    slots_S: Tensor
    prompt_lens_S: Tensor
    max_query_len: int


class DeltaRuleInputs(NamedTuple):
    """The inputs of the gated delta rule, as projected.

    q_TKD, k_TKD   queries and keys, which the operator normalizes to length 1
    v_TNV          values; N is a multiple of K, value head n reads key head n // (N // K)
    a_TN, b_TN     gates: decay = exp(-exp(A_log) * softplus(a + dt_bias)), beta = sigmoid(b)
    """

    q_TKD: Tensor
    k_TKD: Tensor
    v_TNV: Tensor
    a_TN: Tensor
    b_TN: Tensor
    A_log_N: Tensor
    dt_bias_N: Tensor

    def map_tokens(self, function: Callable[[Tensor], Tensor]) -> DeltaRuleInputs:
        """The inputs with a function applied to those that have a row a token."""
        q, k, v, a, b = (function(x) for x in self[:5])
        return self._replace(q_TKD=q, k_TKD=k, v_TNV=v, a_TN=a, b_TN=b)


def check_layout(layout: SequenceLayout, num_tokens: int) -> None:
    """Raise ArgumentError for tensors of the wrong dtype or shape."""
    count = layout.seq_lens_S.shape[0]
    shapes = (
        ("query_start_loc", layout.query_start_loc, count + 1),
        ("seq_lens", layout.seq_lens_S, count),
        ("slots", layout.slots_S, count),
        ("prompt_lens", layout.prompt_lens_S, count),
    )
    for name, tensor, size in shapes:
        if tensor.dtype != torch.int32 or tensor.shape != (size,) or not tensor.is_contiguous():
            raise ArgumentError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}",
                next=f"give contiguous int32 [{size}]",
            )
    if layout.max_query_len > num_tokens:
        raise ArgumentError(f"max_query_len={layout.max_query_len} of {num_tokens} tokens")


def check_delta_rule(inputs: DeltaRuleInputs, state_RNDV: Tensor) -> None:
    """Raise ArgumentError where shapes don't fit together."""
    q, k, v, a, b, a_log, dt_bias = inputs
    (tokens, key_heads, key_dim), (heads, value_dim) = q.shape, v.shape[1:]
    if k.shape != q.shape or v.shape[0] != tokens or key_heads == 0 or heads % key_heads:
        raise ArgumentError(
            f"queries {list(q.shape)}, keys {list(k.shape)} and values {list(v.shape)} don't fit "
            "together",
            next="queries and keys are [T, K, D], values [T, N, V] with N a multiple of K",
        )
    for name, gate in (("a", a), ("b", b)):
        if gate.shape != (tokens, heads):
            raise ArgumentError(f"{name} is {list(gate.shape)}", next=f"give [{tokens}, {heads}]")
    if a_log.shape != (heads,) or dt_bias.shape != (heads,):
        raise ArgumentError(
            f"A_log {list(a_log.shape)} and dt_bias {list(dt_bias.shape)} must be [{heads}]"
        )
    expected = (heads, key_dim, value_dim)
    if state_RNDV.shape[1:] != expected or state_RNDV.dtype != torch.float32:
        raise ArgumentError(
            f"states are {state_RNDV.dtype} {list(state_RNDV.shape)}",
            next=f"give float32 [slots, {', '.join(map(str, expected))}]",
        )


def check_conv(x_TC: Tensor, weight_WC: Tensor, bias_C: Tensor | None, state: Tensor) -> None:
    """Raise ArgumentError where shapes don't fit together."""
    width, channels = weight_WC.shape
    if x_TC.dim() != 2 or x_TC.shape[1] != channels:
        raise ArgumentError(f"inputs {list(x_TC.shape)} of a convolution of {channels} channels")
    if bias_C is not None and bias_C.shape != (channels,):
        raise ArgumentError(f"the bias is {list(bias_C.shape)}", next=f"give [{channels}]")
    if state.shape[1:] != (width - 1, channels):
        raise ArgumentError(
            f"states are {list(state.shape)}", next=f"give [slots, {width - 1}, {channels}]"
        )
