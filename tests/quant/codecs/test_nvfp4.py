"""NVFP4 against the definition in numpy scalars, and over all codes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.errors import FormatError
from fulgurite.quant import FORMATS, PackedData, QuantTensor, dequantize_codes, quantize, unpack
from fulgurite.quant.codecs.minifloat import E2M1_VALUES

FORMAT = FORMATS["nvfp4"]
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate_float = st.floats(-100, 100, width=32)


def to_e4m3(x: np.floating) -> torch.Tensor:
    return torch.tensor(min(float(x), 448.0), dtype=torch.float32).to(torch.float8_e4m3fn)


def reference(x: torch.Tensor) -> tuple[list[list[int]], list[list[float]], float]:
    """Codes, block scales and the tensor scale of a matrix, element by element."""
    values = x.numpy()
    amax = np.abs(values).max()
    tensor_scale = np.float32(1)
    if amax > 0:
        tensor_scale = max(amax / np.float32(2688), np.float32(2.0**-126))
    codes, scales = [], []
    for row in values:
        row_codes, row_scales = [], []
        for block in row.reshape(-1, 16):
            block_amax = np.abs(block).max()
            scale = np.float32(1)
            if block_amax > 0:
                block_scale = block_amax / np.float32(6) / tensor_scale
                scale = np.float32(to_e4m3(max(block_scale, np.float32(2.0**-9))).float().item())
            row_scales.append(float(scale))
            effective = scale * tensor_scale
            row_codes += [reference_e2m1(element / effective) for element in block]
        codes.append(row_codes)
        scales.append(row_scales)
    return codes, scales, float(tensor_scale)


def reference_e2m1(x: np.floating) -> int:
    """Nearest, ties to the even code, in float64."""
    distances = [abs(min(abs(float(x)), 6.0) - value) for value in E2M1_VALUES]
    nearest = [code for code in range(8) if distances[code] == min(distances)]
    best = next((code for code in nearest if code % 2 == 0), nearest[0])
    return best + 8 * bool(np.signbit(x))


def assert_matches(x: torch.Tensor) -> None:
    q = quantize(x, "nvfp4")
    codes, scales, tensor_scale = reference(x)
    assert q.scales["tensor_scale"].item() == tensor_scale
    assert q.scales["scale"].float().tolist() == scales
    assert q.unpack().codes.tolist() == codes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(any_float, min_size=32, max_size=32)
    | st.lists(moderate_float, min_size=32, max_size=32)
)
def test_arbitrary_finite_values(values):
    assert_matches(torch.tensor(values, dtype=torch.float32).reshape(1, 32))


def test_gaussian_matrices_with_varied_block_scales():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    assert_matches(x)
    assert_matches(x * torch.logspace(-8, 3, 8)[:, None])


def test_every_scale_with_every_code():
    """All 254 finite e4m3 scales times all 16 codes, in exact arithmetic."""
    all_codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = all_codes[all_codes.float().isfinite()]
    assert scales.numel() == 254
    data = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    tensor_scale = torch.tensor([[0.37]])
    packed = PackedData(
        data.repeat(254, 1), {"scale": scales[:, None], "tensor_scale": tensor_scale}
    )
    values = dequantize_codes(unpack(packed, FORMAT), FORMAT)
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64)
    exact = scales.double()[:, None] * table * tensor_scale.double()
    assert torch.equal(values, exact.float())


def test_low_nibble_comes_first():
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([6.0, -3.0, 0.5])
    q = quantize(x, "nvfp4", tensor_scale=1.0)
    assert q.scales["scale"].float().tolist() == [[1.0]]
    assert q.packed[0, :2].tolist() == [0x7 | (0xD << 4), 0x1]


def test_block_far_below_the_tensor_amax():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, 2.0**-9
    q = quantize(x, "nvfp4")
    assert q.scales["scale"].float().tolist() == [[448.0, 2.0**-9]]
    assert q.dequantize()[0, 16].item() == 2.0**-9
    x[0, 16] = 2.0**-9 * 0.2
    assert quantize(x, "nvfp4").dequantize()[0, 16].item() == 0.0


def test_zero_block_has_scale_one():
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    assert quantize(x, "nvfp4").scales["scale"].float()[0, 1].item() == 1.0


def test_static_tensor_scale_saturates_larger_blocks():
    x = torch.full((1, 16), 100.0)
    q = quantize(x, "nvfp4", tensor_scale=0.01)
    assert q.scales["scale"].float().item() == 448.0
    assert q.dequantize().unique().item() == pytest.approx(448 * 6 * 0.01)


def test_one_tensor_scale_per_expert():
    x = torch.ones(3, 2, 16) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    q = quantize(x, "nvfp4")
    assert q.scales["tensor_scale"].flatten().tolist() == pytest.approx(
        [1 / 2688, 10 / 2688, 100 / 2688]
    )
    assert torch.allclose(q.dequantize(), x, rtol=1e-6)


def test_mismatched_scales_are_rejected():
    q = quantize(torch.ones(4, 32), "nvfp4")
    with pytest.raises(FormatError, match=r"scale must be float8_e4m3fn\[4, 2\], not"):
        QuantTensor("nvfp4", q.packed, {**q.scales, "scale": q.scales["scale"].t().contiguous()})
    with pytest.raises(FormatError, match="needs the scales"):
        QuantTensor("nvfp4", q.packed, {"scale": q.scales["scale"]})
    with pytest.raises(FormatError, match="data must be uint8"):
        QuantTensor("nvfp4", q.packed.view(torch.int8), q.scales)
