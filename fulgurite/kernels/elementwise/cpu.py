"""The glue of a layer in C++: one native call each, which a recorded step runs without Python.

In: tensors on the CPU in float32, bfloat16 or float16 whose rows are contiguous. Out: new tensors, or
`NotImplemented` for anything else.
"""

from __future__ import annotations

import functools
import struct
from typing import Any

import torch
from torch import Tensor

from fulgurite import device, native, replay
from fulgurite.kernels.common.cpu_library import translation_unit

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
COMBINATIONS = {"add": 0, "silu": 1, "gelu": 2, "gelu_pytorch_tanh": 3}
_pack_norm = struct.Struct("10q2dq").pack
_pack_rotate = struct.Struct("13q").pack
_pack_combine = struct.Struct("10q").pack


@functools.cache
def _kernel(name: str) -> replay.Kernel:
    return replay.Kernel(native.load(translation_unit("vectors.h", "glue.h")), name)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Any:
    rows = _grouped_rows(x)
    fits = weight.shape == x.shape[-1:] and weight.is_contiguous()
    if rows is None or weight.dtype not in KINDS or not fits:
        return NotImplemented
    count, inner, outer_step, step = rows
    out = torch.empty(x.shape, dtype=x.dtype)
    packed = _pack_norm(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), count, inner, x.shape[-1], outer_step, step,
        KINDS[x.dtype], KINDS[weight.dtype], eps, offset, device.cpu_threads(),
    )  # fmt: skip
    _kernel("rms_norm")(packed, (x, weight, out))
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Any:
    plain = cos.is_contiguous() and sin.is_contiguous() and cos.dtype == sin.dtype == torch.float32
    if x.dim() != 3 or x.dtype not in KINDS or x.stride(-1) != 1 or not plain:
        return NotImplemented
    pairs = cos.shape[-1]
    if cos.numel() != x.shape[0] * pairs or sin.shape != cos.shape or 2 * pairs > x.shape[-1]:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype)
    packed = _pack_rotate(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr(), *x.shape, pairs,
        *x.stride()[:2], interleaved, KINDS[x.dtype], device.cpu_threads(),
    )  # fmt: skip
    _kernel("rotate")(packed, (x, cos, sin, out))
    return out


def combine(x: Tensor, y: Tensor, how: str) -> Any:
    """x + y ("add"), or activation(x) * y."""
    first, second = _rows(x), _rows(y)
    if first is None or second is None or x.shape != y.shape or x.dtype != y.dtype:
        return NotImplemented
    out = torch.empty(x.shape, dtype=x.dtype)
    packed = _pack_combine(
        x.data_ptr(), y.data_ptr(), out.data_ptr(), first[0], x.shape[-1], first[1], second[1],
        KINDS[x.dtype], COMBINATIONS[how], device.cpu_threads(),
    )  # fmt: skip
    _kernel("combine")(packed, (x, y, out))
    return out


def _rows(x: Tensor) -> tuple[int, int] | None:
    """How many rows x has and how far apart they are, if that is one number."""
    if x.dtype not in KINDS or x.dim() == 0 or native.compiler() is None:
        return None
    if x.is_contiguous():
        return (x.numel() // x.shape[-1] if x.shape[-1] else 0), x.shape[-1]
    if x.dim() == 2 and x.stride(-1) == 1:
        return x.shape[0], x.stride(0)
    return None


def _grouped_rows(x: Tensor) -> tuple[int, int, int, int] | None:
    """Rows, how many lie together, and how far apart groups and rows are: heads of tokens."""
    plain = _rows(x)
    if plain is not None:
        return plain[0], 1, plain[1], 0
    if x.dim() == 3 and x.stride(-1) == 1 and x.dtype in KINDS and native.compiler() is not None:
        return x.shape[0] * x.shape[1], max(x.shape[1], 1), x.stride(0), x.stride(1)
    return None
