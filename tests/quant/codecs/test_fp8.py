"""FP8 against scalar numpy arithmetic, block by block."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.quant import FORMATS, quantize

NAMES = [name for name, format in FORMATS.items() if format.family == "fp8"]
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)


def reference(x: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (as bytes) and scales, computed per block in float32 scalars."""
    format = FORMATS[name]
    rows = format.block[0] or x.shape[0]
    columns = format.block[1] or x.shape[1]
    row_blocks, column_blocks = -(-x.shape[0] // rows), -(-x.shape[1] // columns)
    scales = torch.empty(row_blocks, column_blocks)
    codes = torch.empty(x.shape, dtype=torch.uint8)
    for i in range(row_blocks):
        for j in range(column_blocks):
            block_slice = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
            block = x[block_slice].numpy()
            amax = np.abs(block).max()
            scale = np.float32(1)
            if amax > 0:
                scale = max(amax / np.float32(format.element.max_value), np.float32(2.0**-126))
            assert isinstance(scale, np.float32)
            scales[i, j] = float(scale)
            limit = np.float32(format.element.max_value)
            clipped = torch.from_numpy(np.clip(block / scale, -limit, limit))
            codes[block_slice] = clipped.to(format.data_dtype).view(torch.uint8)
    return codes, scales


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 130), (256, 256), (130, 300), (129, 128)])
def test_codes_and_scales_on_odd_shapes(name, shape):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(shape, generator=generator) * torch.logspace(-3, 3, shape[1])
    q = quantize(x, name)
    codes, scales = reference(x, name)
    assert torch.equal(q.packed.view(torch.uint8), codes)
    assert torch.equal(q.scales["scale"], scales)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(values=st.lists(any_float, min_size=6, max_size=6), name=st.sampled_from(NAMES))
def test_arbitrary_finite_values(values, name):
    x = torch.tensor(values, dtype=torch.float32).reshape(2, 3)
    q = quantize(x, name)
    codes, scales = reference(x, name)
    assert torch.equal(q.packed.view(torch.uint8), codes)
    assert torch.equal(q.scales["scale"], scales)
    # The nearest value is within half a spacing: 2^-4 or 2^-3 of the value, or half a subnormal.
    step = 2.0**-4 if "e4m3" in name else 2.0**-3
    element_scales = scales.expand(2, 3) if scales.shape != (2, 3) else scales
    allowed = torch.maximum(
        x.abs().double() * step, element_scales.double() * q.format.element.smallest_subnormal / 2
    )
    assert bool(((q.dequantize().double() - x.double()).abs() <= allowed * (1 + 1e-5)).all())


@pytest.mark.parametrize("name", NAMES)
def test_every_code_round_trips(name):
    """With amax equal to max_value the scale is exactly 1, and every code round-trips."""
    format = FORMATS[name]
    all_codes = torch.arange(256, dtype=torch.uint8).view(format.data_dtype)
    finite = all_codes[all_codes.float().isfinite()]
    x = finite.float().repeat(2)[None, : finite.numel() + 5]
    if format.block == (1, 128) or format.block == (128, 128):
        x = torch.cat([x[:, :120], torch.full((1, 8), format.element.max_value)], dim=1)
    q = quantize(x, name)
    assert q.scales["scale"].unique().tolist() == [1.0]
    assert torch.equal(q.packed.float(), x)
    assert torch.equal(torch.signbit(q.dequantize()), torch.signbit(x))


def test_dequantize_is_one_float32_product():
    q = quantize(torch.randn(4, 256, generator=torch.Generator().manual_seed(3)), "fp8_e4m3_1x128")
    codes, scales = q.packed.float().numpy(), q.scales["scale"].numpy()
    expected = codes * np.repeat(scales, 128, axis=1)
    assert expected.dtype == np.float32
    assert np.array_equal(q.dequantize().numpy(), expected)


def test_scales_are_never_subnormal():
    q = quantize(torch.full((1, 4), 1e-44), "fp8_e4m3_row")
    assert q.scales["scale"].item() == 2.0**-126
    q = quantize(torch.full((1, 4), 1e-36), "fp8_e4m3_row")
    assert q.dequantize()[0, 0].item() == pytest.approx(1e-36, rel=0.07)
