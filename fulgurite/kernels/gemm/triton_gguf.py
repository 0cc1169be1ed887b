# mypy: allow-untyped-defs, allow-incomplete-defs
"""GEMM with weights in GGUF blocks, and with 4-bit integers in groups, for any 16- or 32-bit x.

    out[m, n] = sum over blocks b of  scale[n, b] * (x[m, b] . codes[n, b]) + low[n, b] * sum(x[m, b])

In: x [M, K] and a weight [N, K] in the layout of the file. Out: [M, N] in x's dtype, summed in
float32 and rounded once. Codes have at most 8 bits, so tensor cores multiply them exactly. The
scale of a block is applied to its sum. A step is one block of scales: 32 columns, or 16 of q6_k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import NATIVE
from fulgurite.kernels.common.triton_pdl import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import Format

# format -> columns of a step, columns of a block, bytes of a block
BLOCK_LAYOUTS = {
    "q4_0": (32, 32, 18),
    "q4_1": (32, 32, 20),
    "q8_0": (32, 32, 34),
    "q4_k": (32, 256, 144),
    "q6_k": (16, 256, 210),
    "int4": (32, 32, 16),
}


@triton.jit
def load_unaligned_float16(data_ptr, inside):
    """A float16 that may be at an odd address, as float32."""
    low = tl.load(data_ptr, inside, 0).to(tl.int32)
    high = tl.load(data_ptr + 1, inside, 0).to(tl.int32)
    return (low | (high << 8)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def load_byte(row_ptr, index, inside):
    """Byte `index` of each row's block, or one byte a column, as int32."""
    return tl.load(row_ptr + index, inside, 0).to(tl.int32)


@triton.jit
def load_q4_k_scales(block_ptr, j, inside):
    """The 6-bit scale and minimum of sub-block j; the last four store two bits with the first
    four."""
    first = load_byte(block_ptr, 4 + j % 4, inside)
    second = load_byte(block_ptr, 8 + j % 4, inside)
    third = load_byte(block_ptr, 12 + j % 4, inside)
    is_first_half = j < 4
    scale = tl.where(is_first_half, first & 63, (third & 15) | ((first >> 6) << 4))
    low = tl.where(is_first_half, second & 63, (third >> 4) | ((second >> 6) << 4))
    d = load_unaligned_float16(block_ptr, inside)
    dmin = load_unaligned_float16(block_ptr + 2, inside)
    return d * scale.to(tl.float32), -dmin * low.to(tl.float32)


