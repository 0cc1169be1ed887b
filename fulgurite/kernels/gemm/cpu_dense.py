"""GEMMs with dense weights on the CPU: rows sorted by expert times the weights of their experts.

In: rows of x and a weight [E, N, K] in float32, bfloat16 or float16; an `Epilogue`. Out: [S, N], or
[S, N / 2] with a gate. A linear is one expert that has all rows. The kernel (dense_gemm.h) adds the
products of a row in the order of K, whatever the number of rows: the result of a row does not
depend on the other rows. All calls are `replay.NativeKernel`s.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.errors import ArgumentError
from fulgurite.kernels.common.cpu_library import DTYPE_CODES, build_translation_unit
from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation

ROW_ALIGNMENT = 32  # columns that rows of x are padded to
_pack_rows = struct.Struct("11q").pack
_pack_job = struct.Struct("19q2d4q").pack

# errors of grouped_gemm.h, by status - 1
INDEX_ERRORS = (
    "a row index is out of range",
    "an offset is past the last row",
)


@functools.cache
def load_kernel(name: str) -> replay.NativeKernel:
    """A function of moe.h or grouped_gemm.h."""
    text = build_translation_unit(
        "vec16.h", "elementwise.h", "moe.h", "dense_gemm.h", "grouped_gemm.h"
    )
    return replay.NativeKernel(native.load(text), name, make_error=index_error)


def index_error(status: int) -> ArgumentError:
    """The error that a kernel's non-zero status stands for."""
    return ArgumentError(
        INDEX_ERRORS[status - 1],
        next="take indices and offsets from moe.sort_by_expert of the same tokens",
    )


def supports_dtypes(*tensors: Tensor | None) -> bool:
    """Whether there is a compiler and the kernels have these dtypes."""
    is_supported = all(tensor is None or tensor.dtype in DTYPE_CODES for tensor in tensors)
    return is_supported and native.find_compiler() is not None


@functools.cache
def has_bf16_dot_products() -> bool:
    """Whether the kernels multiply bfloat16 by bfloat16 without widening them (AVX512_BF16)."""
    return bool(load_kernel("grouped_gemm").library.has_pair_words())


def prepare_rows(
    x: Tensor,
    row_indices: Tensor | None = None,
    copy: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """x [R, K], or some rows of it, in `dtype` (float32, or x's bfloat16) and padded.

    Returns x itself if it is that already, unless `copy`.
    """
    padded = x.shape[1] + -x.shape[1] % ROW_ALIGNMENT
    is_ready = x.dtype == dtype and padded == x.shape[1] and x.stride(1) == 1
    if is_ready and row_indices is None and not copy:
        return x
    x = x if x.stride(1) == 1 or x.numel() == 0 else x.contiguous()
    rows = x.shape[0] if row_indices is None else row_indices.shape[0]
    out = replay.empty((rows, padded), dtype)
    packed = _pack_rows(
        x.data_ptr(), out.data_ptr(), rows, x.shape[1], x.stride(0), padded, DTYPE_CODES[x.dtype],
        address_of(row_indices), device.num_cpu_threads(), x.shape[0], dtype == torch.bfloat16,
    )  # fmt: skip
    load_kernel("prepare_rows")(packed, (x, row_indices, out))
    return out


@dataclass(frozen=True)
class Epilogue:
    """out = gate(row_weights * sums + bias) + residual; without offsets one expert has all rows."""

    row_weights: Tensor | None = None
    offsets: Tensor | None = None
    bias: Tensor | None = None
    gate: GatedActivation = UNGATED
    residual: Tensor | None = None

    @property
    def dense_bias(self) -> Tensor | None:
        bias = self.bias
        return bias if bias is None or bias.stride(1) == 1 else bias.contiguous()


def dense_gemm(
    x: Tensor,
    row_indices: Tensor | None,
    data: Tensor,
    epilogue: Epilogue,
    out_dtype: torch.dtype,
) -> Tensor:
    """Rows of x, or those of `row_indices`, times the weights [E, N, K] of their experts."""
    is_paired = x.dtype == data.dtype == torch.bfloat16 and has_bf16_dot_products()
    rows = prepare_rows(x, row_indices, dtype=torch.bfloat16 if is_paired else torch.float32)
    bias, gate, residual = epilogue.dense_bias, epilogue.gate, epilogue.residual
    out = replay.empty((rows.shape[0], data.shape[1] // gate.num_inputs), out_dtype)
    scratch = replay.empty((data.shape[0],), torch.int32)
    packed = _pack_job(
        rows.data_ptr(), address_of(residual), address_of(epilogue.row_weights),
        address_of(epilogue.offsets), data.data_ptr(), address_of(bias), out.data_ptr(),
        rows.shape[0], *data.shape, rows.stride(0), *data.stride()[:2],
        *_bias_and_dtype_codes(bias, out, data.dtype), gate.kernel_id, gate.alpha, gate.limit,
        device.num_cpu_threads(), scratch.data_ptr(),
        0 if residual is None else residual.stride(0), is_paired,
    )  # fmt: skip
    tensors = (rows, residual, epilogue.row_weights, epilogue.offsets, data, bias)
    load_kernel("grouped_gemm")(packed, (*tensors, out, scratch))
    return out


def apply_epilogue(
    sums: Tensor, out_dtype: torch.dtype, columns: int, epilogue: Epilogue
) -> Tensor:
    """Row weights, bias and gate of sums in memory."""
    bias, gate, offsets = epilogue.dense_bias, epilogue.gate, epilogue.offsets
    assert offsets is not None, "rows without offsets"
    out = replay.empty((sums.shape[0], columns // gate.num_inputs), out_dtype)
    packed = _pack_job(
        sums.data_ptr(), 0, address_of(epilogue.row_weights), offsets.data_ptr(), 0,
        address_of(bias), out.data_ptr(), sums.shape[0], offsets.shape[0], columns, 0,
        sums.stride(0), 0, 0, *_bias_and_dtype_codes(bias, out, torch.float32), gate.kernel_id,
        gate.alpha, gate.limit, device.num_cpu_threads(), 0, 0, 0,
    )  # fmt: skip
    load_kernel("grouped_epilogue")(packed, (sums, epilogue.row_weights, offsets, bias, out))
    return out


def _bias_and_dtype_codes(
    bias: Tensor | None, out: Tensor, weight_dtype: torch.dtype
) -> tuple[int, ...]:
    """The stride of the bias, and the dtypes of output, weight and bias."""
    bias_code = 0 if bias is None else DTYPE_CODES[bias.dtype]
    codes = (DTYPE_CODES[out.dtype], DTYPE_CODES[weight_dtype], bias_code)
    return (0 if bias is None else bias.stride(0), *codes)


def address_of(tensor: Tensor | None) -> int:
    """The address of a tensor's data, 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
