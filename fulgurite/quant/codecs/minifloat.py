"""Rounding to 4-bit and 8-bit floats: values in, codes out, and back.

- e4m3, e5m2: torch's cast rounds to nearest even but turns overflow into NaN or infinity, so values
  are clamped first. NaN stays NaN. An infinity becomes the largest finite value of its sign (the
  saturating mode of the OCP 8-bit specification). Subnormals are rounded like other values; -0
  stays.
- e2m1 has the eight magnitudes of `E2M1_VALUES` and a sign bit (codes 8 to 15), no NaN and no
  infinity. It rounds to nearest even by code and saturates at 6. NaN becomes 0 (the block's scale
  carries the NaN).
- e8m0 is a power of two, 2^(code - 127). Code 255 is NaN; there is no zero and no sign.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fulgurite.quant.format import ElementType

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
E8M0_NAN = 255

# Midpoints between neighbours. A tie rounds to the neighbour with an even code: down or up.
_E2M1_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_E2M1_TIES_UP = (0.75, 1.75, 3.5)


def saturating_cast(x: Tensor, element: ElementType, dtype: torch.dtype) -> Tensor:
    """Cast float32 to an 8-bit float: nearest even, saturating, NaN preserved."""
    return x.clamp(element.min_value, element.max_value).to(dtype)


def quantize_e2m1(x: Tensor) -> Tensor:
    """Round float32 to e2m1 codes 0 to 15 as uint8: nearest even, saturating at 6."""
    magnitude = x.abs()
    code = (magnitude > _E2M1_TIES_DOWN[0]).to(torch.uint8)
    for tie in _E2M1_TIES_DOWN[1:]:
        code = code + (magnitude > tie)
    for tie in _E2M1_TIES_UP:
        code = code + (magnitude >= tie)
    sign = torch.signbit(x) & (magnitude >= 0)
    return code | (sign.to(torch.uint8) << 3)


def dequantize_e2m1(codes: Tensor) -> Tensor:
    """Convert e2m1 codes to float32."""
    table = torch.tensor(
        [*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float32, device=codes.device
    )
    return table[codes.int()]


def quantize_e8m0(exponent: Tensor) -> Tensor:
    """Convert integer exponents (as floats; -inf and NaN allowed) to e8m0, clamped to its range."""
    code = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    return code.nan_to_num(nan=E8M0_NAN).to(torch.uint8).view(torch.float8_e8m0fnu)


def dequantize_e8m0(scale: Tensor) -> Tensor:
    """Convert e8m0 to float32, exactly. Code 0 is the subnormal 2^-127."""
    codes = scale.view(torch.uint8)
    powers = [2.0 ** (code - E8M0_BIAS) for code in range(E8M0_NAN)]
    table = torch.tensor([*powers, float("nan")], dtype=torch.float32, device=scale.device)
    return table[codes.int()]


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2(x)) of positive float32, exact even for subnormals. -inf for 0, NaN for NaN."""
    exponent = torch.frexp(x).exponent.to(torch.float32) - 1.0
    return torch.where(x > 0, exponent, torch.where(x == 0, float("-inf"), float("nan")))
