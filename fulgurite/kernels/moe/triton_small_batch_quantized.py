# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts of a few tokens with packed weights: two kernels from routes to the sum.

    h[t, j] = gate(x[t] @ gate_up[e].T)                      e = chosen[t, j]
    out[t]  = residual[t] + sum over j of weights[t, j] * (h[t, j] @ down[e].T)

In: rows x [T, D], their routes, packed gate_up [E, 2I, D] and down [E, D, I]. Out: [T, D].

So few tokens hardly ever share an expert, so nothing is sorted: each pair of token and expert reads its
weights by itself (`few_rows.py`). In the second kernel an expert is a warp's, or a few warps': all of a
token's experts are read side by side, and their sums, weighed, meet at the end. Sums are in float32; h
is rounded once. Numbers of no expert add nothing. Rows that FP8 weights ask for in FP8 go there by a
kernel of their own before each matmul: in the loop over K that is four times the instructions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import E4M3_SCALE_UNBIAS
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_operands import (
    DequantScheme,
    QuantizedOperand,
    dequant_scheme,
    make_operand,
    supports_dtype,
)
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.elementwise.gated_activation import GATE_IDS
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.gemm.triton_small_m import NATIVE, launch_small_m_gemm
from fulgurite.kernels.gemm.triton_small_m_mainloop import accumulate_k_any_scale
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.quant import QuantTensor, resolve_format

MAX_WARPS = 16
ACTIVATION_FORMAT = "fp8_e4m3_1x128"  # what rows may be rounded to on their way in


