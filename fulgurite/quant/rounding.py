"""Weights to codes, better than amax scales and round-to-nearest: for checkpoints made once.

In: a weight [N, K], a format with blocks along K, and, if calibrated, the Hessian of its inputs.
Out: a `QuantTensor`.

    round_to_nearest        each element to the nearest code, with the scales of `scale_search.py`
    round_second_order      column by column; the rounding error of a column is compensated by the
                            columns after it, so that the error of the output x @ w.T is small

Second-order rounding (GPTQ, Frantar et al. 2022). With H = sum x xᵀ over calibration inputs, and U
the upper Cholesky factor of the inverse of the damped H:

    e_j = (w_j - q_j) / U_jj            the error of column j, in units of its compensation
    w_k = w_k - e_j U_jk  for k > j     columns that are not rounded yet

Columns are updated in blocks of `COLUMN_BLOCK`, so that most of the work is matmuls. The scales of
a group of columns are fitted when the first of them is reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.codecs import codec
from fulgurite.quant.codecs.blocks import Codes
from fulgurite.quant.format import Format
from fulgurite.quant.scale_search import (
    MAX_GROUP,
    Scales,
    compute_tensor_scale,
    fit_scales,
    get_steps,
    group_size,
    quantize_to_scales,
    round_values,
    to_codes,
)
from fulgurite.quant.shapes import check_shape
from fulgurite.quant.tensor import QuantTensor

COLUMN_BLOCK = MAX_GROUP  # columns that are updated at once
DAMPING = 0.01  # of the mean of H's diagonal
MAX_DAMPING = 1.0


def round_to_nearest(
    weight: Tensor,
    format: Format,
    *,
    scale_dtype: torch.dtype = torch.float32,
    tensor_scale: Tensor | None = None,
    importance_K: Tensor | None = None,
) -> QuantTensor:
    """Fit scales and round each element to the nearest code.

    Args:
        weight: [N, K].
        format: the number format.
        scale_dtype: float scales are rounded to this dtype before they are used.
        tensor_scale: the scale per tensor of NVFP4. None: from the weight's amax.
        importance_K: weights of the squared error of each column, for the search of scales.
    """
    check_shape(format, weight.shape)
    scales = fit_scales(weight, format, scale_dtype, tensor_scale, importance_K)
    return _pack(quantize_to_scales(weight, scales, format), format, weight.dtype)


def round_second_order(
    weight: Tensor,
    format: Format,
    hessian_KK: Tensor,
    *,
    scale_dtype: torch.dtype = torch.float32,
    tensor_scale: Tensor | None = None,
) -> QuantTensor:
    """Round column by column and compensate each column's error in the columns after it."""
    check_shape(format, weight.shape)
    group = group_size(format)
    factor_KK, is_used_K = factor_inverse_hessian(hessian_KK)
    w_NK, dtype = weight.float().clone(), weight.dtype
    if tensor_scale is None and format.family == "nvfp4":
        tensor_scale = compute_tensor_scale(w_NK, format)
    importance_K = factor_KK.diagonal().square().reciprocal() * is_used_K
    codes: list[Tensor] = []
    scales: list[Scales] = []
    for start in range(0, w_NK.shape[1], COLUMN_BLOCK):
        stop = min(start + COLUMN_BLOCK, w_NK.shape[1])
        block_Nk, factor_kk = w_NK[:, start:stop], factor_KK[start:stop, start:stop]
        errors_Nk = torch.empty_like(block_Nk)
        for first in range(0, stop - start, group):
            columns = slice(first, first + group)
            importance_k = importance_K[start:stop][columns]
            fitted = fit_scales(
                block_Nk[:, columns], format, scale_dtype, tensor_scale, importance_k
            )
            codes.append(_round_columns(block_Nk, errors_Nk, factor_kk, columns, fitted, format))
            scales.append(fitted)
        w_NK[:, stop:] -= errors_Nk @ factor_KK[start:stop, stop:]
    merged = {name: torch.cat([s[name] for s in scales], dim=-1) for name in scales[0]}
    if tensor_scale is not None:
        merged["tensor_scale"] = scales[0]["tensor_scale"]
    return _pack(Codes(torch.cat(codes, dim=-1), merged), format, dtype)


def supports_second_order(format: Format) -> bool:
    """Formats of 4 bits with one row per block. With 8 bits, rounding to nearest loses little."""
    return format.element.bits == 4 and format.block[0] == 1 and format.block[1] <= COLUMN_BLOCK


def factor_inverse_hessian(hessian_KK: Tensor) -> tuple[Tensor, Tensor]:
    """The upper Cholesky factor of the inverse of the damped Hessian; and which inputs are used.

    An input that is always zero gets a diagonal of 1: its column is rounded to nearest.
    """
    h_KK = hessian_KK.float().clone()
    diagonal_K = h_KK.diagonal()
    if not bool(h_KK.isfinite().all()):
        raise FormatError("the Hessian of the calibration inputs is not finite")
    is_used_K = diagonal_K > 0
    diagonal_K[~is_used_K] = 1.0
    mean = diagonal_K.mean()
    damping = DAMPING
    while True:
        damped_KK = h_KK.clone()
        damped_KK.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped_KK)
        if not int(failed):
            inverse_KK = torch.cholesky_inverse(lower)
            upper, failed = torch.linalg.cholesky_ex(inverse_KK, upper=True)
            if not int(failed):
                return upper, is_used_K
        damping *= 10
        if damping > MAX_DAMPING:
            raise FormatError(
                "the Hessian of the calibration inputs can't be inverted",
                next="calibrate with more text",
            )


def _round_columns(
    block_Nk: Tensor,
    errors_Nk: Tensor,
    factor_kk: Tensor,
    columns: slice,
    scales: Scales,
    format: Format,
) -> Tensor:
    """Round a group of columns one by one, and update the later columns of the block."""
    step_N1, zero_N1 = get_steps(scales, format)
    rounded = []
    for column in range(*columns.indices(block_Nk.shape[1])):
        values_N1 = block_Nk[:, column : column + 1]
        rounded_N1 = round_values(values_N1 / step_N1, zero_N1, format) * step_N1
        error_N1 = (values_N1 - rounded_N1) / factor_kk[column, column]
        block_Nk[:, column + 1 :] -= error_N1 * factor_kk[column, column + 1 :]
        errors_Nk[:, column : column + 1] = error_N1
        rounded.append(rounded_N1)
    return to_codes(torch.cat(rounded, dim=-1), step_N1, zero_N1, format)


def _pack(codes: Codes, format: Format, dtype: torch.dtype) -> QuantTensor:
    packed = codec.pack(codes, format)
    return QuantTensor(format, packed.data, packed.scales, dtype)
