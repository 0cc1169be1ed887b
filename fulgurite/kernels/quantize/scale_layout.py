"""Memory layout of the scales that `quantize` returns.

In: the tensor to quantize and its format. Out: an empty scale tensor. On GPUs, scales of 1x128
blocks are column-major, because GEMM kernels read them that way.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.quant.format import Format, ScaleSpec
from fulgurite.quant.shapes import scale_shape


def has_column_major_scales(x: Tensor, format: Format) -> bool:
    """Whether the scales of x are stored with rows contiguous."""
    is_blockwise = format.family == "fp8" and format.block == (1, 128)
    return is_blockwise and x.device.type == "cuda" and x.dim() == 2


def empty_scale(x: Tensor, format: Format, scale: ScaleSpec) -> Tensor:
    """Memory for one level of scales of x."""
    shape = scale_shape(scale, x.shape)
    if has_column_major_scales(x, format):
        return x.new_empty(shape[::-1], dtype=scale.dtype).t()
    return x.new_empty(shape, dtype=scale.dtype)
