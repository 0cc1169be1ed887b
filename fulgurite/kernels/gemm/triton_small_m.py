# mypy: allow-untyped-defs, allow-incomplete-defs
"""Small-M GEMM: x @ weight.T for a few rows of x, of one weight or of experts. The weight is read
once.

    out[m, n] = gate((sum over k of x[row[m], k] * w[n, k] * w_scale) * row_weight[m] + bias[n])
    out[m, n] = out[m, n] + residual[m, n]

In: x [M, K] in bfloat16 (float16 for integers in groups and for 8 bits); a weight [N, K], quantized
or dense, or a stack of them for experts. Out: [M, N], summed in float32 and rounded once, and once
more after a residual is added, as by an addition of its own.

A program takes a few rows of the weight and all of K (`triton_small_m_mainloop.py`). Its warps
share K: each warp has an accumulator of its own, many loads are in flight, and the accumulators are
added once, at the end. Weights of 4 bits are dequantized with about three instructions a value,
loads included. An H200 has time for that while its memory delivers the next value.

With PDL the next kernel may start only after the main loop: its programs would wait on some
multiprocessors and leave this kernel's programs unevenly distributed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate, apply_scales_and_bias
from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.gemm.triton_small_m_mainloop import accumulate_k_any_scale
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning import LaunchConfig

MAX_OFFSET = tl.constexpr(2**31 - 1)


@triton.jit
def find_expert(offsets_ptr, experts, row, EXPERTS_POW2: tl.constexpr):
    """The expert of a row, the first of its rows, and their end.

    Rows without an expert come last, as one more group.
    """
    group = tl.arange(0, EXPERTS_POW2)
    ends = tl.load(offsets_ptr + group, group < experts, MAX_OFFSET)
    is_before = ends <= row
    expert = tl.sum(is_before.to(tl.int32), 0)
    begin = tl.max(tl.where(is_before, ends, 0), 0)
    return expert, begin, tl.min(tl.where(is_before, MAX_OFFSET, ends), 0)


@cached_launch(do_not_specialize=["M", "w_scale_k", "experts", "xs_step"])
def small_m_gemm_kernel(
    x_ptr, row_indices_ptr, row_weights_ptr, offsets_ptr, w_ptr, s_ptr, z_ptr, bias_ptr,
    x_factor_ptr, residual_ptr, out_ptr,
    M, N, K, experts, x_stride, w_expert, w_stride, s_expert, w_scale_n, w_scale_k, z_expert,
    bias_expert, residual_stride, out_stride, alpha, limit, xs_ptr, xs_row, xs_step,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP_SIZE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, TENSOR_SCALE: tl.constexpr, ZERO_POINTS: tl.constexpr,
    GATHER: tl.constexpr, ROW_WEIGHTS: tl.constexpr, X_FACTOR: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, GATE: tl.constexpr, EVEN_K: tl.constexpr, EXPERTS_POW2: tl.constexpr,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, MMA_COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, NUM_WARPS: tl.constexpr, NUM_STAGES: tl.constexpr, NATIVE: tl.constexpr,
    X_IS_FP8: tl.constexpr, GROUPS_PER_MMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of the weight, BLOCK_M rows of x. N columns of the output.

    With a gate, half of the rows are of the gate, and half of up, which is N rows below.

    offsets_ptr     EXPERTS_POW2 > 0: the ends of the experts' rows; TOP_K > 0: the expert of each row
    TOP_K           rows of the output that each row of x has; BLOCK_M is 1 then
    z_ptr           the tensor scale of NVFP4, or zero points or minima of integers
    GROUPS_PER_MMA  groups of the weight in one MMA (`triton_small_m_mainloop.py`)
    """
    if PDL:
        wait_for_dependencies()
    HALF: tl.constexpr = BLOCK_N // 2 if GATE > 0 else BLOCK_N
    j = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * HALF + j % HALF
    row = (tl.where(n < N, n, 0) + (j // HALF) * N).to(tl.int64)
    start = tl.program_id(1) * BLOCK_M
    end = M
    live = True
    if EXPERTS_POW2 > 0 or TOP_K > 0:
        start = tl.program_id(1)
        if TOP_K > 0:
            expert = tl.load(offsets_ptr + start)
            live = (expert >= 0) & (expert < experts)
        else:
            expert, first, end = find_expert(offsets_ptr, experts, start, EXPERTS_POW2)
            end = tl.minimum(end, M)
            if (start - first) % BLOCK_M != 0:
                return  # another program has this row
            live = expert < experts
        expert = tl.where(live, expert, 0).to(tl.int64)
        w_ptr += expert * w_expert
        s_ptr += expert * s_expert
        z_ptr += expert * z_expert
        bias_ptr += expert * bias_expert
        K = tl.where(live, K, 0)  # rows without an expert are zero
    r = start + tl.arange(0, BLOCK_M * GROUPS_PER_MMA) % BLOCK_M
    x_in = r < end
    from_row = tl.where(x_in, r, 0)
    if GATHER:
        from_row = tl.load(row_indices_ptr + from_row)
    if TOP_K > 0:
        from_row = from_row // TOP_K
    z_row = z_ptr + row[None, :, None] * w_scale_n if ZERO_POINTS else z_ptr
    sums = accumulate_k_any_scale(
        x_ptr + from_row.to(tl.int64)[None, :, None] * x_stride, x_in[None, :, None],
        w_ptr + row[None, :, None] * w_stride,
        s_ptr + (row // SCALE_ROWS)[None, :, None] * w_scale_n,
        z_row, (tl.arange(0, NUM_WARPS) * BLOCK_K)[:, None, None], K, w_scale_k,
        DEQUANT, SCALING, GROUP_SIZE, ZERO_POINTS, EVEN_K, MMA_COLUMNS, BLOCK_K,
        NUM_WARPS * BLOCK_K, NUM_STAGES, NATIVE,
        (xs_ptr + from_row.to(tl.int64) * xs_row)[None, :, None], xs_step, X_IS_FP8, GROUPS_PER_MMA,
    )  # fmt: skip
    if PDL:
        launch_dependents()
    out = tl.sum(sums, 0)
    if X_FACTOR:
        out *= tl.load(x_factor_ptr)
    m = start + tl.arange(0, out.shape[1])
    m_in = m < tl.minimum(end, start + BLOCK_M)
    row_weights = tl.load(row_weights_ptr + m, m_in, 0.0) if ROW_WEIGHTS else 1.0
    out = apply_scales_and_bias(
        out, s_ptr, z_ptr, bias_ptr, row, w_scale_n, row_weights, SCALING, TENSOR_SCALE,
        ROW_WEIGHTS, BIAS,
    )  # fmt: skip
    if GATE > 0:
        gate, up = tl.split(tl.permute(tl.reshape(out, [2, HALF, out.shape[1]]), (1, 2, 0)))
        out = apply_gate(gate, up, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    column = tl.program_id(0) * HALF + tl.arange(0, HALF)
    into = out_ptr + m.to(tl.int64)[None, :] * out_stride + column[:, None]
    keep = m_in[None, :] & (column < N)[:, None]
    out = out.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        from_residual = residual_ptr + m.to(tl.int64)[None, :] * residual_stride + column[:, None]
        residual = tl.load(from_residual, keep, 0.0).to(tl.float32)
        out = (residual + out.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(into, out, keep)


@dataclass(frozen=True)
class SmallMInputs:
    """out[m] = gate((x[row_indices[m]] @ weight.T) * row_weights[m] + bias); `out` is filled in.

    row_indices     the row of x of each row of the output
    row_weights     what each row of the output is multiplied by
    expert_offsets  the weight is a stack, and its e-th matrix is for the rows up to expert_offsets[e]
    topk_experts    [T, k]: each row of x goes to k experts and has k rows of the output
    x_factor        one number that the output is multiplied by
    residual        [M, N], added to the rounded output
    x_scale         x is in FP8 with these scales [rows, K / group]; one row of x a program
    """

    x: Tensor
    weight: QuantizedOperand
    scheme: DequantScheme
    out: Tensor
    row_indices: Tensor | None = None
    row_weights: Tensor | None = None
    expert_offsets: Tensor | None = None
    topk_experts: Tensor | None = None
    bias: Tensor | None = None
    x_factor: Tensor | None = None
    residual: Tensor | None = None
    gate: GatedActivation = UNGATED
    x_scale: Tensor | None = None


def launch_small_m_gemm(inputs: SmallMInputs, config: LaunchConfig) -> None:
    """Fill `inputs.out` [M, N]."""
    x, weight, scheme, out = inputs.x, inputs.weight, inputs.scheme, inputs.out
    offsets, topk, bias, gate, residual = (
        inputs.expert_offsets, inputs.topk_experts, inputs.bias, inputs.gate, inputs.residual
    )  # fmt: skip
    rows, columns = out.shape
    experts = 0 if offsets is None and topk is None else weight.data.shape[0]
    w_expert, s_expert, z_expert = weight.expert_strides
    grid = (
        cdiv(columns, config.block_n // gate.num_inputs),
        rows if experts else cdiv(rows, config.block_m),
    )
    small_m_gemm_kernel[grid](
        x, _or_placeholder(inputs.row_indices, x), _or_placeholder(inputs.row_weights, x),
        _or_placeholder(offsets, _or_placeholder(topk, x)), weight.data, weight.scale, weight.aux,
        _or_placeholder(bias, x), _or_placeholder(inputs.x_factor, x), _or_placeholder(residual, x),
        out, rows, columns, x.shape[1], experts, x.stride(0), w_expert, weight.data.stride(-2),
        s_expert, *weight.scale_strides, z_expert, bias.stride(0) if bias is not None else 0,
        residual.stride(0) if residual is not None else 0, out.stride(0), gate.alpha, gate.limit,
        _or_placeholder(inputs.x_scale, x),
        *((0, 0) if inputs.x_scale is None else inputs.x_scale.stride()),
        DEQUANT=scheme.dequant, SCALING=scheme.small_m_scaling, GROUP_SIZE=scheme.group_size,
        SCALE_ROWS=scheme.scale_rows, TENSOR_SCALE=weight.has_tensor_scale,
        ZERO_POINTS=weight.has_zero_points, GATHER=inputs.row_indices is not None,
        ROW_WEIGHTS=inputs.row_weights is not None, X_FACTOR=inputs.x_factor is not None,
        BIAS=bias is not None, RESIDUAL=residual is not None, GATE=gate.kernel_id,
        EVEN_K=x.shape[1] % (config.block_k * config.num_warps) == 0,
        EXPERTS_POW2=0 if offsets is None else next_power_of_2(experts),
        TOP_K=0 if topk is None else topk.shape[1], BLOCK_M=config.block_m,
        MMA_COLUMNS=max(8, config.block_m * scheme.groups_per_mma),
        BLOCK_N=config.block_n, BLOCK_K=config.block_k, NUM_WARPS=config.num_warps,
        NUM_STAGES=config.num_stages, NATIVE=NATIVE, X_IS_FP8=inputs.x_scale is not None,
        GROUPS_PER_MMA=scheme.groups_per_mma, num_warps=config.num_warps, **pdl_options(x.device),
    )  # fmt: skip


def _or_placeholder(tensor: Tensor | None, placeholder: Tensor) -> Tensor:
    """Any tensor for one that the kernel won't read."""
    return placeholder if tensor is None else tensor
