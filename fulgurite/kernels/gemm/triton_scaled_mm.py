"""`scaled_mm` on a GPU: a library call or our kernel, whichever is faster; of one weight or of
experts.

In: the operator's arguments. Out: a @ b.T + bias, or NotImplemented for pairs of formats that only
the reference takes.

    fp8 tensor, row, 1x128 with 128x128 or 1x128    torch's scaled_mm if it takes the shape and was
                                                    measured faster (`prefers_library_scaled_mm`)
    the same otherwise, int8 rows                   our kernel, 8 bits times 8 bits
    MXFP8 and NVFP4 on GPUs with block-scaled MMAs  torch's scaled_mm, scales swizzled (never run: no
                                                    such GPU was at hand)
    MX and NVFP4 on other GPUs                      a as bfloat16, exactly; b dequantized in the kernel
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType
from torch.nn.functional import scaled_mm as library_scaled_mm

from fulgurite.kernels.common.triton_operands import DequantScheme, dequant_scheme, make_operand
from fulgurite.kernels.gemm.triton_launch import GemmInputs, launch_gemm
from fulgurite.kernels.quantize.triton_dequantize import dequantize_activations
from fulgurite.kernels.tuning import heuristics_for
from fulgurite.quant import Format, resolve_format
from fulgurite.quant.format import WHOLE_DIM
from fulgurite.quant.hardware import get_device_features, is_native
from fulgurite.quant.swizzle import swizzle_scales

PER_TENSOR, PER_ROW = (WHOLE_DIM, WHOLE_DIM), (1, WHOLE_DIM)
BLOCK_1x128, BLOCK_128x128 = (1, 128), (128, 128)
# blocks of a's and b's scales -> what torch's scaled_mm calls them
LIBRARY_SCALING = {
    (PER_TENSOR, PER_TENSOR): (ScalingType.TensorWise, ScalingType.TensorWise),
    (PER_ROW, PER_ROW): (ScalingType.RowWise, ScalingType.RowWise),
    (BLOCK_1x128, BLOCK_128x128): (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128),
    (BLOCK_1x128, BLOCK_1x128): (ScalingType.BlockWise1x128, ScalingType.BlockWise1x128),
}
# format -> scaling and swizzle of each of its scale tensors, in torch's words
BLOCK_SCALED_MMA = {
    "mxfp8_e4m3": ([ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]),
    "nvfp4": (
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    ),
}


def scaled_mm(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Any:
    """`fulgurite::scaled_mm`."""
    rows = a.reshape(-1, a.shape[-1])
    left, right = resolve_format(a_format), resolve_format(b_format)
    if a.dim() > 2 and left.block != PER_ROW and left.block[0] != 1:
        return NotImplemented  # one scale a matrix, and several matrices
    if a.numel() == 0 or b.numel() == 0:
        return NotImplemented
    scale = a_scales[0] if a.dim() == 2 else a_scales[0].reshape(-1, a_scales[0].shape[-1])
    if has_block_scaled_mma(a, left, b, right):
        return block_scaled_mm(a, a_scales, b, b_scales, left, bias, out_dtype)
    if not _multiplies_8bit(left, right):
        return _dequantized_gemm(a, a_scales, left, b, b_scales, right, bias, out_dtype, None)
    m, (n, k) = rows.shape[0], b.shape
    heuristics = heuristics_for(rows.device)
    pair = LIBRARY_SCALING.get((left.block, right.block))
    if (
        pair
        and _library_supports(pair, left, right, rows, b, bias, out_dtype)
        and heuristics.prefers_library_scaled_mm(right.block, m, n, k)
    ):
        out = _library_scaled_mm(rows, scale, b, b_scales[0], pair, bias, out_dtype)
    else:
        scheme = _8bit_scheme(right)
        weight = make_operand(b, b_scales, right, scheme)
        inputs = GemmInputs(
            rows, weight, scheme, out_dtype, bias=bias, x_scale=scale, x_format=left
        )
        out = launch_gemm(inputs, heuristics.scaled_gemm(m, n, k, scheme.scaling))
    return out.reshape(*a.shape[:-1], n)


def grouped_scaled_mm(
    a: Tensor,
    a_scales: list[Tensor],
    a_format: str,
    expert_offsets: Tensor,
    b: Tensor,
    b_scales: list[Tensor],
    b_format: str,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Any:
    """y[t] = a[t] @ b[e].T + bias[e] for offsets[e - 1] <= t < offsets[e]."""
    left, right = resolve_format(a_format), resolve_format(b_format)
    if a.numel() == 0 or b.numel() == 0:
        return NotImplemented
    if not _multiplies_8bit(left, right):
        return _dequantized_gemm(
            a, a_scales, left, b, b_scales, right, bias, out_dtype, expert_offsets
        )
    scheme = _8bit_scheme(right)
    m, (experts, n, k) = a.shape[0], b.shape
    config = heuristics_for(a.device).expert_gemm(m, n, k, experts, scheme, is_8bit=True)
    inputs = GemmInputs(
        a, make_operand(b, b_scales, right, scheme), scheme, out_dtype, bias=bias,
        x_scale=a_scales[0], x_format=left, expert_offsets=expert_offsets,
    )  # fmt: skip
    return launch_gemm(inputs, config)


def _multiplies_8bit(left: Format, right: Format) -> bool:
    """Whether 8 bits are multiplied by 8 bits, scaled in the epilogue or every 128 columns of K."""
    if left.name == "int8" and right.name == "int8":
        return True
    if left.family != "fp8" or right.family != "fp8" or left.block == BLOCK_128x128:
        return False
    return right.block[1] != WHOLE_DIM or left.block[1] == WHOLE_DIM


def _8bit_scheme(format: Format) -> DequantScheme:
    scheme = dequant_scheme(format)
    assert scheme is not None, f"{format.name} has 8 bits, and the kernel takes those"
    return scheme


def _dequantized_gemm(
    a: Tensor,
    a_scales: list[Tensor],
    left: Format,
    b: Tensor,
    b_scales: list[Tensor],
    right: Format,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    expert_offsets: Tensor | None,
) -> Any:
    """a as bfloat16, which holds 4- and 8-bit floats with power-of-two or e4m3 scales exactly."""
    scheme = dequant_scheme(right)
    if scheme is None or left.family not in ("mx", "nvfp4"):
        return NotImplemented
    rows, factor = dequantize_activations(a.reshape(-1, a.shape[-1]), a_scales, left)
    (m, k), n, heuristics = rows.shape, b.shape[-2], heuristics_for(a.device)
    if expert_offsets is None:
        config = heuristics.dequantized_gemm(m, n, k, scheme)
    else:
        config = heuristics.expert_gemm(m, n, k, b.shape[0], scheme, is_8bit=False)
    inputs = GemmInputs(
        rows, make_operand(b, b_scales, right, scheme), scheme, out_dtype, bias=bias,
        expert_offsets=expert_offsets, x_factor=factor,
    )  # fmt: skip
    return launch_gemm(inputs, config).reshape(*a.shape[:-1], n)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _library_supports(
    pair: tuple[ScalingType, ScalingType],
    left: Format,
    right: Format,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> bool:
    """What torch's scaled_mm requires of dtypes and shapes (2.11 to 2.13, NVIDIA)."""
    if left.family != "fp8" or a.device.type != "cuda" or torch.version.hip:
        return False
    capability, (n, k) = _capability(a.device), b.shape
    both_e5m2 = left.element.name == right.element.name == "e5m2"
    dense = a.is_contiguous() and b.is_contiguous() and n % 16 == 0 and k % 16 == 0
    if capability < (8, 9) or both_e5m2 or not dense:
        return False
    if bias is not None and not (bias.dtype == dtype == torch.bfloat16 and WHOLE_DIM in left.block):
        return False
    if pair[0] is ScalingType.TensorWise:
        return dtype in (torch.bfloat16, torch.float16, torch.float32)
    if pair[0] is ScalingType.RowWise:
        return dtype == torch.bfloat16 and capability[0] == 9
    blocks_fit = k % 128 == 0 and (pair[1] is not ScalingType.BlockWise128x128 or n % 128 == 0)
    return capability == (9, 0) and blocks_fit and dtype in (torch.bfloat16, torch.float32)


