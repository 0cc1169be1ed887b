"""nf4 and fp4 of bitsandbytes: 4-bit indices into a codebook, one float32 scale per 64 columns.

    scale = amax        code = the entry of the codebook nearest to x / scale
    value = codebook[code] * scale

In: a float tensor; its K is a multiple of 64. Out: codes 0 to 15, packed two per byte, low nibble
first (bitsandbytes stores the first of a pair in the high one), and scales.

- nf4 has quantiles of the normal distribution, in ascending order. fp4 has a sign bit and eight
  magnitudes, which are not in ascending order: exponent bias 2, divided by 12.
- Rounding: nearest; a tie goes to the smaller code, as in bitsandbytes (within the rounding of its
  thresholds). Values saturate at -1 and 1.
- Zeros: a block of zeros has scale 1 and codes of value 0. The sign of -0 is lost.
- NaN makes the scale of its block NaN. An infinity saturates and does not count towards amax.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.codecs.blocks import (
    Codes,
    PackedData,
    block_amax,
    check_static_scale,
    compute_scale,
    expand_blocks,
    pack_nibbles,
    unpack_nibbles,
)
from fulgurite.quant.format import Format

FP4_MAGNITUDES = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
CODEBOOKS: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": (*FP4_MAGNITUDES, *(-value for value in FP4_MAGNITUDES)),
}  # fmt: skip


def quantize(x: Tensor, format: Format, scale: Tensor | float | None = None) -> Codes:
    """Quantize; `scale` may be static."""
    x = x.float()
    (spec,) = format.scales
    if scale is None:
        scale = compute_scale(block_amax(x, spec, keep_nan=True), 1.0)
    else:
        scale = check_static_scale(scale, spec, x)
    steps = (x / expand_blocks(scale, spec.block, x.shape)).nan_to_num(nan=0.0).contiguous()
    table = codebook_of(format, x.device)
    ascending, codes = table.sort(stable=True)
    middles = (ascending[1:] + ascending[:-1]) / 2
    return Codes(codes.to(torch.uint8)[torch.bucketize(steps, middles)], {"scale": scale})


def dequantize(codes: Codes, format: Format) -> Tensor:
    """Dequantize to float32."""
    values = codebook_of(format, codes.codes.device)[codes.codes.int()]
    return values * expand_blocks(codes.scales["scale"], format.block, values.shape)


def codebook_of(format: Format, device: torch.device) -> Tensor:
    """The sixteen values of a format, by code."""
    return torch.tensor(CODEBOOKS[format.element.name], dtype=torch.float32, device=device)


def pack(codes: Codes, format: Format) -> PackedData:
    """Two codes per byte along K, low nibble first."""
    return PackedData(pack_nibbles(codes.codes), codes.scales)


def unpack(packed: PackedData, format: Format) -> Codes:
    """The inverse of `pack`."""
    return Codes(unpack_nibbles(packed.data), packed.scales)
