# mypy: allow-untyped-defs, allow-incomplete-defs
"""`quantize` on a GPU: float tensors to packed data and scales, in one read where the format allows
it.

    scale = amax(block) / QMAX;   code = round(x / scale)

In: a float tensor (K last) and a format of `FORMATS`. Out: packed data and scales, equal to
`fulgurite.quant.quantize` bit for bit.

    row, 1xB, 128x128     one kernel: the block stays in registers between its amax and its codes
    tensor, nvfp4         two kernels: the amax of everything comes first, by integer atomics, whose
                          result does not depend on their order

    R  rows    K  columns    B  columns of a block    E  matrices of a stack
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl
from fulgurite.kernels.common.triton_launch import cached_launch
from fulgurite.kernels.common.triton_numerics import (
    NATIVE,
    compute_scale,
    finite_amax,
    magnitude_bits,
    quantize_8bit,
    to_float8,
)
from fulgurite.kernels.integer_math import cdiv
from fulgurite.kernels.quantize import triton_bf16x2, triton_transpose
from fulgurite.kernels.quantize.scale_layout import empty_scale
from fulgurite.kernels.quantize.triton_4bit import quantize_4bit
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import Format, resolve_format
from fulgurite.quant.format import WHOLE_DIM
from fulgurite.quant.shapes import check_shape, data_shape

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ---- kernels -------------------------------------------------------------------------------------


@cached_launch
def quantize_rows_kernel(
    x_ptr, data_ptr, scale_ptr, rows, columns, stride,
    QMAX: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WHOLE_ROW: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """scale_R = amax_K |x_RK| / QMAX;  code_RK = round(x_RK / scale_R).

    WHOLE_ROW: a row fits in a block. Longer rows are read twice.
    """
    type: tl.constexpr = data_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = row[:, None] < rows
    column = tl.arange(0, BLOCK_N)
    start = x_ptr + row[:, None] * stride
    if not WHOLE_ROW:
        bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for first in range(0, columns, BLOCK_N):
            mask = row_mask & (first + column < columns)[None, :]
            x = tl.load(start + first + column[None, :], mask, 0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(x, type == tl.int8))
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    else:
        mask = row_mask & (column < columns)[None, :]
        x = tl.load(start + column[None, :], mask, 0.0).to(tl.float32)
        amax = finite_amax(x, 1, type == tl.int8, NATIVE)
    scale = compute_scale(amax, QMAX)
    tl.store(scale_ptr + row, scale, row < rows)
    scale = scale[:, None]
    inverse = tl.div_rn(1.0, scale)
    out = data_ptr + row[:, None] * columns
    if not WHOLE_ROW:
        for first in range(0, columns, BLOCK_N):
            mask = row_mask & (first + column < columns)[None, :]
            x = tl.load(start + first + column[None, :], mask, 0.0).to(tl.float32)
            code = quantize_8bit(x, scale, inverse, QMAX, type, NATIVE)
            tl.store(out + first + column[None, :], code, mask)
    else:
        code = quantize_8bit(x, scale, inverse, QMAX, type, NATIVE)
        tl.store(out + column[None, :], code, mask)


@cached_launch
def quantize_blocks_kernel(
    x_ptr, data_ptr, scale_ptr, rows, columns, stride, scale_row, scale_column,
    MX: tl.constexpr, QMAX: tl.constexpr, EMAX: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Blocks of B columns, a byte a code, with a float32 scale or MX's power of two."""
    type: tl.constexpr = data_ptr.dtype.element_ty
    row_blocks = tl.cdiv(columns, BLOCK_WIDTH)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row32 = block // row_blocks  # a division in 64 bits would cost more than the rest
    column = (block - row32 * row_blocks)[:, None] * BLOCK_WIDTH
    column += tl.arange(0, BLOCK_WIDTH)[None, :]
    row = row32.to(tl.int64)
    mask = (row < rows)[:, None] & (column < columns)
    x = tl.load(x_ptr + row[:, None] * stride + column, mask, 0.0).to(tl.float32)
    amax = finite_amax(x, 1, False, NATIVE)
    if MX:
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - EMAX, 0)
        tl.store(scale_ptr + block, exponent.to(tl.uint8), row < rows)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two: exact
        code = to_float8(x * inverse[:, None], type, NATIVE)
    else:
        scale = compute_scale(amax, QMAX)
        at = row * scale_row + (block - row32 * row_blocks) * scale_column
        tl.store(scale_ptr + at, scale, row < rows)
        code = quantize_8bit(x, scale[:, None], tl.div_rn(1.0, scale)[:, None], QMAX, type, NATIVE)
    tl.store(data_ptr + row[:, None] * columns + column, code, mask)


