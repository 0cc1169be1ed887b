"""Properties of all formats: shapes, stacked experts, empty tensors, special values, packing."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import (
    FORMATS,
    PackedData,
    dequantize_codes,
    pack,
    quantize,
    quantize_to_codes,
    unpack,
)
from fulgurite.quant.shapes import data_shape, scale_shape

NAMES = list(FORMATS)
WITH_INFINITY = ("f16", "bf16")


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(a: PackedData, b: PackedData) -> None:
    assert torch.equal(bits(a.data), bits(b.data))
    assert a.data.shape == b.data.shape
    for name, scale in a.scales.items():
        assert torch.equal(bits(scale), bits(b.scales[name]))
        assert scale.shape == b.scales[name].shape


@pytest.mark.parametrize("name", NAMES)
def test_stacked_experts_match_single_matrices(name):
    format, x = FORMATS[name], gaussian(3, 5, 512)
    x[1] *= 100
    whole = quantize(x, name)
    for expert in range(3):
        single = pack(quantize_to_codes(x[expert], format), format)
        assert_same(whole[expert].packed_data, single)
    four_dims = quantize(x.reshape(3, 1, 5, 512), name)
    assert torch.equal(four_dims.dequantize().reshape(x.shape), whole.dequantize())


@pytest.mark.parametrize("name", NAMES)
def test_1d_tensor_is_one_row(name):
    x = gaussian(1, 512)
    assert torch.equal(quantize(x[0], name).dequantize(), quantize(x, name).dequantize()[0])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (0,), (0, 0), (2, 0, 256), (0, 3, 256)])
def test_empty_tensors(name, shape):
    q = quantize(torch.empty(shape), name)
    assert q.dequantize().shape == shape
    assert_same(q.packed_data, pack(unpack(q.packed_data, q.format), q.format))


@pytest.mark.parametrize("name", NAMES)
def test_input_strides_and_dtypes_do_not_matter(name):
    format, x = FORMATS[name], gaussian(256, 256).bfloat16()
    expected = pack(quantize_to_codes(x.float(), format), format)
    assert_same(pack(quantize_to_codes(x, format), format), expected)
    assert_same(pack(quantize_to_codes(x.t().contiguous().t(), format), format), expected)
    assert_same(pack(quantize_to_codes(x.double(), format), format), expected)


@pytest.mark.parametrize("name", NAMES)
def test_input_is_not_modified(name):
    x = gaussian(4, 512)
    x[0, 0], x[1, 1] = float("nan"), float("inf")
    before = x.clone()
    quantize(x, name)
    assert torch.equal(bits(x), bits(before))


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name):
    x = torch.zeros(4, 512)
    q = quantize(x, name)
    assert torch.equal(q.dequantize(), x)
    for scale in q.scales.values():
        assert bool(scale.float().isfinite().all())
    x[2, 300] = 1.0
    y = quantize(x, name).dequantize()
    assert y[2, 300] == pytest.approx(1.0, rel=0.07)  # 7 / 7.5 in int4
    assert int((y != 0).sum()) == 1


@pytest.mark.parametrize("name", NAMES)
def test_nan_stays_nan(name):
    format, x = FORMATS[name], gaussian(4, 1024)
    clean = quantize(x, name).dequantize()
    x[1, 700] = float("nan")
    y = quantize(x, name).dequantize()
    assert y[1, 700].isnan()
    columns = format.block[1]
    affected = torch.zeros_like(y, dtype=torch.bool)
    if format.element.has_nan:
        affected[1, 700] = True
    elif columns == 0:
        affected[1] = True
    else:
        affected[1, 700 // columns * columns : (700 // columns + 1) * columns] = True
    assert torch.equal(y.isnan(), affected)
    assert torch.equal(y[~affected], clean[~affected])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITH_INFINITY])
def test_infinity_saturates_without_affecting_its_neighbours(name):
    x = gaussian(4, 512)
    x[1, 300] = 0.0
    clean = quantize(x, name)
    x[1, 300] = float("inf")
    x[2, 300] = -float("inf")
    q = quantize(x, name)
    y = q.dequantize()
    assert bool(y.isfinite().all())
    width = min(scale.block[1] or 512 for scale in q.format.scales if scale.name != "tensor_scale")
    block = slice(300 // width * width, (300 // width + 1) * width)
    assert y[1, 300] == y[1, block].max()
    assert y[2, 300] == y[2, block].min()
    assert y[2, 300] < 0 < y[1, 300]
    neighbours = torch.ones(512, dtype=torch.bool)
    neighbours[300] = False
    assert torch.equal(y[1][neighbours], clean.dequantize()[1][neighbours])


@pytest.mark.covering
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("magnitude", [1e-44, 1e-38, 1e-30, 1e-6, 1.0, 1e4, 1e30, 3e38])
def test_all_magnitudes(name, magnitude):
    """Values stay finite and close. float32 scales cover 1e-30 to the largest float32; GGUF's are
    float16.
    """
    if name == "int4_g32_min" and magnitude > 2.0**126:
        return  # maximum - minimum overflows float32
    x = (gaussian(4, 512) / 0.2).clamp(-1, 1) * magnitude
    y = quantize(x, name).dequantize()
    family = FORMATS[name].family
    if family != "cast":
        assert bool(y.isfinite().all())
    smallest, largest = (1e-1, 1e4) if family in ("gguf", "cast") else (1e-30, 3e38)
    if smallest <= magnitude <= largest:
        large = x.abs() > 0.5 * magnitude
        assert large.sum() > 10
        ratio = y[large].double() / x[large].double()
        assert 0.74 < ratio.min() <= ratio.max() < 1.26


@pytest.mark.parametrize("name", NAMES)
def test_unpack_pack_round_trip_of_random_bytes(name):
    format, shape = FORMATS[name], (6, 1024)
    generator = torch.Generator().manual_seed(1)

    def random_bytes(size: tuple[int, ...], dtype: torch.dtype, high: int = 256) -> torch.Tensor:
        byte_shape = (*size[:-1], size[-1] * dtype.itemsize)
        return torch.randint(high, byte_shape, generator=generator, dtype=torch.uint8).view(dtype)

    scales = {
        scale.name: random_bytes(
            scale_shape(scale, shape), scale.dtype, 16 if scale.type == "uint4" else 256
        )
        for scale in format.separate_scales
    }
    packed = PackedData(random_bytes(data_shape(format, shape), format.data_dtype), scales)
    codes = unpack(packed, format)
    assert codes.codes.shape == shape
    assert set(codes.scales) == {scale.name for scale in format.scales}
    for scale in format.scales:
        assert tuple(codes.scales[scale.name].shape) == scale_shape(scale, shape)
    assert_same(pack(codes, format), packed)


@pytest.mark.parametrize("name", NAMES)
def test_quantize_is_quantize_to_codes_then_pack(name):
    format, x = FORMATS[name], gaussian(4, 512)
    codes = quantize_to_codes(x, format)
    assert codes.codes.shape == x.shape
    q = quantize(x, name)
    assert_same(q.packed_data, pack(codes, format))
    assert torch.equal(dequantize_codes(codes, format), q.dequantize(torch.float32))


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "q4_k", "int4_g32_asym", "bf16"])
def test_unknown_static_scales_are_rejected(name):
    with pytest.raises(FormatError, match=f"{name} has no static scale"):
        quantize(gaussian(2, 256), name, scale=1.0)


def test_static_scales():
    x = gaussian(4, 256)
    static = quantize(x, "fp8_e4m3_tensor", scale=0.25)
    assert torch.equal(static.dequantize(), (x / 0.25).to(torch.float8_e4m3fn).float() * 0.25)
    rows = torch.tensor([[0.1], [0.2], [0.3], [0.4]])
    q = quantize(x, "int8", scale=rows)
    assert torch.equal(q.packed, (x / rows).round().clamp(-127, 127).to(torch.int8))
    assert torch.equal(q.scales["scale"], rows)
    for bad in (0.0, float("nan"), float("inf"), -1.0):
        with pytest.raises(FormatError, match="must be positive and finite"):
            quantize(x, "fp8_e4m3_tensor", scale=bad)
    with pytest.raises(FormatError, match=r"expected \[4, 1\]"):
        quantize(x, "int8", scale=torch.ones(4))
