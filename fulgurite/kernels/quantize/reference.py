"""`quantize` in plain torch: the reference that kernels are tested against, bit for bit.

In: a float tensor, a format and, optionally, a static scale. Out: packed data and its stored
scales.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import resolve_format
from fulgurite.quant.codecs import codec
from fulgurite.quant.format import Format


def quantize(x: Tensor, format: str, static: Tensor | None = None) -> list[Tensor]:
    """`fulgurite::quantize` by the codecs of `fulgurite.quant`."""
    entry = resolve_format(format)
    given: dict[str, Tensor | float] = {}
    if static is not None:
        given[static_scale_name(entry)] = static
    packed = codec.pack(codec.quantize_to_codes(x, entry, **given), entry)
    return [packed.data, *(packed.scales[scale.name] for scale in entry.separate_scales)]


def static_scale_name(format: Format) -> str:
    """Which scale of a format may be static."""
    names = codec.CODECS[format.family].static_scales
    if not names or (len(format.scales) == 2 and format.family == "int"):
        raise FormatError(
            f"{format.name} takes no static scale",
            next="leave it out, or use a format with one: fp8_*, nvfp4, int8, int4_g*",
        )
    return names[0]