@cached_launch
def quantize_128x128_kernel(
    x_ptr, data_ptr, scale_ptr, rows, columns, stride, tiles_m,
    QMAX: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One scale for each 128x128 block of each matrix; blocks at the edges may be partial."""
    tile = tl.program_id(0)
    matrix, row_tile = (tile // tiles_m).to(tl.int64), tile % tiles_m
    row = row_tile * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    full_row = matrix * rows + row
    x = tl.load(x_ptr + full_row[:, None] * stride + column[None, :], mask, 0.0).to(tl.float32)
    scale = compute_scale(tl.max(finite_amax(x, 1, False, NATIVE), 0), QMAX)
    tl.store(scale_ptr + tile.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), scale)
    code = quantize_8bit(x, scale, tl.div_rn(1.0, scale), QMAX, data_ptr.dtype.element_ty, NATIVE)
    tl.store(data_ptr + full_row[:, None] * columns + column[None, :], code, mask)


@cached_launch
def amax_kernel(
    x_ptr, amax_ptr, rows, columns, stride, programs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """amax_E: the bits of the largest finite |x| of each matrix, by atomic maximum."""
    matrix = tl.program_id(1).to(tl.int64)
    tiles_n = tl.cdiv(columns, BLOCK_N)
    bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, BLOCK_M) * tiles_n, programs):
        row = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        column = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        source = x_ptr + (matrix * rows + row)[:, None] * stride + column[None, :]
        bits = tl.maximum(bits, magnitude_bits(tl.load(source, mask, 0.0).to(tl.float32), False))
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.max(bits, 1), 0))


@cached_launch
def quantize_tensor_kernel(
    x_ptr, data_ptr, amax_ptr, scale_ptr, rows, columns, stride,
    QMAX: tl.constexpr, STATIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Codes by one scale a matrix: a static scale, or amax / QMAX, which is stored."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    full_row = (matrix * rows + row)[:, None]
    if STATIC:
        scale = tl.load(scale_ptr + matrix)
    else:
        scale = compute_scale(tl.load(amax_ptr + matrix).to(tl.float32, bitcast=True), QMAX)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr + matrix, scale)
    x = tl.load(x_ptr + full_row * stride + column[None, :], mask, 0.0).to(tl.float32)
    code = quantize_8bit(x, scale, tl.div_rn(1.0, scale), QMAX, data_ptr.dtype.element_ty, NATIVE)
    tl.store(data_ptr + full_row * columns + column[None, :], code, mask)


# ---- launching -----------------------------------------------------------------------------------


def quantize(x: Tensor, format: str, static: Tensor | None = None) -> Any:
    """`fulgurite::quantize` on a GPU: packed data and separate scales, or NotImplemented."""
    entry = resolve_format(format)
    launch = _select_launcher(entry, static)
    if launch is None or x.dtype not in DTYPES:
        return NotImplemented
    check_shape(entry, x.shape)
    data = x.new_empty(data_shape(entry, x.shape), dtype=entry.data_dtype)
    scales = [empty_scale(x, entry, scale) for scale in entry.separate_scales]
    if x.numel() == 0:
        return NotImplemented  # the reference defines the scales of an empty tensor
    has_scale = static is not None or entry.block != (WHOLE_DIM, WHOLE_DIM)
    if triton_transpose.is_transposed(x, entry) and has_scale:
        if static is not None:
            scales[0].copy_(static.reshape(-1))
        triton_transpose.quantize_transposed(x, data, scales[0], entry)
    else:
        launch(_as_matrices(x), data, scales, entry, static)
    return [data, *scales]


Launcher = Callable[[Tensor, Tensor, list[Tensor], Format, Tensor | None], None]


def _select_launcher(format: Format, static: Tensor | None) -> Launcher | None:
    """The launcher of a format, or None if only the reference has it."""
    is_per_tensor = format.block == (WHOLE_DIM, WHOLE_DIM)
    if static is not None and not (format.family == "fp8" and is_per_tensor):
        return None
    if is_per_tensor:
        return _quantize_tensor
    if format.block[1] == WHOLE_DIM:
        return _quantize_rows
    if format.block[0] != 1:
        return _quantize_128x128
    is_symmetric_4bit = format.element.bits == 4 and len(format.scales) == 1
    if format.family in ("gguf", "cast") or (format.family == "int" and not is_symmetric_4bit):
        return None
    return _quantize_blocks


def _as_matrices(x: Tensor) -> Tensor:
    """x as [E, R, K], all rows at one stride and K contiguous: a view where possible."""
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    matrices = rows.reshape(-1, *rows.shape[-2:])
    is_dense = matrices.stride(-1) == 1 or matrices.shape[-1] == 1
    row_stride = matrices.shape[1] * matrices.stride(1)
    is_stacked = matrices.shape[0] == 1 or matrices.stride(0) == row_stride
    return matrices if is_dense and is_stacked else matrices.contiguous()


def _quantize_rows(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, _: object
) -> None:
    matrices, rows, columns = x.shape
    config = heuristics_for(x.device).quantize_rows(columns)
    quantize_rows_kernel[(cdiv(matrices * rows, config.block_m),)](
        x, data, scales[0], matrices * rows, columns, x.stride(1),
        QMAX=format.element.max_value, BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        WHOLE_ROW=columns <= config.block_n, NATIVE=NATIVE, num_warps=config.num_warps,
    )  # fmt: skip


def _quantize_blocks(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, _: object
) -> None:
    if format.element.bits == 4:
        amax = _compute_amax(x) if format.family == "nvfp4" else None
        return quantize_4bit(x, data, scales, format, amax)
    matrices, rows, columns = x.shape
    width, qmax = format.block[1], format.element.max_value
    is_mx = format.family == "mx"
    num_blocks = matrices * rows * cdiv(columns, width)
    assert num_blocks < 2**31, f"{num_blocks} blocks don't fit in a 32-bit index"
    config = heuristics_for(x.device).quantize_blocks(width)
    quantize_blocks_kernel[(cdiv(num_blocks, config.block_m),)](
        x, data, scales[0].view(torch.uint8) if is_mx else scales[0],
        matrices * rows, columns, x.stride(1), *_scale_strides(scales[0]),
        MX=is_mx, QMAX=qmax, EMAX=math.floor(math.log2(qmax)),
        BLOCKS=config.block_m, BLOCK_WIDTH=width, NATIVE=NATIVE, num_warps=config.num_warps,
    )  # fmt: skip


def _scale_strides(scale: Tensor) -> tuple[int, int]:
    """Strides from one row's scale to the next row's, and from one block's to the next block's."""
    return (scale.stride(-2) if scale.dim() > 1 else 0), scale.stride(-1)


def _quantize_128x128(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, _: object
) -> None:
    matrices, rows, columns = x.shape
    if triton_bf16x2.can_read_bf16x2(x):
        return triton_bf16x2.quantize_128x128_bf16x2(x, data, scales[0], format.element.max_value)
    tiles_m = cdiv(rows, 128)
    quantize_128x128_kernel[(matrices * tiles_m, cdiv(columns, 128))](
        x, data, scales[0], rows, columns, x.stride(1), tiles_m,
        QMAX=format.element.max_value, NATIVE=NATIVE,
        num_warps=heuristics_for(x.device).quantize_128x128.num_warps,
    )  # fmt: skip


def _quantize_tensor(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, static: Tensor | None
) -> None:
    matrices, rows, columns = x.shape
    if static is not None:
        is_per_matrix = static.numel() == scales[0].numel()
        scales[0].copy_(static.reshape(scales[0].shape) if is_per_matrix else static.reshape(-1))
    amax = scales[0] if static is not None else _compute_amax(x)
    config = heuristics_for(x.device).quantize_tensor(columns)
    grid = (cdiv(rows, config.block_m), cdiv(columns, config.block_n), matrices)
    quantize_tensor_kernel[grid](
        x, data, amax, scales[0], rows, columns, x.stride(1),
        QMAX=format.element.max_value, STATIC=static is not None, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, NATIVE=NATIVE, num_warps=config.num_warps,
    )  # fmt: skip


def _compute_amax(x: Tensor) -> Tensor:
    """The bits of each matrix's largest finite magnitude."""
    if triton_bf16x2.can_read_bf16x2(x) and triton_bf16x2.has_dense_rows(x):
        return triton_bf16x2.compute_amax_bf16x2(x)
    matrices, rows, columns = x.shape
    amax = torch.zeros(matrices, dtype=torch.int32, device=x.device)
    heuristics = heuristics_for(x.device)
    config = heuristics.quantize_tensor(columns)
    tiles = cdiv(rows, config.block_m) * cdiv(columns, config.block_n)
    programs = min(tiles, max(1, heuristics.amax_programs // matrices))
    amax_kernel[(programs, matrices)](
        x, amax, rows, columns, x.stride(1), programs, BLOCK_M=config.block_m,
        BLOCK_N=config.block_n, num_warps=config.num_warps,
    )  # fmt: skip
    return amax
