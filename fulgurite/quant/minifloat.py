"""Rounding to floats of 4 and 8 bits: values in, codes out, and back.

- e4m3, e5m2: torch's own cast rounds to nearest even but turns overflow into NaN or infinity, so
  values saturate first. NaN stays NaN; an infinity becomes the largest finite value of its sign
  (the saturating mode of the OCP 8-bit specification); subnormals round like the rest; -0 stays.
- e2m1 has the eight magnitudes of `E2M1_VALUES` and a sign bit (code 8 to 15), no NaN and no
  infinity: nearest even by code, saturating at 6; NaN becomes 0 (the block's scale carries it).
- e8m0 is a power of two, 2^(code - 127), code 255 is NaN; there is no zero and no sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.format import Element

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E8M0_NAN = 255

# Midpoints between neighbours; a tie goes to the neighbour whose code is even.
_E2M1_TIES_STAY = (0.25, 1.25, 2.5, 5.0)
_E2M1_TIES_RISE = (0.75, 1.75, 3.5)


def saturating_cast(x: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """float32 to an 8-bit float, nearest even, ends saturating, NaN kept."""
    return x.clamp(element.lowest, element.highest).to(dtype)


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 to e2m1 codes 0 to 15 as uint8, nearest even, saturating at 6."""
    magnitude = x.abs()
    code = (magnitude > _E2M1_TIES_STAY[0]).to(torch.uint8)
    for tie in _E2M1_TIES_STAY[1:]:
        code += magnitude > tie
    for tie in _E2M1_TIES_RISE:
        code += magnitude >= tie
    sign = torch.signbit(x) & (magnitude >= 0)
    return code | (sign.to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """e2m1 codes to float32."""
    table = torch.tensor(
        [*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device=codes.device
    )
    return table[codes.int()]


def encode_e8m0(exponent: Tensor) -> Tensor:
    """Whole exponents (float; -inf and NaN allowed) to e8m0, clamped to its range."""
    code = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    return code.nan_to_num(nan=E8M0_NAN).to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_e8m0(scale: Tensor) -> Tensor:
    """e8m0 to float32, exact; code 0 is the subnormal 2^-127."""
    codes = scale.view(torch.uint8)
    powers = [2.0 ** (code - E8M0_BIAS) for code in range(E8M0_NAN)]
    table = torch.tensor([*powers, float("nan")], dtype=torch.float32, device=scale.device)
    return table[codes.int()]


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2(x)) of positive float32, exact for subnormals too; -inf of 0, NaN of NaN."""
    exponent = torch.frexp(x).exponent.to(torch.float32) - 1.0
    return torch.where(x > 0, exponent, torch.where(x == 0, float("-inf"), float("nan")))
