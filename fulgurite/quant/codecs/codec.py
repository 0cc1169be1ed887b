"""Codecs by format: the four functions that implement each format family.

In: tensors and a format. Out: `quantize_to_codes` (float -> codes and scales), `dequantize_codes`
(back to float32), `pack` (codes -> storage) and `unpack`. Quantizing is
`pack(quantize_to_codes(x))`; dequantizing is `dequantize_codes(unpack(packed))`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant.codecs import cast, codebook, fp8, gguf, integer, mx, nvfp4
from fulgurite.quant.codecs.blocks import Codes, PackedData
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape


@dataclass(frozen=True)
class Codec:
    """The functions of a family. `static_scales` names the scales that a caller may pass."""

    quantize: Callable[..., Codes]
    dequantize: Callable[[Codes, Format], Tensor]
    pack: Callable[[Codes, Format], PackedData]
    unpack: Callable[[PackedData, Format], Codes]
    static_scales: tuple[str, ...] = ()


CODECS: dict[str, Codec] = {
    "fp8": Codec(fp8.quantize, fp8.dequantize, fp8.pack, fp8.unpack, static_scales=("scale",)),
    "nvfp4": Codec(
        nvfp4.quantize, nvfp4.dequantize, nvfp4.pack, nvfp4.unpack, static_scales=("tensor_scale",)
    ),
    "mx": Codec(mx.quantize, mx.dequantize, mx.pack, mx.unpack),
    "int": Codec(
        integer.quantize, integer.dequantize, integer.pack, integer.unpack, static_scales=("scale",)
    ),
    "codebook": Codec(
        codebook.quantize,
        codebook.dequantize,
        codebook.pack,
        codebook.unpack,
        static_scales=("scale",),
    ),
    "gguf": Codec(gguf.quantize, gguf.dequantize, gguf.pack, gguf.unpack),
    "cast": Codec(cast.quantize, cast.dequantize, cast.pack, cast.unpack),
}


def quantize_to_codes(x: Tensor, format: Format, **static_scales: Tensor | float) -> Codes:
    """Quantize to codes and scales; `static_scales` are calibrated scales by name."""
    if not x.is_floating_point():
        raise FormatError(
            f"only floating-point tensors can be quantized, and this one is {x.dtype}",
            where=f"tensor of shape {list(x.shape)}",
            next="convert it with .float(), or skip it",
        )
    check_shape(format, x.shape)
    codec = CODECS[format.family]
    asymmetric = any(scale.name in ("zero_point", "minimum") for scale in format.scales)
    unknown = [name for name in static_scales if name not in codec.static_scales or asymmetric]
    if unknown:
        allowed = (
            ", ".join(codec.static_scales) if codec.static_scales and not asymmetric else "none"
        )
        raise FormatError(
            f"{format.name} has no static scale {', '.join(unknown)}",
            next=f"static scales of this format: {allowed}",
        )
    return codec.quantize(x.detach(), format, **static_scales)


def dequantize_codes(codes: Codes, format: Format) -> Tensor:
    """Dequantize codes and scales to float32."""
    return CODECS[format.family].dequantize(codes, format)


def pack(codes: Codes, format: Format) -> PackedData:
    """Pack codes into their storage layout."""
    return CODECS[format.family].pack(codes, format)


def unpack(packed: PackedData, format: Format) -> Codes:
    """The inverse of `pack`, bit for bit."""
    return CODECS[format.family].unpack(packed, format)
