"""F16 and BF16: torch's own 16-bit floats, in the table so that every weight has a format.

In: a float tensor. Out: the same shape in float16 or bfloat16; no scales.

Rounding: nearest even. Overflow becomes an infinity and an infinity stays one (these formats have
it, and GGUF writes it so); NaN stays NaN; subnormals are kept.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.quant.blocks import Codes, Packed
from fulgurite.quant.format import Format


def encode(x: Tensor, format: Format) -> Codes:
    """A cast."""
    return Codes(x.float().to(format.data_dtype), {})


def decode(codes: Codes, format: Format) -> Tensor:
    """Exact in float32."""
    return codes.codes.float()


def pack(codes: Codes, format: Format) -> Packed:
    """Nothing to pack."""
    return Packed(codes.codes, {})


def unpack(packed: Packed, format: Format) -> Codes:
    """Nothing to unpack."""
    return Codes(packed.data, {})
