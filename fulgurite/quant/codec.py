"""From a format to the four functions that implement it.

In: tensors and a format. Out: `encode` (float to codes and scales), `decode` (back to float32),
`pack` (codes to storage) and `unpack`: quantizing is `pack(encode(x))`, dequantizing
`decode(unpack(packed))`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import casts, fp8, gguf, ints, mx, nvfp4
from fulgurite.quant.blocks import Codes, Packed
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape


@dataclass(frozen=True)
class Codec:
    """A family's functions. `given` names the scales a caller may bring to `encode`."""

    encode: Callable[..., Codes]
    decode: Callable[[Codes, Format], Tensor]
    pack: Callable[[Codes, Format], Packed]
    unpack: Callable[[Packed, Format], Codes]
    given: tuple[str, ...] = ()


CODECS: dict[str, Codec] = {
    "fp8": Codec(fp8.encode, fp8.decode, fp8.pack, fp8.unpack, given=("scale",)),
    "nvfp4": Codec(nvfp4.encode, nvfp4.decode, nvfp4.pack, nvfp4.unpack, given=("tensor_scale",)),
    "mx": Codec(mx.encode, mx.decode, mx.pack, mx.unpack),
    "int": Codec(ints.encode, ints.decode, ints.pack, ints.unpack, given=("scale",)),
    "gguf": Codec(gguf.encode, gguf.decode, gguf.pack, gguf.unpack),
    "cast": Codec(casts.encode, casts.decode, casts.pack, casts.unpack),
}


def encode(x: Tensor, format: Format, **given: Tensor | float) -> Codes:
    """One code an element, and scales; `given` are static scales by name."""
    if not x.is_floating_point():
        raise FormatError(
            f"only floating-point tensors are quantized, and this one is {x.dtype}",
            where=f"tensor of shape {list(x.shape)}",
            next="convert it with .float(), or leave it as it is",
        )
    check_shape(format, x.shape)
    codec = CODECS[format.family]
    asymmetric = any(scale.name in ("zero_point", "minimum") for scale in format.scales)
    unknown = [name for name in given if name not in codec.given or asymmetric]
    if unknown:
        allowed = ", ".join(codec.given) if codec.given and not asymmetric else "none"
        raise FormatError(
            f"{format.name} does not take {', '.join(unknown)} from the caller",
            next=f"scales that may be given: {allowed}",
        )
    return codec.encode(x.detach(), format, **given)


def decode(codes: Codes, format: Format) -> Tensor:
    """The float32 tensor that codes and scales stand for."""
    return CODECS[format.family].decode(codes, format)


def pack(codes: Codes, format: Format) -> Packed:
    """Codes as they are stored."""
    return CODECS[format.family].pack(codes, format)


def unpack(packed: Packed, format: Format) -> Codes:
    """The inverse of `pack`, bit for bit."""
    return CODECS[format.family].unpack(packed, format)
