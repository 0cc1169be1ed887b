# mypy: allow-untyped-defs, allow-incomplete-defs
"""Float tensors to packed data and scales, each in one read where the format allows it.

In: a float tensor (K last) and a format of `FORMATS`. Out: packed data and scales, equal to
`fulgurite.quant.quantize` bit for bit.

    row, 1xB, 128x128     one kernel: the block stays in registers between its maximum and its codes
    tensor, nvfp4         two: a maximum over everything comes first, by integer atomics, whose result
                          does not depend on their order

    R  rows    K  columns    B  columns of a block    E  matrices of a stack
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.common.triton_numerics import (
    NATIVE,
    compute_scale,
    finite_amax,
    magnitude_bits,
    quantize_8bit,
    to_float8,
)
from fulgurite.kernels.quantize import triton_bf16x2, triton_transpose
from fulgurite.kernels.quantize.reference import empty_scale
from fulgurite.kernels.quantize.triton_4bit import quantize_4bit
from fulgurite.quant import Format, resolve_format
from fulgurite.quant.format import WHOLE_DIM
from fulgurite.quant.shapes import check_shape, data_shape

MAX_REGISTER_ROW = 16384  # columns a program keeps in registers; longer rows are read twice
TILE_WARPS = 8  # of a 128x128 tile
TILE = 4096  # elements of a program of the 1xB kernels: H200, `fulgurite bench quant`
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
AMAX_PROGRAMS = 1056  # eight for each of an H200's processors


# ---- kernels -------------------------------------------------------------------------------------


@triton.jit
def quantize_rows_kernel(
    x_ptr, data_ptr, scale_ptr, rows, columns, stride,
    HIGHEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE_ROW: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """scale_R = amax_K |x_RK| / HIGHEST;  code_RK = round(x_RK / scale_R).

    WHOLE_ROW: a block is a row; otherwise rows are longer, and read twice.
    """
    type: tl.constexpr = data_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row[:, None] < rows
    column = tl.arange(0, BLOCK)
    start = x_ptr + row[:, None] * stride
    if not WHOLE_ROW:
        bits = tl.zeros([ROWS, BLOCK], tl.int32)
        for first in range(0, columns, BLOCK):
            here = inside & (first + column < columns)[None, :]
            x = tl.load(start + first + column[None, :], here, 0.0).to(tl.float32)
            bits = tl.maximum(bits, magnitude_bits(x, type == tl.int8))
        amax = tl.max(bits, 1).to(tl.float32, bitcast=True)
    else:
        here = inside & (column < columns)[None, :]
        x = tl.load(start + column[None, :], here, 0.0).to(tl.float32)
        amax = finite_amax(x, 1, type == tl.int8, C)
    scale = compute_scale(amax, HIGHEST)
    tl.store(scale_ptr + row, scale, row < rows)
    scale = scale[:, None]
    inverse = tl.div_rn(1.0, scale)
    out = data_ptr + row[:, None] * columns
    if not WHOLE_ROW:
        for first in range(0, columns, BLOCK):
            here = inside & (first + column < columns)[None, :]
            x = tl.load(start + first + column[None, :], here, 0.0).to(tl.float32)
            code = quantize_8bit(x, scale, inverse, HIGHEST, type, C)
            tl.store(out + first + column[None, :], code, here)
    else:
        tl.store(out + column[None, :], quantize_8bit(x, scale, inverse, HIGHEST, type, C), here)


@triton.jit
def quantize_blocks_kernel(
    x_ptr, data_ptr, scale_ptr, rows, columns, stride, scale_row, scale_column,
    MX: tl.constexpr, HIGHEST: tl.constexpr, EMAX: tl.constexpr,
    BLOCKS: tl.constexpr, B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Blocks of B columns of a byte each, with a float32 scale, or MX's power of two."""
    type: tl.constexpr = data_ptr.dtype.element_ty
    across = tl.cdiv(columns, B)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row32 = block // across  # divided in 32 bits: in 64 it would cost more than the rest
    column = (block - row32 * across)[:, None] * B + tl.arange(0, B)[None, :]
    row = row32.to(tl.int64)
    here = (row < rows)[:, None] & (column < columns)
    x = tl.load(x_ptr + row[:, None] * stride + column, here, 0.0).to(tl.float32)
    amax = finite_amax(x, 1, False, C)
    if MX:
        exponent = tl.maximum((amax.to(tl.int32, bitcast=True) >> 23) - EMAX, 0)
        tl.store(scale_ptr + block, exponent.to(tl.uint8), row < rows)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)  # a power of two: exact
        code = to_float8(x * inverse[:, None], type, C)
    else:
        scale = compute_scale(amax, HIGHEST)
        place = row * scale_row + (block - row32 * across) * scale_column
        tl.store(scale_ptr + place, scale, row < rows)
        code = quantize_8bit(x, scale[:, None], tl.div_rn(1.0, scale)[:, None], HIGHEST, type, C)
    tl.store(data_ptr + row[:, None] * columns + column, code, here)


