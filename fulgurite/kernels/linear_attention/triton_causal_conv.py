# mypy: allow-untyped-defs, allow-incomplete-defs
"""A causal convolution with state on GPUs: one program per sequence and block of channels.

    out[t, c] = activation(bias[c] + sum_w weight[w, c] x[t - W + 1 + w, c])

A program walks over the tokens of its sequence. Inputs before the first token of the call come from
the state, which the program replaces at its end. So no other program reads or writes that state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.determinism import is_deterministic
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.linear_attention.metadata import SequenceLayout
from fulgurite.kernels.tuning.heuristics import heuristics_for

SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def load_inputs(x_ptr, state_ptr, row, column, inside, first, x_stride, C, stored, W: tl.constexpr):
    """Inputs at rows of the sequence; the last `stored` rows before it are in the state."""
    from_state = (row < 0) & (row >= -stored)
    x = tl.load(
        x_ptr + (first + row).to(tl.int64)[:, None] * x_stride + column[None, :],
        (inside & (row >= 0))[:, None] & (column < C)[None, :], 0.0,
    )  # fmt: skip
    old = tl.load(
        state_ptr + (W - 1 + row)[:, None] * C + column[None, :],
        (inside & from_state)[:, None] & (column < C)[None, :], 0.0,
    )  # fmt: skip
    return tl.where((row >= 0)[:, None], x, old)


@cached_launch
def causal_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, state_ptr, out_ptr, query_start_loc_ptr, seq_lens_ptr, slots_ptr,
    C, x_stride,
    W: tl.constexpr, BW: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, BIAS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """BC channels of one sequence: outputs, then the new state of W - 1 rows."""
    sequence = tl.program_id(0)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    first = tl.load(query_start_loc_ptr + sequence)
    count = tl.load(query_start_loc_ptr + sequence + 1) - first
    if (slot >= 0) & (count > 0):
        stored = tl.where(tl.load(seq_lens_ptr + sequence) == count, 0, W - 1)
        state_ptr += slot * (W - 1) * C
        for start in range(0, count, BT):
            row = start + tl.arange(0, BT)
            inside = row < count
            acc = tl.zeros((BT, BC), dtype=tl.float32)
            if BIAS:
                bias = tl.load(bias_ptr + column, column < C, 0.0).to(tl.float32)
                acc += bias[None, :]
            for w in tl.static_range(W):
                weight = tl.load(weight_ptr + w * C + column, column < C, 0.0).to(tl.float32)
                x = load_inputs(
                    x_ptr, state_ptr, row - (W - 1) + w, column, inside, first, x_stride, C, stored,
                    W,
                )  # fmt: skip
                acc += weight[None, :] * x.to(tl.float32)
            if SILU:
                acc = acc * tl.sigmoid(acc)
            into = out_ptr + (first + row).to(tl.int64)[:, None] * C + column[None, :]
            keep = inside[:, None] & (column < C)[None, :]
            tl.store(into, acc.to(out_ptr.dtype.element_ty), keep)
        if W > 1:
            row = tl.arange(0, BW)
            is_row = row < W - 1
            last = load_inputs(
                x_ptr, state_ptr, count - (W - 1) + row, column, is_row, first, x_stride, C, stored,
                W,
            )  # fmt: skip
            tl.debug_barrier()  # all old rows are read before one is replaced
            into = state_ptr + row[:, None] * C + column[None, :]
            tl.store(into, last, is_row[:, None] & (column < C)[None, :])


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    layout: SequenceLayout,
    activation: str | None,
) -> Any:
    """`linear_attention.ops.causal_conv`."""
    parameters = [weight] if bias is None else [weight, bias]
    if x.dtype not in SUPPORTED_DTYPES or state.dtype != x.dtype or x.stride(-1) != 1:
        return NotImplemented
    if not all(p.is_contiguous() and p.dtype in SUPPORTED_DTYPES for p in (*parameters, state)):
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps, channels = weight.shape
    if not out.numel() or not len(layout.slots_S):
        return out
    config = heuristics_for(x.device).causal_conv
    block_t = config.block_m  # in deterministic mode one kernel takes one token and many
    if not is_deterministic():
        block_t = min(block_t, next_power_of_2(layout.max_query_len))
    causal_conv_kernel[(len(layout.slots_S), cdiv(channels, config.block_n))](
        x, weight, weight if bias is None else bias, state, out, *layout[:3], channels, x.stride(0),
        W=taps, BW=next_power_of_2(max(taps - 1, 1)),
        BT=block_t, BC=config.block_n,
        BIAS=bias is not None, SILU=activation == "silu", num_warps=config.num_warps,
    )  # fmt: skip
    return out
