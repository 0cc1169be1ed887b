"""`quantize`: a float tensor in, packed data and scales out, in one pass where a kernel does it.

    amax over each block -> scale -> code -> packed           (the rules are those of `fulgurite.quant`)

The operator `fulgurite::quantize` returns the packed data and then every scale that is stored
beside it, in the order of `Format.stored_scales`. The function `quantize` makes a `QuantTensor` of
them. A static scale (calibrated) replaces the one made from the data: `scale` in fp8 and int
formats, `tensor_scale` in NVFP4.

In a compiled function the casts of whole rows and of 1x128 blocks have pieces: generated kernels compute
them together with the norm or the activation before them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.kernels import registry
from fulgurite.kernels.quantize import cpu, triton_quantize
from fulgurite.kernels.quantize.reference import (
    check_input,
    empty_scale,
    has_column_major_scales,
    reference,
)
from fulgurite.op import op
from fulgurite.quant import WHOLE_DIM, QuantTensor, resolve_format
from fulgurite.quant.codecs.blocks import amax_over_dims, compute_scale
from fulgurite.quant.codecs.integer import round_to_codes
from fulgurite.quant.codecs.minifloat import saturating_cast
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape, data_shape

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, registry.Kernel] = {
    "cpu": cpu.quantize,
    "cuda": triton_quantize.quantize,
}


def quantize(
    x: Tensor, format: str | Format, static: Tensor | None = None, dtype: torch.dtype | None = None
) -> QuantTensor:
    """A float tensor in a format of the table, by the kernel of its device."""
    entry = resolve_format(format)
    check_input(x, entry)
    data, *scales = quantize_op(x, entry.name, static)
    names = [scale.name for scale in entry.separate_scales]
    return QuantTensor(entry, data, dict(zip(names, scales, strict=True)), dtype or x.dtype)


@op("fulgurite::quantize")
def quantize_op(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """Packed data and stored scales; `static` is the scale the caller brings."""
    data, *scales = registry.dispatch(IMPLEMENTATIONS, x.device, reference, x, format, static)
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
    """FP8 by rows or in blocks of one, and int8, of rows that lie as they are read."""
    entry = resolve_format(format)
    width = x.shape[-1] if entry.block[1] == WHOLE_DIM else entry.block[1]
    takes = entry.family == "fp8" or entry.name == "int8"
    if not takes or static is not None or entry.block[0] != 1 or x.dim() < 2:
        return NotImplemented
    if x.numel() == 0 or x.shape[-1] % width or x.stride(-1) != 1:
        return NotImplemented
    blocks = x.float().unflatten(-1, (x.shape[-1] // width, width))
    amax = amax_over_dims(blocks, (-1,), keep_nan=not entry.element.has_nan)
    scale = compute_scale(amax, entry.element.max_value)
    steps = blocks / scale.unsqueeze(-1)
    if entry.family == "fp8":
        codes = saturating_cast(steps, entry.element, entry.data_dtype)
    else:
        codes = round_to_codes(steps, entry)
    if has_column_major_scales(x, entry):
        scale = scale.t().contiguous().t()
    return [codes.flatten(-2), scale]