@triton.jit
def quantize_128x128_kernel(
    x_ptr, data_ptr, scale_ptr, rows, columns, stride, down,
    HIGHEST: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One scale for each 128 x 128 tile of each matrix; tiles at the edges may be partial."""
    tile = tl.program_id(0)
    matrix, row_tile = (tile // down).to(tl.int64), tile % down
    row = row_tile * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    full = matrix * rows + row
    x = tl.load(x_ptr + full[:, None] * stride + column[None, :], here, 0.0).to(tl.float32)
    scale = compute_scale(tl.max(finite_amax(x, 1, False, C), 0), HIGHEST)
    tl.store(scale_ptr + tile.to(tl.int64) * tl.num_programs(1) + tl.program_id(1), scale)
    code = quantize_8bit(x, scale, tl.div_rn(1.0, scale), HIGHEST, data_ptr.dtype.element_ty, C)
    tl.store(data_ptr + full[:, None] * columns + column[None, :], code, here)


@triton.jit
def amax_kernel(
    x_ptr, amax_ptr, rows, columns, stride, programs, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """amax_E: the bits of the largest finite |x| of each matrix, by atomic maximum."""
    matrix = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    across = tl.cdiv(columns, BLOCK)
    bits = tl.zeros([ROWS, BLOCK], tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS) * across, programs):
        row = (tile // across) * ROWS + tl.arange(0, ROWS)
        place = (tile % across) * BLOCK + column
        here = (row < rows)[:, None] & (place < columns)[None, :]
        source = x_ptr + (matrix * rows + row)[:, None] * stride + place[None, :]
        bits = tl.maximum(bits, magnitude_bits(tl.load(source, here, 0.0).to(tl.float32), False))
    tl.atomic_max(amax_ptr + matrix, tl.max(tl.max(bits, 1), 0))


@triton.jit
def quantize_tensor_kernel(
    x_ptr, data_ptr, amax_ptr, scale_ptr, rows, columns, stride,
    HIGHEST: tl.constexpr, GIVEN: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Codes by one scale a matrix: the scale given, or amax / HIGHEST, which is stored."""
    matrix = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = (row < rows)[:, None] & (column < columns)[None, :]
    full = (matrix * rows + row)[:, None]
    if GIVEN:
        scale = tl.load(scale_ptr + matrix)
    else:
        scale = compute_scale(tl.load(amax_ptr + matrix).to(tl.float32, bitcast=True), HIGHEST)
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(scale_ptr + matrix, scale)
    x = tl.load(x_ptr + full * stride + column[None, :], here, 0.0).to(tl.float32)
    code = quantize_8bit(x, scale, tl.div_rn(1.0, scale), HIGHEST, data_ptr.dtype.element_ty, C)
    tl.store(data_ptr + full * columns + column[None, :], code, here)


# ---- launching -----------------------------------------------------------------------------------


def quantize(x: Tensor, format: str, static: Tensor | None = None) -> Any:
    """`fulgurite::quantize` on a GPU: packed data and stored scales, or NotImplemented."""
    entry = resolve_format(format)
    launch = _select_launcher(entry, static)
    if launch is None or x.dtype not in DTYPES:
        return NotImplemented
    check_shape(entry, x.shape)
    data = x.new_empty(data_shape(entry, x.shape), dtype=entry.data_dtype)
    scales = [empty_scale(x, entry, scale) for scale in entry.separate_scales]
    if x.numel() == 0:
        return NotImplemented  # the oracle knows the scales of nothing
    if triton_transpose.is_transposed(x, entry) and (
        static is not None or entry.block != (WHOLE_DIM, WHOLE_DIM)
    ):
        if static is not None:
            scales[0].copy_(static.reshape(-1))
        triton_transpose.quantize_transposed(x, data, scales[0], entry)
    else:
        launch(_as_matrices(x), data, scales, entry, static)
    return [data, *scales]


Launcher = Callable[[Tensor, Tensor, list[Tensor], Format, Tensor | None], None]


def _select_launcher(format: Format, static: Tensor | None) -> Launcher | None:
    """The kernel of a format, None where only the oracle has it."""
    per_tensor = format.block == (WHOLE_DIM, WHOLE_DIM)
    if static is not None and not (format.family == "fp8" and per_tensor):
        return None
    if per_tensor:
        return _quantize_tensor
    if format.block[1] == WHOLE_DIM:
        return _quantize_rows
    if format.block[0] != 1:
        return _quantize_128x128
    symmetric_nibbles = format.element.bits == 4 and len(format.scales) == 1
    if format.family in ("gguf", "cast") or (format.family == "int" and not symmetric_nibbles):
        return None
    return _quantize_blocks


def _as_matrices(x: Tensor) -> Tensor:
    """x as [E, R, K] whose rows lie at one stride, K dense: a view where that can be."""
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    matrices = rows.reshape(-1, *rows.shape[-2:])
    dense = matrices.stride(-1) == 1 or matrices.shape[-1] == 1
    stacked = matrices.shape[0] == 1 or matrices.stride(0) == matrices.shape[1] * matrices.stride(1)
    return matrices if dense and stacked else matrices.contiguous()


def _quantize_rows(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, _: object
) -> None:
    matrices, rows, columns = x.shape
    block = min(triton.next_power_of_2(columns), MAX_REGISTER_ROW)
    together = max(1, min(2048 // block, 16))
    quantize_rows_kernel[(triton.cdiv(matrices * rows, together),)](
        x, data, scales[0], matrices * rows, columns, x.stride(1),
        HIGHEST=format.element.max_value, ROWS=together, BLOCK=block,
        WHOLE_ROW=columns <= block, C=NATIVE, num_warps=max(4, min(16, together * block // 1024)),
    )  # fmt: skip


def _quantize_blocks(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, _: object
) -> None:
    if format.element.bits == 4:
        amax = _compute_amax(x) if format.family == "nvfp4" else None
        return quantize_4bit(x, data, scales, format, amax)
    matrices, rows, columns = x.shape
    width, highest = format.block[1], format.element.max_value
    power_of_two = format.family == "mx"
    total = matrices * rows * triton.cdiv(columns, width)
    assert total < 2**31, f"{total} blocks are more than a 32-bit number counts"
    quantize_blocks_kernel[(triton.cdiv(total, TILE // width),)](
        x, data, scales[0].view(torch.uint8) if power_of_two else scales[0],
        matrices * rows, columns, x.stride(1), *_scale_strides(scales[0]),
        MX=power_of_two, HIGHEST=highest, EMAX=math.floor(math.log2(highest)),
        BLOCKS=TILE // width, B=width, C=NATIVE, num_warps=4,
    )  # fmt: skip


def _scale_strides(scale: Tensor) -> tuple[int, int]:
    """From one row's scale to the next row's, and to the next block's."""
    return (scale.stride(-2) if scale.dim() > 1 else 0), scale.stride(-1)


def _quantize_128x128(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, _: object
) -> None:
    matrices, rows, columns = x.shape
    if triton_bf16x2.can_read_bf16x2(x):
        return triton_bf16x2.quantize_128x128_bf16x2(x, data, scales[0], format.element.max_value)
    down = triton.cdiv(rows, 128)
    quantize_128x128_kernel[(matrices * down, triton.cdiv(columns, 128))](
        x, data, scales[0], rows, columns, x.stride(1), down,
        HIGHEST=format.element.max_value, C=NATIVE, num_warps=TILE_WARPS,
    )  # fmt: skip


def _quantize_tensor(
    x: Tensor, data: Tensor, scales: list[Tensor], format: Format, static: Tensor | None
) -> None:
    matrices, rows, columns = x.shape
    if static is not None:
        one_each = static.numel() == scales[0].numel()
        scales[0].copy_(static.reshape(scales[0].shape) if one_each else static.reshape(-1))
    amax = scales[0] if static is not None else _compute_amax(x)
    block = min(triton.next_power_of_2(columns), 2048)
    together = max(1, TILE // block)
    grid = (triton.cdiv(rows, together), triton.cdiv(columns, block), matrices)
    quantize_tensor_kernel[grid](
        x, data, amax, scales[0], rows, columns, x.stride(1),
        HIGHEST=format.element.max_value, GIVEN=static is not None, ROWS=together, BLOCK=block,
        C=NATIVE, num_warps=4,
    )  # fmt: skip


def _compute_amax(x: Tensor) -> Tensor:
    """The bits of each matrix's largest finite magnitude."""
    if triton_bf16x2.can_read_bf16x2(x) and triton_bf16x2.has_dense_rows(x):
        return triton_bf16x2.compute_amax_bf16x2(x)
    matrices, rows, columns = x.shape
    amax = torch.zeros(matrices, dtype=torch.int32, device=x.device)
    block = min(triton.next_power_of_2(columns), 2048)
    together = max(1, TILE // block)
    tiles = triton.cdiv(rows, together) * triton.cdiv(columns, block)
    programs = min(tiles, max(1, AMAX_PROGRAMS // matrices))
    amax_kernel[(programs, matrices)](
        x, amax, rows, columns, x.stride(1), programs, ROWS=together, BLOCK=block, num_warps=4
    )
    return amax