@cached_launch
def gguf_gemm_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, m, n, k, x_step, row_bytes, groups,
    FORMAT: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, BYTES: tl.constexpr,
    GROUP_SIZE: tl.constexpr, ZERO_POINTS: tl.constexpr, BIAS: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of the output. Every format reads codes its own way; the MMA is the same for all."""
    if PDL:
        wait_for_dependencies()
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = columns < n
    at = tl.arange(0, STEP)
    row_ptr = data_ptr + columns.to(tl.int64) * row_bytes
    x_row = x_ptr + rows.to(tl.int64)[:, None] * x_step
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    tall = known[:, None]
    for start in range(0, k, STEP):
        block_ptr = row_ptr + (start // WIDTH) * BYTES
        wide_ptr = block_ptr[:, None]
        low = tl.zeros([BLOCK_N], tl.float32)
        if FORMAT == "q4_0" or FORMAT == "q4_1":
            head: tl.constexpr = 2 if FORMAT == "q4_0" else 4
            pair = load_byte(wide_ptr, head + at[None, :] % 16, tall)
            codes = (pair >> (at[None, :] // 16 * 4)) & 15
            scale = load_unaligned_float16(block_ptr, known)
            low = -8.0 * scale if FORMAT == "q4_0" else load_unaligned_float16(block_ptr + 2, known)
        elif FORMAT == "q8_0":
            codes = load_byte(wide_ptr, 2 + at[None, :], tall)
            codes = (codes << 24) >> 24
            scale = load_unaligned_float16(block_ptr, known)
        elif FORMAT == "q4_k":
            j = start % WIDTH // STEP
            codes = (load_byte(wide_ptr, 16 + j // 2 * 32 + at[None, :], tall) >> (j % 2 * 4)) & 15
            scale, low = load_q4_k_scales(block_ptr, j, known)
        elif FORMAT == "q6_k":
            half, inner = start % WIDTH // 128, start % 128
            pair = load_byte(wide_ptr, half * 64 + inner % 64 + at[None, :], tall)
            upper = load_byte(wide_ptr, 128 + half * 32 + inner % 32 + at[None, :], tall)
            codes = ((pair >> (inner // 64 * 4)) & 15) | (((upper >> (inner // 32 * 2)) & 3) << 4)
            codes -= 32
            signed = (load_byte(block_ptr, 192 + start % WIDTH // 16, known) << 24) >> 24
            scale = load_unaligned_float16(block_ptr + 208, known) * signed.to(tl.float32)
        else:
            codes = (load_byte(wide_ptr, at[None, :] // 2, tall) >> (at[None, :] % 2 * 4)) & 15
            group = columns.to(tl.int64) * groups + start // GROUP_SIZE
            scale = tl.load(scale_ptr + group, known, 0.0)
            zero = tl.load(zero_ptr + group, known, 0).to(tl.float32) if ZERO_POINTS else 8.0
            low = -zero * scale
        x = tl.load(x_row + start + at[None, :], (rows < m)[:, None], 0.0)
        if NATIVE:
            product = tl.dot(x, tl.trans(codes.to(x.dtype)), input_precision="ieee")
        else:
            product = tl.dot(
                x.to(tl.float32), tl.trans(codes.to(tl.float32)), input_precision="ieee"
            )
        total += product * scale[None, :]
        total += tl.sum(x.to(tl.float32), 1)[:, None] * low[None, :]
    if PDL:  # only now: programs that wait would take the place of those that multiply
        launch_dependents()
    if BIAS:
        total += tl.load(bias_ptr + columns, known, 0.0).to(tl.float32)[None, :]
    into = out_ptr + rows.to(tl.int64)[:, None] * n + columns[None, :]
    tl.store(into, total.to(out_ptr.dtype.element_ty), (rows < m)[:, None] & tall.trans())


def gguf_linear(
    rows: Tensor, data: Tensor, scales: list[Tensor], format: Format, bias: Tensor | None
) -> Any:
    """x @ weight.T + bias, or NotImplemented for other formats."""
    has_minima = any(scale.name == "minimum" for scale in format.separate_scales)
    is_int4 = format.family == "int" and format.element.bits == 4 and not has_minima
    kind = "int4" if is_int4 else format.name
    is_supported = rows.dtype in (torch.float32, torch.bfloat16, torch.float16)
    if kind not in BLOCK_LAYOUTS or not is_supported or data.dim() != 2:
        return NotImplemented
    if 0 in (rows.numel(), data.numel()):
        return NotImplemented
    step, width, block_bytes = BLOCK_LAYOUTS[kind]
    (m, k), n = rows.shape, data.shape[0]
    data, group_size = data.contiguous(), format.block[1]
    scale = scales[0].contiguous() if scales else data
    zero_points = scales[1].contiguous() if len(scales) > 1 else data
    out = rows.new_empty((m, n))
    config = heuristics_for(rows.device).gguf_gemm(m)
    gguf_gemm_kernel[(cdiv(m, config.block_m), cdiv(n, config.block_n))](
        rows, data, scale, zero_points, out if bias is None else bias, out, m, n, k, rows.stride(0),
        data.shape[1], k // group_size,
        FORMAT=kind, STEP=step, WIDTH=width, BYTES=block_bytes, GROUP_SIZE=group_size,
        ZERO_POINTS=len(scales) > 1, BIAS=bias is not None, NATIVE=NATIVE,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, num_warps=config.num_warps,
        **pdl_options(rows.device),
    )  # fmt: skip
    return out
