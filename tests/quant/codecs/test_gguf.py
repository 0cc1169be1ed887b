"""GGUF blocks against the gguf package: the bytes it quantizes to, the values it dequantizes to."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fulgurite.quant import (
    FORMATS,
    PackedData,
    QuantTensor,
    compute_sqnr,
    dequantize_codes,
    quantize,
    unpack,
)

gguf = pytest.importorskip("gguf", reason="the gguf package is what these compare with")
TYPES = {name: gguf.GGMLQuantizationType[name.upper()] for name in
         ("q4_0", "q4_1", "q8_0", "q4_k", "q6_k", "bf16", "f16")}  # fmt: skip
BLOCKS = ["q4_0", "q4_1", "q8_0", "q4_k", "q6_k"]
WITH_REFERENCE_QUANTIZER = ["q4_0", "q4_1", "q8_0"]
any_float = st.floats(width=32, allow_nan=False, allow_infinity=False)
moderate_float = st.floats(-300, 300, width=32)


def dequantize_reference(data: torch.Tensor, name: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(data.numpy(), TYPES[name])


def dequantize_ours(data: torch.Tensor, name: str) -> np.ndarray:
    return dequantize_codes(unpack(PackedData(data, {}), FORMATS[name]), FORMATS[name]).numpy()


def gaussian(*shape: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("name", BLOCKS)
def test_random_bytes_dequantize_alike(name):
    """Random bit patterns, including NaN and infinite scales."""
    size = FORMATS[name].items_per_pack
    generator = torch.Generator().manual_seed(1)
    data = torch.randint(256, (2000, 3 * size), generator=generator, dtype=torch.uint8)
    a, b = dequantize_ours(data, name), dequantize_reference(data, name)
    assert a.dtype == b.dtype == np.float32
    finite = np.isfinite(b)
    assert finite.mean() > 0.8
    assert np.array_equal(a[finite].view(np.uint32), b[finite].view(np.uint32))
    assert np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("name", WITH_REFERENCE_QUANTIZER)
def test_every_float16_scale(name):
    size = FORMATS[name].items_per_pack
    data = torch.zeros(65536, size, dtype=torch.uint8)
    data[:, :2] = torch.arange(65536, dtype=torch.int32).to(torch.int16)[:, None].view(torch.uint8)
    data[:, -16:] = torch.arange(0, 256, 16, dtype=torch.uint8) + torch.arange(
        16, dtype=torch.uint8
    ).flip(0)
    a, b = dequantize_ours(data, name), dequantize_reference(data, name)
    assert np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_byte_value_in_every_position(name):
    """Each byte position takes all 256 values while the others are fixed."""
    size = FORMATS[name].items_per_pack
    base = torch.randint(1, 50, (size,), generator=torch.Generator().manual_seed(2))
    data = base.to(torch.uint8).repeat(size, 256, 1)
    positions = torch.arange(size)
    data[positions, :, positions] = torch.arange(256, dtype=torch.uint8)
    data = data.reshape(size * 256, size)
    a, b = dequantize_ours(data, name), dequantize_reference(data, name)
    assert np.array_equal(a, b, equal_nan=True)


@pytest.mark.parametrize("name", WITH_REFERENCE_QUANTIZER)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
def test_quantized_bytes_match_the_reference(name, scale):
    x = gaussian(64, 1024, seed=3, scale=scale)
    x[3, 32:64] = 0.0
    x[4, :32] = 1.0
    x[5, ::2] = -x[5, 1::2]
    expected = gguf.quants.quantize(x.numpy(), TYPES[name])
    assert np.array_equal(quantize(x, name).packed.numpy(), expected)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    values=st.lists(moderate_float, min_size=32, max_size=32)
    | st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 7.5, -8.0]), min_size=32, max_size=32),
    name=st.sampled_from(WITH_REFERENCE_QUANTIZER),
)
def test_quantized_bytes_match_the_reference_for_arbitrary_values(values, name):
    x = torch.tensor([values], dtype=torch.float32)
    with np.errstate(all="ignore"):
        reciprocal_overflows = 0 < x.abs().max() < 1e-30
        expected = gguf.quants.quantize(x.numpy(), TYPES[name])
    if not reciprocal_overflows:
        assert np.array_equal(quantize(x, name).packed.numpy(), expected)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(values=st.lists(any_float, min_size=32, max_size=32), name=st.sampled_from(BLOCKS))
def test_arbitrary_values_stay_finite(values, name):
    shrinking = torch.logspace(0, -30, 8)[:, None]
    x = (torch.tensor([values], dtype=torch.float32) * shrinking).reshape(1, 256)
    q = quantize(x, name)
    assert bool(q.dequantize().isfinite().all())
    assert np.array_equal(dequantize_reference(q.packed, name), q.dequantize().numpy())


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_f16_and_bf16(name):
    x = gaussian(16, 256, seed=4, scale=10.0)
    x[0, :6] = torch.tensor([1e-40, -1e-7, 65519.0, 70000.0, float("inf"), -0.0])
    q = quantize(x, name)
    with np.errstate(all="ignore"):
        expected = gguf.quants.quantize(x.numpy(), TYPES[name])
    assert np.array_equal(q.packed.view(torch.uint8).numpy(), expected.view(np.uint8))
    all_codes = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    packed = QuantTensor(name, all_codes.view(FORMATS[name].data_dtype))
    expected_values = gguf.quants.dequantize(all_codes.view(torch.uint8).numpy(), TYPES[name])
    assert np.array_equal(packed.dequantize().numpy(), expected_values, equal_nan=True)


@pytest.mark.parametrize("name", BLOCKS)
def test_requantizing_loses_little(name):
    q = quantize(gaussian(32, 1024, seed=5), name)
    again = quantize(q.dequantize(), name)
    assert compute_sqnr(q.dequantize(), again) > (30 if name == "q4_k" else 35)


def naive_q4_k(x: torch.Tensor) -> np.ndarray:
    """Q4_K from the range of each sub-block, without a search."""
    sub = x.reshape(-1, 8, 32)
    low = sub.amin(-1).clamp_max(0)
    scale = (sub.amax(-1) - low) / 15
    d = (scale.amax(-1, keepdim=True) / 63).half().float()
    dmin = (-low.amin(-1, keepdim=True) / 63).half().float()
    s = d * (scale / d).round().clamp(0, 63)
    m = dmin * (-low / dmin.clamp_min(1e-30)).round().clamp(0, 63)
    codes = ((sub + m[..., None]) / s[..., None]).round().clamp(0, 15)
    return (codes * s[..., None] - m[..., None]).reshape(x.shape).numpy()


DISTRIBUTIONS = {
    "gaussian": gaussian(32, 2048, seed=6),
    "heavy tails": gaussian(32, 2048, seed=7) * gaussian(32, 2048, seed=8).abs().exp() * 5,
    "outliers": torch.where(torch.rand(32, 2048, generator=torch.Generator().manual_seed(9)) < 0.01,
                            gaussian(32, 2048, seed=10, scale=0.2), gaussian(32, 2048, seed=11)),
    "shifted": gaussian(32, 2048, seed=12) - 0.03,
}  # fmt: skip


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_q4_k_error_is_below_the_naive_quantizer(distribution):
    x = DISTRIBUTIONS[distribution]
    error = (quantize(x, "q4_k").dequantize() - x).square().mean().item()
    naive = (torch.from_numpy(naive_q4_k(x)) - x).square().mean().item()
    assert error < 0.92 * naive
    # The package has no Q4_K quantizer. Its Q4_1 uses half a bit more per element.
    q4_1 = dequantize_reference(
        torch.from_numpy(gguf.quants.quantize(x.numpy(), TYPES["q4_1"])), "q4_1"
    )
    assert error < 1.05 * float(np.square(q4_1 - x.numpy()).mean())


def test_q4_k_of_positive_weights():
    """The minimum can only be subtracted, so the best fit has a zero minimum."""
    x = gaussian(32, 2048, seed=12) + 0.2
    error = (quantize(x, "q4_k").dequantize() - x).square().mean().item()
    assert error < 0.92 * (torch.from_numpy(naive_q4_k(x)) - x).square().mean().item()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_q6_k_error_is_below_the_naive_quantizer(distribution):
    x = DISTRIBUTIONS[distribution]
    error = (quantize(x, "q6_k").dequantize() - x).square().mean().item()
    # The naive quantizer: 64 levels over amax, without a search.
    sub = x.reshape(-1, 16)
    step = sub.abs().amax(-1, keepdim=True) / 32
    naive = ((sub / step).round().clamp(-32, 31) * step - sub).square().mean().item()
    assert error < 0.92 * naive


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_k_quants_reproduce_representable_values(name):
    """Values that the format can represent are reproduced (nearly) exactly, as are zero blocks."""
    generator = torch.Generator().manual_seed(13)
    if name == "q6_k":
        codes = torch.randint(-32, 32, (8, 16, 16), generator=generator).float()
        codes[:, :, 0] = -32
        sub = torch.randint(1, 128, (8, 16, 1), generator=generator).float()
        sub[:, 0] = -128
        x = (codes * sub * 2.0**-10).reshape(8, 256)
    else:
        codes = torch.randint(0, 16, (8, 8, 32), generator=generator).float()
        codes[:, :, 0], codes[:, :, 1] = 0, 15
        sub = torch.randint(1, 64, (8, 8, 1), generator=generator).float()
        minimum = torch.randint(1, 64, (8, 8, 1), generator=generator).float()
        sub[:, 0], minimum[:, 0] = 63, 63
        x = (codes * sub * 2.0**-10 - minimum * 2.0**-9).reshape(8, 256)
    assert compute_sqnr(x, quantize(x, name)) > 60
    zeros = quantize(torch.zeros(2, 256), name)
    assert bool((zeros.dequantize() == 0).all())


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_k_quants_do_not_depend_on_the_chunk_size(name, monkeypatch):
    x = gaussian(9, 1024, seed=14)
    whole = quantize(x, name)
    monkeypatch.setattr("fulgurite.quant.codecs.gguf_kquants.BLOCKS_PER_CHUNK", 7)
    assert torch.equal(quantize(x, name), whole)
