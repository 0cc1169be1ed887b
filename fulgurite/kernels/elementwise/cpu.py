"""Fused elementwise operators in C++: one native call each, which a recorded step can replay.

In: tensors on the CPU in float32, bfloat16 or float16 with contiguous rows. Out: new tensors, or
`NotImplemented` for anything else.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.common.cpu_library import DTYPE_CODES, build_translation_unit

BINARY_OP_CODES = {
    "add": 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3, "sigmoid": 4, "identity": 5,
    "tanh": 6,
}  # fmt: skip
_pack_rms_norm = struct.Struct("10q2dq").pack
_pack_rope = struct.Struct("13q").pack
_pack_binary = struct.Struct("10qdq").pack


@functools.cache
def _load_kernel(name: str) -> replay.NativeKernel:
    library = native.load(build_translation_unit("vec16.h", "elementwise.h"))
    return replay.NativeKernel(library, name)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
    """`elementwise.ops.rms_norm`."""
    rows = _grouped_rows(x)
    fits = weight.shape == x.shape[-1:] and weight.is_contiguous()
    if rows is None or weight.dtype not in DTYPE_CODES or not fits:
        return NotImplemented
    count, group, group_stride, row_stride = rows
    out = replay.empty(x.shape, x.dtype)
    packed = _pack_rms_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), count, group, x.shape[-1], group_stride,
        row_stride, DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype], eps, offset,
        device.num_cpu_threads(),
    )  # fmt: skip
    _load_kernel("rms_norm")(packed, (x, weight, out))
    return out


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    """`elementwise.ops.apply_rope`."""
    is_float32 = cos.dtype == sin.dtype == torch.float32
    if not is_float32 or not cos.is_contiguous() or not sin.is_contiguous():
        return NotImplemented
    if x.dim() != 3 or x.dtype not in DTYPE_CODES or x.stride(-1) != 1:
        return NotImplemented
    pairs = cos.shape[-1]
    if cos.numel() != x.shape[0] * pairs or sin.shape != cos.shape or 2 * pairs > x.shape[-1]:
        return NotImplemented
    out = replay.empty(x.shape, x.dtype)
    packed = _pack_rope(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape, pairs,
        *x.stride()[:2], interleaved, DTYPE_CODES[x.dtype], device.num_cpu_threads(),
    )  # fmt: skip
    _load_kernel("apply_rope")(packed, (x, cos, sin, out))
    return out


def elementwise_binary(x: Tensor, y: Tensor, operation: str, scale: float = 1.0) -> Any:
    """x + scale * y ("add"), or activation(x) * y; x may have one number a row."""
    x_rows, y_rows = _rows(x), _rows(y)
    is_factor = x.shape != y.shape and x.shape == (*y.shape[:-1], 1)
    if x_rows is None or y_rows is None or x.dtype != y.dtype:
        return NotImplemented
    if x.shape != y.shape and not is_factor:
        return NotImplemented
    out = replay.empty(y.shape, x.dtype)
    packed = _pack_binary(
        x.data_ptr(), y.data_ptr(), out.data_ptr(), y_rows[0], y.shape[-1], x_rows[1], y_rows[1],
        DTYPE_CODES[x.dtype], BINARY_OP_CODES[operation], device.num_cpu_threads(), scale, is_factor,
    )  # fmt: skip
    _load_kernel("elementwise_binary")(packed, (x, y, out))
    return out


def _rows(x: Tensor) -> tuple[int, int] | None:
    """Number of rows and their stride; None where x has no single row stride."""
    if x.dtype not in DTYPE_CODES or x.dim() == 0 or native.find_compiler() is None:
        return None
    if x.is_contiguous():
        return (x.numel() // x.shape[-1] if x.shape[-1] else 0), x.shape[-1]
    if x.dim() == 2 and x.stride(-1) == 1:
        return x.shape[0], x.stride(0)
    return None


def _grouped_rows(x: Tensor) -> tuple[int, int, int, int] | None:
    """Number of rows, rows per group, strides of groups and rows: the heads of tokens."""
    rows = _rows(x)
    if rows is not None:
        return rows[0], 1, rows[1], 0
    if x.dim() != 3 or x.stride(-1) != 1 or x.dtype not in DTYPE_CODES:
        return None
    if native.find_compiler() is None:
        return None
    return x.shape[0] * x.shape[1], max(x.shape[1], 1), x.stride(0), x.stride(1)
