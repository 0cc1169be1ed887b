# mypy: allow-untyped-defs, allow-incomplete-defs
"""x @ weight.T for a few rows of x, of one weight or of experts: the weight is read once.

    out[m, n] = gate((sum over k of x[row[m], k] * w[n, k] * w_scale) * factor[m] + bias[n])

In: x [M, K] in bfloat16 (float16 for integers in groups and for 8 bits), a weight [N, K], packed or dense, or a stack
of them for experts. Out: [M, N] (of experts: their rows), summed in float32 and rounded once.

A program takes a few rows of the weight and all of K (`few_step.py`). Its warps share K among them: each
has sums of its own, many loads are under way at once, and the sums meet once, at the end. Weights of 4
bits are decoded with about three instructions a number, loads and all: what an H200 has time for
while its memory brings the next one.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.kernels.common.triton_epilogue import apply_gate, apply_scales_and_bias
from fulgurite.kernels.common.triton_import import INTERPRETED, tl, triton
from fulgurite.kernels.common.triton_operands import DequantScheme, QuantizedOperand
from fulgurite.kernels.gemm.triton_small_m_mainloop import accumulate_k_any_scale
from fulgurite.kernels.tuning.config import LaunchConfig

NATIVE = not INTERPRETED
MAX_OFFSET = tl.constexpr(2**31 - 1)


@triton.jit
def find_expert(ends_ptr, experts, row, GROUPS: tl.constexpr):
    """The expert of a row, the first of its rows, and where they end.

    Rows of no expert come after the last, as one more group.
    """
    group = tl.arange(0, GROUPS)
    ends = tl.load(ends_ptr + group, group < experts, MAX_OFFSET)
    before = ends <= row
    expert = tl.sum(before.to(tl.int32), 0)
    return (
        expert,
        tl.max(tl.where(before, ends, 0), 0),
        tl.min(tl.where(before, MAX_OFFSET, ends), 0),
    )


@triton.jit(do_not_specialize=["M", "w_scale_k", "experts", "xs_step"])
def small_m_gemm_kernel(
    x_ptr, rows_ptr, factors_ptr, ends_ptr, w_ptr, s_ptr, z_ptr, bias_ptr, factor_ptr, out_ptr,
    M, N, K, experts, x_stride, w_expert, w_stride, s_expert, w_scale_n, w_scale_k, z_expert,
    bias_expert, out_stride, alpha, limit, xs_ptr, xs_row, xs_step,
    DEQUANT: tl.constexpr, SCALING: tl.constexpr, GROUP: tl.constexpr, W_ROWS: tl.constexpr,
    TENSOR_SCALE: tl.constexpr, ZERO: tl.constexpr, GATHER: tl.constexpr, FACTORS: tl.constexpr,
    FACTOR: tl.constexpr, BIAS: tl.constexpr, GATE: tl.constexpr, EVEN: tl.constexpr,
    GROUPS: tl.constexpr, PAIRS: tl.constexpr, R: tl.constexpr, T: tl.constexpr, BN: tl.constexpr,
    C: tl.constexpr, W: tl.constexpr, STAGES: tl.constexpr, NATIVE: tl.constexpr,
    X_CODES: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight, R rows of x. N columns of the result; with a gate half of the rows are
    of the gate, half of what it gates, which lies N rows below.

    `ends_ptr`: with GROUPS the ends of the experts' rows, with PAIRS each row's expert; a row of x
    is PAIRS rows then, and R is 1. P: groups of the weight beside each other (`few_step.py`).
    `z_ptr`: the tensor scale of NVFP4, or the zero points of asymmetric integers.
    """
    HALF: tl.constexpr = BN // 2 if GATE > 0 else BN
    j = tl.arange(0, BN)
    n = tl.program_id(0) * HALF + j % HALF
    row = (tl.where(n < N, n, 0) + (j // HALF) * N).to(tl.int64)
    start = tl.program_id(1) * R
    end = M
    live = True
    if GROUPS > 0 or PAIRS > 0:
        start = tl.program_id(1)
        if PAIRS > 0:
            expert = tl.load(ends_ptr + start)
            live = (expert >= 0) & (expert < experts)
        else:
            expert, first, end = find_expert(ends_ptr, experts, start, GROUPS)
            end = tl.minimum(end, M)
            if (start - first) % R != 0:
                return  # another program has this row
            live = expert < experts
        expert = tl.where(live, expert, 0).to(tl.int64)
        w_ptr += expert * w_expert
        s_ptr += expert * s_expert
        z_ptr += expert * z_expert
        bias_ptr += expert * bias_expert
        K = tl.where(live, K, 0)  # rows of no expert are zero
    r = start + tl.arange(0, R * P) % R
    x_in = r < end
    from_row = tl.where(x_in, r, 0)
    if GATHER:
        from_row = tl.load(rows_ptr + from_row)
    if PAIRS > 0:
        from_row = from_row // PAIRS
    z_row = z_ptr + row[None, :, None] * w_scale_n if ZERO else z_ptr
    sums = accumulate_k_any_scale(
        x_ptr + from_row.to(tl.int64)[None, :, None] * x_stride, x_in[None, :, None],
        w_ptr + row[None, :, None] * w_stride, s_ptr + (row // W_ROWS)[None, :, None] * w_scale_n,
        z_row, (tl.arange(0, W) * C)[:, None, None], K, w_scale_k,
        DEQUANT, SCALING, GROUP, ZERO, EVEN, T, C, W * C, STAGES, NATIVE,
        (xs_ptr + from_row.to(tl.int64) * xs_row)[None, :, None], xs_step, X_CODES, P,
    )  # fmt: skip
    out = tl.sum(sums, 0)
    if FACTOR:
        out *= tl.load(factor_ptr)
    m = start + tl.arange(0, out.shape[1])
    m_in = m < tl.minimum(end, start + R)
    factors = tl.load(factors_ptr + m, m_in, 0.0) if FACTORS else 1.0
    out = apply_scales_and_bias(
        out, s_ptr, z_ptr, bias_ptr, row, w_scale_n, factors, SCALING, TENSOR_SCALE, FACTORS, BIAS
    )
    if GATE > 0:
        left, right = tl.split(tl.permute(tl.reshape(out, [2, HALF, out.shape[1]]), (1, 2, 0)))
        out = apply_gate(left, right, alpha, limit, GATE)
    out = tl.where(live, out, 0.0)
    column = tl.program_id(0) * HALF + tl.arange(0, HALF)
    into = out_ptr + m.to(tl.int64)[None, :] * out_stride + column[:, None]
    keep = m_in[None, :] & (column < N)[:, None]
    tl.store(into, out.to(out_ptr.dtype.element_ty), keep)


def launch_small_m_gemm(
    x: Tensor,
    parts: QuantizedOperand,
    weight: DequantScheme,
    config: LaunchConfig,
    out: Tensor,
    *,
    tensor_scale: bool = False,
    rows: Tensor | None = None,
    factors: Tensor | None = None,
    ends: Tensor | None = None,
    chosen: Tensor | None = None,
    bias: Tensor | None = None,
    factor: Tensor | None = None,
    gate: tuple[int, float, float] = (0, 0.0, 0.0),
    x_scale: Tensor | None = None,
) -> None:
    """Fill `out` [M, N]; see the top of this file.

    rows, factors   which row of x each row of the result is of, and what it is multiplied by
    ends            the weight is a stack, and its e-th matrix is for the rows up to ends[e]
    chosen          [T, k]: the same for rows of x that go to k experts each, k rows of the result
    gate            its number, alpha and limit
    x_scale         x is in FP8, and these are its scales [rows, K / group]; one row of x a program
    """
    data, scale = parts.data, parts.scale
    count, columns = out.shape
    experts = 0 if ends is None and chosen is None else data.shape[0]
    halves = 2 if gate[0] else 1
    grid = (
        triton.cdiv(columns, config.block_n // halves),
        count if experts else triton.cdiv(count, config.block_m),
    )
    small_m_gemm_kernel[grid](
        x, _or_placeholder(rows, x), _or_placeholder(factors, x), _or_placeholder(ends, _or_placeholder(chosen, x)), data, scale, parts.extra_scale,
        _or_placeholder(bias, x), _or_placeholder(factor, x), out, count, columns, x.shape[1], experts, x.stride(0), data.stride(0),
        data.stride(-2), scale.stride(0) if scale.dim() else 0, *parts.strides,
        scale.stride(0) if parts.has_zero_points else 1, bias.stride(0) if bias is not None else 0,
        out.stride(0), *gate[1:], _or_placeholder(x_scale, x), *((0, 0) if x_scale is None else x_scale.stride()),
        DEQUANT=weight.dequant, SCALING=weight.small_m_scaling, GROUP=weight.group_size, W_ROWS=weight.scale_rows,
        TENSOR_SCALE=tensor_scale, ZERO=parts.has_zero_points, GATHER=rows is not None,
        FACTORS=factors is not None, FACTOR=factor is not None, BIAS=bias is not None,
        GATE=gate[0], EVEN=x.shape[1] % (config.block_k * config.num_warps) == 0,
        GROUPS=0 if ends is None else triton.next_power_of_2(experts),
        PAIRS=0 if chosen is None else chosen.shape[1], R=config.block_m,
        T=max(8, config.block_m * weight.groups_per_dot),
        BN=config.block_n, C=config.block_k, W=config.num_warps, STAGES=config.num_stages,
        NATIVE=NATIVE, X_CODES=x_scale is not None, P=weight.groups_per_dot, num_warps=config.num_warps,
    )  # fmt: skip


def _or_placeholder(tensor: Tensor | None, other: Tensor) -> Tensor:
    return other if tensor is None else tensor
