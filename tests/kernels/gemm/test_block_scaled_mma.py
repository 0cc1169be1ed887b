"""Block-scaled MMAs (Blackwell): which products go to torch's library, and with which arguments.

No such GPU is needed: the capability is faked, and a stand-in for the library decodes the arguments
it gets from their published layout.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import ScalingType, SwizzleType

from fulgurite.kernels.gemm import reference, triton_scaled_mm
from fulgurite.quant import quantize, resolve_format
from fulgurite.quant.swizzle import unswizzle_scales

WIDTHS = {ScalingType.BlockWise1x16: 16, ScalingType.BlockWise1x32: 32}
E2M1_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def decode(data: torch.Tensor, scales, recipes, swizzles) -> torch.Tensor:
    """A matrix [rows, K] from what the library takes."""
    values = data.float() if data.dtype == torch.float8_e4m3fn else decode_e2m1(data)
    assert swizzles[0] is SwizzleType.SWIZZLE_32_4_4
    width = WIDTHS[recipes[0]]
    blocks = unswizzle_scales(scales[0], values.shape[0], values.shape[1] // width)
    values = values * blocks.float().repeat_interleave(width, 1)
    if len(scales) == 2:
        assert recipes[1] is ScalingType.TensorWise and swizzles[1] is SwizzleType.NO_SWIZZLE
        values = values * scales[1]
    return values


def decode_e2m1(data: torch.Tensor) -> torch.Tensor:
    assert data.dtype == torch.float4_e2m1fn_x2
    codes = data.view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    return E2M1_VALUES[nibbles & 7] * torch.where(nibbles >= 8, -1.0, 1.0)


@pytest.fixture
def calls(monkeypatch):
    """Calls of the library on a faked sm_100."""
    seen = []

    def library(a, b, left, left_recipes, right, right_recipes, swizzle_a, swizzle_b, **named):
        seen.append(left_recipes)
        assert b.stride(0) == 1, "the right operand is column-major"
        x, w = (
            decode(a, left, left_recipes, swizzle_a),
            decode(b.t(), right, right_recipes, swizzle_b),
        )
        return (x @ w.t()).to(named["output_dtype"])

    monkeypatch.setattr(triton_scaled_mm, "library_scaled_mm", library)
    monkeypatch.setattr(triton_scaled_mm, "_features", lambda device: ("sm_100",))
    return seen


def multiply(format: str, m: int, n: int, k: int, bias: torch.Tensor | None = None):
    torch.manual_seed(m + n + k)
    a, b = quantize(torch.randn(m, k), format), quantize(torch.randn(n, k), format)
    arguments = (
        a.packed, list(a.scales.values()), format, b.packed, list(b.scales.values()), format, bias,
        torch.bfloat16,
    )  # fmt: skip
    return triton_scaled_mm.scaled_mm(*arguments), reference.scaled_mm(*arguments)


@pytest.mark.parametrize("format", ["mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("shape", [(1, 16, 32), (130, 48, 256), (7, 16, 160)], ids=str)
def test_native_formats_go_to_the_library(calls, format, shape):
    bias = torch.randn(shape[1])
    actual, expected = multiply(format, *shape, bias)
    assert len(calls) == 1
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("format, shape", [("mxfp4", (4, 16, 64)), ("nvfp4", (4, 10, 64))])
def test_what_the_library_lacks_does_not(calls, format, shape):
    left = resolve_format(format)
    a, b = (quantize(torch.randn(rows, shape[2]), format).packed for rows in shape[:2])
    assert not triton_scaled_mm.has_block_scaled_mma(a, left, b, left)
    assert not calls


def test_hopper_has_no_block_scaled_mma(monkeypatch):
    monkeypatch.setattr(triton_scaled_mm, "_features", lambda device: ("sm_90",))
    left = resolve_format("nvfp4")
    a, b = (quantize(torch.randn(16, 64), "nvfp4").packed for _ in range(2))
    assert not triton_scaled_mm.has_block_scaled_mma(a, left, b, left)
