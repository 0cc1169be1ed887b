"""Linear attention of whole sequences without a cache, with the kernels and the bits of the engine.

In: the inputs of tokens, [T] or [B, T]; `segments` gives the sequence of each token of a flat layout.
Positions must count from 0 in each sequence. Out: the outputs. Every sequence has a state of its own,
which begins as zeros and is dropped at the end.

For forward only; `models.uncached_states` adds the gradient. Shapes as in `ops.py`; X token layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs, SequenceLayout
from fulgurite.kernels.linear_attention.ops import causal_conv, gated_delta_rule


def uncached_causal_conv(
    x_XC: Tensor,
    weight_WC: Tensor,
    bias_C: Tensor | None,
    activation: str | None,
    lengths: list[int],
) -> Tensor:
    """The convolution of sequences of these lengths, end to end."""
    x_TC = x_XC.reshape(-1, x_XC.shape[-1])
    if not sum(lengths):
        return torch.zeros_like(x_XC)
    state = x_TC.new_empty((len(lengths), weight_WC.shape[0] - 1, x_TC.shape[1]))
    out_TC = causal_conv(x_TC, weight_WC, bias_C, state, _layout(lengths, x_TC.device), activation)
    return out_TC.view(x_XC.shape)


def uncached_delta_rule(inputs: DeltaRuleInputs, lengths: list[int]) -> Tensor:
    """Linear attention of sequences of these lengths, end to end; the inputs have the layout X."""
    num_layout_dims = inputs.a_TN.dim() - 1
    shape = inputs.v_TNV.shape
    if not sum(lengths):
        return torch.zeros_like(inputs.v_TNV)
    if num_layout_dims > 1:
        inputs = inputs.map_tokens(lambda x: x.flatten(0, num_layout_dims - 1))
    sizes = (len(lengths), inputs.v_TNV.shape[1], inputs.q_TKD.shape[2], inputs.v_TNV.shape[2])
    state = torch.empty(sizes, dtype=torch.float32, device=inputs.v_TNV.device)
    return gated_delta_rule(inputs, state, _layout(lengths, state.device)).view(shape)


def _layout(lengths: list[int], device: torch.device) -> SequenceLayout:
    counts = torch.tensor([0, *lengths], dtype=torch.int32)
    lens = counts[1:].to(device)
    slots = torch.arange(len(lengths), dtype=torch.int32, device=device)
    starts = counts.cumsum(0, dtype=torch.int32).to(device)
    return SequenceLayout(starts, lens, slots, lens, max(lengths))
