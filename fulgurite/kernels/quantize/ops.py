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

from fulgurite.errors import FormatError
from fulgurite.kernels import registry
from fulgurite.op import op
from fulgurite.quant import WHOLE, QuantTensor, codec, resolve
from fulgurite.quant.blocks import amax_of, scale_for
from fulgurite.quant.format import Format, Scale
from fulgurite.quant.ints import whole_codes
from fulgurite.quant.minifloat import saturating_cast
from fulgurite.quant.shapes import check_shape, data_shape, scale_shape

# device type -> function of the operator's arguments; it may return NotImplemented
IMPLEMENTATIONS: dict[str, str] = {
    "cpu": "fulgurite.kernels.quantize.cpu:quantize",
    "cuda": "fulgurite.kernels.quantize.triton_quantize:quantize",
}


def quantize(
    x: Tensor, format: str | Format, static: Tensor | None = None, dtype: torch.dtype | None = None
) -> QuantTensor:
    """A float tensor in a format of the table, by the kernel of its device."""
    entry = resolve(format)
    check_input(x, entry)
    data, *scales = quantize_parts(x, entry.name, static)
    names = [scale.name for scale in entry.stored_scales]
    return QuantTensor(entry, data, dict(zip(names, scales, strict=True)), dtype or x.dtype)


def check_input(x: Tensor, format: Format) -> None:
    """Raises unless x can be cut into the format's blocks."""
    if not x.is_floating_point():
        raise FormatError(
            f"only floating-point tensors are quantized, and this one is {x.dtype}",
            where=f"tensor of shape {list(x.shape)}",
            next="convert it with .float(), or leave it as it is",
        )
    check_shape(format, x.shape)


@op("fulgurite::quantize")
def quantize_parts(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """Packed data and stored scales; `static` is the scale the caller brings."""
    data, *scales = registry.run(IMPLEMENTATIONS, x.device, reference, x, format, static)
    entry = resolve(format)
    if rows_dense(x, entry) and scales[0].stride() != (1, scales[0].shape[0]):
        scales = [empty_scale(x, entry, entry.scales[0]).copy_(scales[0])]
    return [data, *scales]


def rows_dense(x: Tensor, format: Format) -> bool:
    """Whether the scales of x lie with rows next to each other: on GPUs those of 1x128 blocks do, as
    matmuls read them."""
    blocks = format.family == "fp8" and format.block == (1, 128)
    return blocks and x.device.type == "cuda" and x.dim() == 2


def empty_scale(x: Tensor, format: Format, scale: Scale) -> Tensor:
    """Room for the scales of x."""
    shape = scale_shape(scale, x.shape)
    if rows_dense(x, format):
        return x.new_empty(shape[::-1], dtype=scale.dtype).t()
    return x.new_empty(shape, dtype=scale.dtype)


def reference(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """The oracle of `fulgurite.quant`."""
    entry = resolve(format)
    given: dict[str, Tensor | float] = {}
    if static is not None:
        given[static_name(entry)] = static
    packed = codec.pack(codec.encode(x, entry, **given), entry)
    return [packed.data, *(packed.scales[scale.name] for scale in entry.stored_scales)]


def static_name(format: Format) -> str:
    """The scale of a format that may be given."""
    names = codec.CODECS[format.family].given
    if not names or (len(format.scales) == 2 and format.family == "int"):
        raise FormatError(
            f"{format.name} takes no static scale",
            next="leave it out, or use a format with one: fp8_*, nvfp4, int8, int4_g*",
        )
    return names[0]


@quantize_parts.fake
def _(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    entry = resolve(format)
    check_shape(entry, x.shape)
    scales = [empty_scale(x, entry, scale) for scale in entry.stored_scales]
    return [x.new_empty(data_shape(entry, x.shape), dtype=entry.data_dtype), *scales]


@quantize_parts.pieces
def _(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """FP8 by rows or in blocks of one, and int8, of rows that lie as they are read."""
    entry = resolve(format)
    width = x.shape[-1] if entry.block[1] == WHOLE else entry.block[1]
    takes = entry.family == "fp8" or entry.name == "int8"
    if not takes or static is not None or entry.block[0] != 1 or x.dim() < 2:
        return NotImplemented
    if x.numel() == 0 or x.shape[-1] % width or x.stride(-1) != 1:
        return NotImplemented
    blocks = x.float().unflatten(-1, (x.shape[-1] // width, width))
    amax = amax_of(blocks, (-1,), keep_nan=not entry.element.has_nan)
    scale = scale_for(amax, entry.element.highest)
    steps = blocks / scale.unsqueeze(-1)
    if entry.family == "fp8":
        codes = saturating_cast(steps, entry.element, entry.data_dtype)
    else:
        codes = whole_codes(steps, entry)
    if rows_dense(x, entry):
        scale = scale.t().contiguous().t()
    return [codes.flatten(-2), scale]
