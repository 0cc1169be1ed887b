"""F16 and BF16: torch's 16-bit floats, in the table so that every weight has a format.

In: a float tensor. Out: the same shape in float16 or bfloat16; no scales.

Rounding: nearest even. Overflow becomes an infinity, and infinities stay (these formats have them,
and GGUF stores them so). NaN stays NaN; subnormals are preserved.
"""

from __future__ import annotations

from torch import Tensor

from fulgurite.quant.codecs.blocks import Codes, PackedData
from fulgurite.quant.format import Format


def quantize(x: Tensor, format: Format) -> Codes:
    """Cast to the dtype of the format."""
    return Codes(x.float().to(format.data_dtype), {})


def dequantize(codes: Codes, format: Format) -> Tensor:
    """Cast to float32, which is exact."""
    return codes.codes.float()


def pack(codes: Codes, format: Format) -> PackedData:
    """The codes are already packed."""
    return PackedData(codes.codes, {})


def unpack(packed: PackedData, format: Format) -> Codes:
    """The codes need no unpacking."""
    return Codes(packed.data, {})
