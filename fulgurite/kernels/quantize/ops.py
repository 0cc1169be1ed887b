"""`quantize`: a float tensor in, packed data and scales out, in one pass where a kernel does it.

    amax of each block -> scale -> code -> packed       (the rules are those of `fulgurite.quant`)

The operator `fulgurite::quantize` returns the packed data and every scale that is stored
separately, in the order of `Format.separate_scales`. The function `quantize` builds a `QuantTensor`
of them. A static (calibrated) scale replaces the one computed from the data: `scale` of fp8 and int
formats, `tensor_scale` of NVFP4.

Casts with a scale a row or a block of columns have a decomposition: in a compiled function, generated
kernels fuse them with the norm or the activation before them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.kernels import registry
from fulgurite.kernels.quantize import cpu, reference, triton_quantize
from fulgurite.kernels.quantize.decompositions import decompose_quantize
from fulgurite.kernels.quantize.scale_layout import empty_scale, has_column_major_scales
from fulgurite.op import op
from fulgurite.quant import QuantTensor, resolve_format
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape, data_shape

# device type -> kernel with the operator's arguments; it may return NotImplemented
QUANTIZE_KERNELS = {"cpu": cpu.quantize, "cuda": triton_quantize.quantize}


def quantize(
    x: Tensor, format: str | Format, static: Tensor | None = None, dtype: torch.dtype | None = None
) -> QuantTensor:
    """A float tensor in a format of `FORMATS`, by the kernel of its device."""
    entry = resolve_format(format)
    check_input(x, entry)
    data, *scales = quantize_op(x, entry.name, static)
    names = [scale.name for scale in entry.separate_scales]
    return QuantTensor(entry, data, dict(zip(names, scales, strict=True)), dtype or x.dtype)


def check_input(x: Tensor, format: Format) -> None:
    """Raise unless x can be divided into the format's blocks."""
    if not x.is_floating_point():
        raise FormatError(
            f"only floating-point tensors can be quantized, and this one is {x.dtype}",
            where=f"tensor of shape {list(x.shape)}",
            next="convert it with .float(), or leave it as it is",
        )
    check_shape(format, x.shape)


@op("fulgurite::quantize")
def quantize_op(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """Packed data and its separate scales; `static` is a scale that the caller computed."""
    data, *scales = registry.dispatch(
        QUANTIZE_KERNELS, x.device, reference.quantize, x, format, static
    )
    entry = resolve_format(format)
    if has_column_major_scales(x, entry) and scales[0].stride() != (1, scales[0].shape[0]):
        scales = [empty_scale(x, entry, entry.scales[0]).copy_(scales[0])]
    return [data, *scales]


@quantize_op.fake
def _(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    entry = resolve_format(format)
    check_shape(entry, x.shape)
    scales = [empty_scale(x, entry, scale) for scale in entry.separate_scales]
    return [x.new_empty(data_shape(entry, x.shape), dtype=entry.data_dtype), *scales]


@quantize_op.decomposition
def _(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """Dynamic scales only: the operator checks a static one."""
    return NotImplemented if static is not None else decompose_quantize(x, resolve_format(format))
