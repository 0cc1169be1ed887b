# mypy: allow-untyped-defs, allow-incomplete-defs
"""The experts of a small batch with quantized weights: two kernels from routes to the sum.

    h[t, j] = gate(x[t] @ gate_up[e].T)                      e = experts[t, j]
    out[t]  = residual[t] + sum over j of weights[t, j] * (h[t, j] @ down[e].T)

In: `SmallBatchArgs` with quantized gate_up [E, 2I, D] and down [E, D, I]. Out: [T, D].

So few tokens hardly ever share an expert, so nothing is sorted: each pair of token and expert reads
its weights by itself (`gemm/triton_small_m.py`). In the second kernel each expert has one warp or a
few: all experts of a token are read side by side, and their weighted sums are added at the end.
Sums are in float32; h is rounded once. Indices that are no experts add nothing.

FP8 weights may ask for FP8 rows. A kernel of its own quantizes them before each GEMM: in the loop
over K that would be four times the instructions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_dequantize import E4M3_SCALE_UNBIAS
from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.common.triton_operands import (
    DequantScheme,
    QuantizedOperand,
    dequant_scheme,
    make_operand,
    supports_dtype,
)
from fulgurite.kernels.elementwise.ops import rms_norm
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.kernels.gemm.triton_small_m import SmallMInputs, launch_small_m_gemm
from fulgurite.kernels.gemm.triton_small_m_mainloop import accumulate_k_any_scale
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.moe.small_batch import SmallBatchArgs
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import QuantTensor, resolve_format

ACTIVATION_FORMAT = "fp8_e4m3_1x128"  # that rows may be quantized to


@cached_launch(do_not_specialize=["experts", "w_scale_k", "hs_step"])
def down_kernel(
    h_ptr, experts_ptr, weights_ptr, w_ptr, s_ptr, z_ptr, residual_ptr, out_ptr,
    N, K, experts, w_expert, w_stride, s_expert, w_scale_n, w_scale_k, z_expert, residual_stride,
    hs_ptr, hs_row, hs_step,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, TENSOR_SCALE: tl.constexpr, ZERO_POINTS: tl.constexpr,
    RESIDUAL: tl.constexpr, EVEN_K: tl.constexpr, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr, WARPS_PER_EXPERT: tl.constexpr,
    NUM_STAGES: tl.constexpr, NATIVE: tl.constexpr, H_IS_FP8: tl.constexpr,
    GROUPS_PER_MMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_N columns of one token; WARPS_PER_EXPERT warps share the K of an expert."""
    token = tl.program_id(1)
    warp = tl.arange(0, NUM_WARPS)
    j = warp // WARPS_PER_EXPERT
    expert = tl.load(experts_ptr + token * TOP_K + j, j < TOP_K, -1)
    live = (expert >= 0) & (expert < experts)
    e = tl.where(live, expert, 0).to(tl.int64)
    pair = token * TOP_K + tl.where(live, j, 0)
    factor = tl.load(weights_ptr + pair, live, 0.0)
    if TENSOR_SCALE:
        factor *= tl.load(z_ptr + e * z_expert) * E4M3_SCALE_UNBIAS
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.where(n < N, n, 0).to(tl.int64)[None, :]
    at_scale = e[:, None] * s_expert + (row // SCALE_ROWS) * w_scale_n
    z_row = (z_ptr + at_scale)[:, :, None] if ZERO_POINTS else z_ptr
    h_row = (h_ptr + pair.to(tl.int64) * K)[:, None, None]
    h_row = tl.broadcast_to(h_row, [NUM_WARPS, GROUPS_PER_MMA, 1])
    sums = accumulate_k_any_scale(
        h_row, live[:, None, None],
        (w_ptr + e[:, None] * w_expert + row * w_stride)[:, :, None], (s_ptr + at_scale)[:, :, None],
        z_row, (warp % WARPS_PER_EXPERT * BLOCK_K)[:, None, None], K, w_scale_k,
        DEQUANT, SCALING, GROUP_SIZE, ZERO_POINTS, EVEN_K, 8, BLOCK_K, WARPS_PER_EXPERT * BLOCK_K,
        NUM_STAGES, NATIVE,
        (hs_ptr + pair.to(tl.int64) * hs_row)[:, None, None], hs_step, H_IS_FP8, GROUPS_PER_MMA,
    )  # fmt: skip
    if SCALING == "epilogue":
        sums *= tl.load(s_ptr + at_scale).to(tl.float32)[:, :, None]
    sums = tl.where(live[:, None, None], sums * factor[:, None, None], 0.0)
    out = tl.sum(sums, 0)
    if RESIDUAL:
        from_row = residual_ptr + token.to(tl.int64) * residual_stride
        out += tl.load(from_row + tl.where(n < N, n, 0)).to(tl.float32)[:, None]
    column = tl.arange(0, out.shape[1])[None, :]  # all columns are equal
    into = out_ptr + token.to(tl.int64) * N + n[:, None] + 0 * column
    tl.store(into, out.to(out_ptr.dtype.element_ty), (n < N)[:, None] & (column == 0))


def run_quantized_experts(args: SmallBatchArgs) -> Any:
    """[T, D]; NotImplemented if tokens may share experts, and for what the kernels don't take."""
    gate_up, down, residual = args.gate_up, args.down, args.residual_TD
    assert isinstance(gate_up, QuantTensor) and isinstance(down, QuantTensor), "dense weights"
    up_scheme, down_scheme = dequant_scheme(gate_up.format), dequant_scheme(down.format)
    if up_scheme is None or down_scheme is None or not _supports(args, up_scheme, down_scheme):
        return NotImplemented
    x = args.x_TD if args.norm is None else rms_norm(args.x_TD, *args.norm)
    weights, selected = (tensor.contiguous() for tensor in args.routes)
    x = x if x.stride(1) == 1 else x.contiguous()
    pairs, top_k, intermediate = selected.numel(), selected.shape[1], down.shape[2]
    heuristics = heuristics_for(x.device)
    h = x.new_empty(pairs, intermediate)
    config = heuristics.small_m_pairs(pairs, 2 * intermediate, x.shape[1], up_scheme)
    x, x_scale = _quantize_activations(x, args.activations[0])
    inputs = SmallMInputs(
        x, _operand(gate_up, up_scheme), up_scheme, h, topk_experts=selected, gate=args.gate,
        x_scale=x_scale,
    )  # fmt: skip
    launch_small_m_gemm(inputs, config)
    out = h.new_empty(x.shape[0], down.shape[1])
    h, h_scale = _quantize_activations(h, args.activations[1])
    weight, warps_per_expert = _operand(down, down_scheme), heuristics.warps_per_expert(top_k)
    config = heuristics.small_m_down(warps_per_expert, intermediate, down_scheme)
    num_warps = warps_per_expert * next_power_of_2(top_k)
    w_expert, s_expert, z_expert = weight.expert_strides
    down_kernel[(cdiv(down.shape[1], config.block_n), x.shape[0])](
        h, selected, weights, weight.data, weight.scale, weight.aux,
        out if residual is None else residual, out, down.shape[1], intermediate, down.shape[0],
        w_expert, weight.data.stride(1), s_expert, *weight.scale_strides, z_expert,
        0 if residual is None else residual.stride(0),
        h if h_scale is None else h_scale, *((0, 0) if h_scale is None else h_scale.stride()),
        DEQUANT=down_scheme.dequant, SCALING=down_scheme.small_m_scaling,
        GROUP_SIZE=down_scheme.group_size, SCALE_ROWS=down_scheme.scale_rows,
        TENSOR_SCALE=weight.has_tensor_scale, ZERO_POINTS=weight.has_zero_points,
        RESIDUAL=residual is not None,
        EVEN_K=intermediate % (warps_per_expert * config.block_k) == 0, TOP_K=top_k,
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, NUM_WARPS=num_warps,
        WARPS_PER_EXPERT=warps_per_expert, NUM_STAGES=config.num_stages, NATIVE=NATIVE,
        H_IS_FP8=h_scale is not None, GROUPS_PER_MMA=down_scheme.groups_per_mma,
        num_warps=num_warps,
    )  # fmt: skip
    return out


def _supports(args: SmallBatchArgs, up_scheme: DequantScheme, down_scheme: DequantScheme) -> bool:
    x, selected, residual = args.x_TD, args.routes.experts_Tk, args.residual_TD
    heuristics, experts = heuristics_for(x.device), args.down.shape[0]
    if not supports_dtype(x, up_scheme) or not supports_dtype(x, down_scheme):
        return False
    schemes = (up_scheme, down_scheme)
    if not all(map(_supports_activations, args.activations, schemes)):
        return False
    if args.routes.weights_Tk.dtype != torch.float32:
        return False
    if residual is not None and residual.stride(1) != 1:
        return False
    if selected.shape[1] > heuristics.max_experts_per_token:
        return False
    if 0 in (selected.numel(), args.down.numel()):
        return False
    return x.shape[0] == 1 or selected.numel() * heuristics.min_experts_per_row <= experts


def _operand(weight: QuantTensor, scheme: DequantScheme) -> QuantizedOperand:
    return make_operand(weight.packed, list(weight.scales.values()), weight.format, scheme)


def _quantize_activations(x: Tensor, format: str) -> tuple[Tensor, Tensor | None]:
    """The rows as they are, or as codes and their scales."""
    if format == UNQUANTIZED:
        return x, None
    codes, scale = quantize(x, format)
    return codes, scale


def _supports_activations(activations: str, scheme: DequantScheme) -> bool:
    """Whether rows stay as they are, or are quantized to FP8 in blocks as wide as those of the
    weight."""
    is_blockwise = (scheme.dequant, scheme.scaling, scheme.group_size) == ("cast", "mainloop", 128)
    if activations == UNQUANTIZED:
        return True
    return is_blockwise and resolve_format(activations).name == ACTIVATION_FORMAT