@triton.jit(do_not_specialize=["experts", "w_scale_k", "hs_step"])
def down_kernel(
    h_ptr, chosen_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, residual_ptr, out_ptr,
    N, K, experts, w_expert, w_stride, s_expert, w_scale_n, w_scale_k, z_expert, residual_stride,
    hs_ptr, hs_row, hs_step,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, ZERO: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    PAIRS: tl.constexpr, BN: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SHARE: tl.constexpr,
    STAGES: tl.constexpr, NATIVE: tl.constexpr, H_CODES: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """BN numbers of one token; SHARE warps have an expert's K among them."""
    token = tl.program_id(1)
    warp = tl.arange(0, W)
    j = warp // SHARE
    expert = tl.load(chosen_ptr + token * PAIRS + j, j < PAIRS, -1)
    live = (expert >= 0) & (expert < experts)
    e = tl.where(live, expert, 0).to(tl.int64)
    pair = token * PAIRS + tl.where(live, j, 0)
    factor = tl.load(weights_ptr + pair, live, 0.0)
    if TENSOR_SCALE:
        factor *= tl.load(z_ptr + e * z_expert) * E4M3_SCALE_UNBIAS
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.where(n < N, n, 0).to(tl.int64)[None, :]
    at_scale = e[:, None] * s_expert + (row // W_ROWS) * w_scale_n
    z_row = (z_ptr + at_scale)[:, :, None] if ZERO else z_ptr
    h_row = tl.broadcast_to((h_ptr + pair.to(tl.int64) * K)[:, None, None], [W, P, 1])
    sums = accumulate_k_any_scale(
        h_row, live[:, None, None],
        (w_ptr + e[:, None] * w_expert + row * w_stride)[:, :, None], (s_ptr + at_scale)[:, :, None],
        z_row, (warp % SHARE * C)[:, None, None], K, w_scale_k,
        DEQUANT, SCALING, GROUP, ZERO, EVEN, 8, C, SHARE * C, STAGES, NATIVE,
        (hs_ptr + pair.to(tl.int64) * hs_row)[:, None, None], hs_step, H_CODES, P,
    )  # fmt: skip
    if SCALING == "epilogue":
        sums *= tl.load(s_ptr + at_scale).to(tl.float32)[:, :, None]
    sums = tl.where(live[:, None, None], sums * factor[:, None, None], 0.0)
    out = tl.sum(sums, 0)
    if RESIDUAL:
        from_row = residual_ptr + token.to(tl.int64) * residual_stride
        out += tl.load(from_row + tl.where(n < N, n, 0)).to(tl.float32)[:, None]
    column = tl.arange(0, out.shape[1])[None, :]  # they are all the same
    into = out_ptr + token.to(tl.int64) * N + n[:, None] + 0 * column
    tl.store(into, out.to(out_ptr.dtype.element_ty), (n < N)[:, None] & (column == 0))


def run_quantized_experts(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: QuantTensor,
    down: QuantTensor,
    gate: str,
    alpha: float,
    limit: float,
    norm: tuple[Tensor, float, float] | None,
    residual: Tensor | None,
    activations: tuple[str, str] = (UNQUANTIZED, UNQUANTIZED),
) -> Any:
    """[T, D]; NotImplemented where tokens share experts, and for what the kernels don't take."""
    first, second = dequant_scheme(gate_up.format), dequant_scheme(down.format)
    if (
        first is None
        or second is None
        or not supports_dtype(x, first)
        or not supports_dtype(x, second)
    ):
        return NotImplemented
    if not _supports_activations(activations[0], first) or not _supports_activations(
        activations[1], second
    ):
        return NotImplemented
    if weights.dtype != torch.float32 or (residual is not None and residual.stride(1) != 1):
        return NotImplemented
    if chosen.shape[1] > MAX_WARPS or 0 in (chosen.numel(), down.numel()):
        return NotImplemented
    heuristics = heuristics_for(x.device)
    if x.shape[0] > 1 and chosen.numel() * heuristics.small_m_rare_sharing > down.shape[0]:
        return NotImplemented
    x = x if norm is None else ops.rms_norm(x, *norm)
    chosen, weights = chosen.contiguous(), weights.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    pairs, inner = chosen.numel(), down.shape[2]
    h = x.new_empty(pairs, inner)
    config = heuristics.pair_config(pairs, 2 * inner, x.shape[1], first)
    x, x_scale = _quantize_activations(x, activations[0])
    launch_small_m_gemm(
        x, _operand(gate_up, first), first, config, h, chosen=chosen,
        tensor_scale=gate_up.format.family == "nvfp4", gate=(GATE_IDS[gate], alpha, limit),
        x_scale=x_scale,
    )  # fmt: skip
    out = h.new_empty(x.shape[0], down.shape[1])
    h, h_scale = _quantize_activations(h, activations[1])
    parts, share = _operand(down, second), _warps_per_expert(chosen.shape[1])
    config = heuristics.expert_down_config(share, inner, second)
    scale = parts.scale
    warps = share * triton.next_power_of_2(chosen.shape[1])
    down_kernel[(triton.cdiv(down.shape[1], config.block_n), x.shape[0])](
        h, chosen, weights, parts.data, scale, parts.extra_scale, out if residual is None else residual, out,
        down.shape[1], inner, down.shape[0], parts.data.stride(0), parts.data.stride(1),
        scale.stride(0), *parts.strides, scale.stride(0) if parts.has_zero_points else 1,
        0 if residual is None else residual.stride(0),
        h if h_scale is None else h_scale, *((0, 0) if h_scale is None else h_scale.stride()),
        DEQUANT=second.dequant, SCALING=second.small_m_scaling, GROUP=second.group_size, W_ROWS=second.scale_rows,
        TENSOR_SCALE=down.format.family == "nvfp4", ZERO=parts.has_zero_points,
        RESIDUAL=residual is not None, EVEN=inner % (share * config.block_k) == 0,
        PAIRS=chosen.shape[1], BN=config.block_n, C=config.block_k, W=warps, SHARE=share,
        STAGES=config.num_stages, NATIVE=NATIVE, H_CODES=h_scale is not None, P=second.groups_per_dot,
        num_warps=warps,
    )  # fmt: skip
    return out


def _operand(weight: QuantTensor, kind: DequantScheme) -> QuantizedOperand:
    return make_operand(weight.packed, list(weight.scales.values()), weight.format, kind)


def _quantize_activations(x: Tensor, format: str) -> tuple[Tensor, Tensor | None]:
    """The rows as they are, or as codes and their scales."""
    if format == UNQUANTIZED:
        return x, None
    codes, scale = quantize(x, format)
    return codes, scale


def _supports_activations(activations: str, kind: DequantScheme) -> bool:
    """Whether rows stay as they are, or go to FP8 in blocks as long as those of FP8 weights."""
    blocks = (kind.dequant, kind.scaling, kind.group_size) == ("cast", "mainloop", 128)
    return activations == UNQUANTIZED or (
        blocks and resolve_format(activations).name == ACTIVATION_FORMAT
    )


def _warps_per_expert(per_token: int) -> int:
    """Warps of an expert: eight in all, or as many as there are experts."""
    return max(1, 8 // triton.next_power_of_2(per_token))
