"""Quantization in plain torch: the definition that every kernel is compared with.

In: a float tensor and a format. Out: packed data and scale factors.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import resolve_format
from fulgurite.quant.codecs import codec
from fulgurite.quant.format import Format, ScaleSpec
from fulgurite.quant.shapes import check_shape, scale_shape


def check_input(x: Tensor, format: Format) -> None:
    """Raises unless x can be cut into the format's blocks."""
    if not x.is_floating_point():
        raise FormatError(
            f"only floating-point tensors are quantized, and this one is {x.dtype}",
            where=f"tensor of shape {list(x.shape)}",
            next="convert it with .float(), or leave it as it is",
        )
    check_shape(format, x.shape)


def has_column_major_scales(x: Tensor, format: Format) -> bool:
    """Whether the scales of x lie with rows next to each other: on GPUs those of 1x128 blocks do, as
    matmuls read them."""
    blocks = format.family == "fp8" and format.block == (1, 128)
    return blocks and x.device.type == "cuda" and x.dim() == 2


def empty_scale(x: Tensor, format: Format, scale: ScaleSpec) -> Tensor:
    """Room for the scales of x."""
    shape = scale_shape(scale, x.shape)
    if has_column_major_scales(x, format):
        return x.new_empty(shape[::-1], dtype=scale.dtype).t()
    return x.new_empty(shape, dtype=scale.dtype)


def reference(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """The oracle of `fulgurite.quant`."""
    entry = resolve_format(format)
    given: dict[str, Tensor | float] = {}
    if static is not None:
        given[static_scale_name(entry)] = static
    packed = codec.pack(codec.quantize_to_codes(x, entry, **given), entry)
    return [packed.data, *(packed.scales[scale.name] for scale in entry.separate_scales)]


def static_scale_name(format: Format) -> str:
    """The scale of a format that may be given."""
    names = codec.CODECS[format.family].static_scales
    if not names or (len(format.scales) == 2 and format.family == "int"):
        raise FormatError(
            f"{format.name} takes no static scale",
            next="leave it out, or use a format with one: fp8_*, nvfp4, int8, int4_g*",
        )
    return names[0]