def _library_scaled_mm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    pair: tuple[ScalingType, ScalingType],
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """torch's scaled_mm, with scales in the layouts that it requires."""
    if pair[0] is ScalingType.RowWise:
        b_scale = b_scale.t()
    elif pair[0] is ScalingType.TensorWise:
        a_scale, b_scale = a_scale.reshape(1), b_scale.reshape(1)
    else:
        a_scale = to_column_major(a_scale)
        is_128x128 = b_scale.shape[0] != b.shape[0]
        b_scale = _pad_block_scales(b_scale) if is_128x128 else to_column_major(b_scale)
    out: Tensor = library_scaled_mm(
        a, b.t(), a_scale, pair[0], b_scale, pair[1], bias=bias, output_dtype=dtype
    )
    return out


def has_block_scaled_mma(a: Tensor, left: Format, b: Tensor, right: Format) -> bool:
    """Whether torch multiplies two matrices of this format in it (torch 2.11 to 2.13, NVIDIA)."""
    if left.name != right.name or left.name not in BLOCK_SCALED_MMA or torch.version.hip:
        return False
    (n, row_bytes), is_dense = b.shape, a.is_contiguous() and b.is_contiguous()
    return is_dense and n % 16 == 0 and row_bytes % 16 == 0 and is_native(left, _features(a.device))


@functools.cache
def _features(device: torch.device) -> tuple[str, ...]:
    return get_device_features(device)


def block_scaled_mm(
    a: Tensor,
    a_scales: list[Tensor],
    b: Tensor,
    b_scales: list[Tensor],
    format: Format,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """torch's scaled_mm of two matrices in one block-scaled format, with swizzled scales."""
    recipes, swizzles = BLOCK_SCALED_MMA[format.name]
    rows = a.reshape(-1, a.shape[-1])
    if format.element.bits == 4:
        rows, b = rows.view(torch.float4_e2m1fn_x2), b.view(torch.float4_e2m1fn_x2)
    block_scales = a_scales[0].reshape(-1, a_scales[0].shape[-1])
    left = [swizzle_scales(block_scales), *(scale.reshape(1) for scale in a_scales[1:])]
    right = [swizzle_scales(b_scales[0]), *(scale.reshape(1) for scale in b_scales[1:])]
    out: Tensor = library_scaled_mm(
        rows, b.t(), left, recipes, right, recipes, swizzles, swizzles, output_dtype=torch.bfloat16
    )
    out = out.reshape(*a.shape[:-1], b.shape[0])
    return (out if bias is None else out + bias).to(dtype)


def to_column_major(scale: Tensor) -> Tensor:
    """The same scales in column-major order, with such strides for one row, too."""
    rows, columns = scale.shape
    if scale.stride() == (1, rows):
        return scale
    return scale.new_empty(columns, rows).copy_(scale.t()).t()


def _pad_block_scales(scale: Tensor) -> Tensor:
    """Scales of 128x128 blocks as [K / 128, N / 128], K contiguous, padded to a multiple of
    four."""
    rows, columns = scale.shape
    if columns % 4 == 0 and scale.is_contiguous():
        return scale.t()
    padded = scale.new_zeros(rows, -(-columns // 4) * 4)
    padded[:, :columns] = scale
    return padded.t()
