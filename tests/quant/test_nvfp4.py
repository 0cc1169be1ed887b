"""NVFP4 against the published rule in numpy scalars, and against exhaustive codes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.errors import FormatError
from fulgurite.quant import FORMATS, Packed, QuantTensor, decode, quantize, unpack
from fulgurite.quant.minifloat import E2M1_VALUES

FORMAT = FORMATS["nvfp4"]
anything = st.floats(width=32, allow_nan=False, allow_infinity=False)
ordinary = st.floats(-100, 100, width=32)


def to_e4m3(x: np.floating) -> torch.Tensor:
    return torch.tensor(min(float(x), 448.0), dtype=torch.float32).to(torch.float8_e4m3fn)


def reference(x: torch.Tensor) -> tuple[list[list[int]], list[list[float]], float]:
    """Codes, block scales and the tensor scale of a matrix, one element after the other."""
    values = x.numpy()
    amax = np.abs(values).max()
    tensor_scale = np.float32(1)
    if amax > 0:
        tensor_scale = max(amax / np.float32(2688), np.float32(2.0**-126))
    codes, scales = [], []
    for row in values:
        row_codes, row_scales = [], []
        for block in row.reshape(-1, 16):
            largest = np.abs(block).max()
            scale = np.float32(1)
            if largest > 0:
                wanted = largest / np.float32(6) / tensor_scale
                scale = np.float32(to_e4m3(max(wanted, np.float32(2.0**-9))).float().item())
            row_scales.append(float(scale))
            effective = scale * tensor_scale
            row_codes += [e2m1(element / effective) for element in block]
        codes.append(row_codes)
        scales.append(row_scales)
    return codes, scales, float(tensor_scale)


def e2m1(x: np.floating) -> int:
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
    assert q.codes().codes.tolist() == codes


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(anything, min_size=32, max_size=32) | st.lists(ordinary, min_size=32, max_size=32))
def test_any_finite_numbers(values):
    assert_matches(torch.tensor(values, dtype=torch.float32).reshape(1, 32))


def test_a_gaussian_matrix_and_one_with_blocks_of_all_sizes():
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4))
    assert_matches(x)
    assert_matches(x * torch.logspace(-8, 3, 8)[:, None])


def test_every_scale_with_every_code():
    """All 254 finite e4m3 scales times all 16 codes, in exact arithmetic."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = every[every.float().isfinite()]
    assert scales.numel() == 254
    data = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    tensor_scale = torch.tensor([[0.37]])
    packed = Packed(data.repeat(254, 1), {"scale": scales[:, None], "tensor_scale": tensor_scale})
    values = decode(unpack(packed, FORMAT), FORMAT)
    table = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64)
    exact = scales.double()[:, None] * table * tensor_scale.double()
    assert torch.equal(values, exact.float())


def test_the_low_nibble_comes_first():
    x = torch.zeros(1, 16)
    x[0, :3] = torch.tensor([6.0, -3.0, 0.5])
    q = quantize(x, "nvfp4", tensor_scale=1.0)
    assert q.scales["scale"].float().tolist() == [[1.0]]
    assert q.packed[0, :2].tolist() == [0x7 | (0xD << 4), 0x1]


def test_a_block_far_below_the_tensors_largest_keeps_what_it_can():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 2688.0, 2.0**-9
    q = quantize(x, "nvfp4")
    assert q.scales["scale"].float().tolist() == [[448.0, 2.0**-9]]
    assert q.dequantize()[0, 16].item() == 2.0**-9
    x[0, 16] = 2.0**-9 * 0.2
    assert quantize(x, "nvfp4").dequantize()[0, 16].item() == 0.0


def test_a_block_of_zeros_has_scale_one():
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    assert quantize(x, "nvfp4").scales["scale"].float()[0, 1].item() == 1.0


def test_a_given_tensor_scale_saturates_blocks_beyond_it():
    x = torch.full((1, 16), 100.0)
    q = quantize(x, "nvfp4", tensor_scale=0.01)
    assert q.scales["scale"].float().item() == 448.0
    assert q.dequantize().unique().item() == pytest.approx(448 * 6 * 0.01)


def test_experts_have_a_tensor_scale_each():
    x = torch.ones(3, 2, 16) * torch.tensor([1.0, 10.0, 100.0])[:, None, None]
    q = quantize(x, "nvfp4")
    assert q.scales["tensor_scale"].flatten().tolist() == pytest.approx(
        [1 / 2688, 10 / 2688, 100 / 2688]
    )
    assert torch.allclose(q.dequantize(), x, rtol=1e-6)


def test_parts_that_do_not_belong_together():
    q = quantize(torch.ones(4, 32), "nvfp4")
    with pytest.raises(FormatError, match=r"scale must be float8_e4m3fn\[4, 2\], and is"):
        QuantTensor("nvfp4", q.packed, {**q.scales, "scale": q.scales["scale"].t().contiguous()})
    with pytest.raises(FormatError, match="has scales"):
        QuantTensor("nvfp4", q.packed, {"scale": q.scales["scale"]})
    with pytest.raises(FormatError, match="data is uint8"):
        QuantTensor("nvfp4", q.packed.view(torch.int8), q.scales)
