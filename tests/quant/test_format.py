"""The format table against torch.finfo, and the errors about shapes and devices."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import (
    ALIASES,
    FORMATS,
    WHOLE_DIM,
    describe_formats,
    get_device_features,
    is_native,
    pack,
    quantize,
    quantize_to_codes,
    require_native,
    resolve_format,
)
from fulgurite.quant.codecs.codec import CODECS
from fulgurite.quant.shapes import check_shape, data_shape, logical_shape, scale_shape

EXPECTED_FORMATS = [
    "fp8_e4m3_tensor",
    "fp8_e4m3_row",
    "fp8_e4m3_1x128",
    "fp8_e4m3_128x128",
    "fp8_e5m2_tensor",
    "fp8_e5m2_row",
    "fp8_e5m2_1x128",
    "fp8_e5m2_128x128",
    "nvfp4",
    "mxfp4",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "int8",
    "int8_g16",
    "int8_g32",
    "int8_asym",
    "int8_g16_asym",
    "int8_g32_asym",
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_g32_asym",
    "int4_g64_asym",
    "int4_g128_asym",
    "int4_g32_min",
    "nf4",
    "fp4",
    "q4_0",
    "q4_1",
    "q8_0",
    "q4_k",
    "q6_k",
    "f16",
    "bf16",
]


def test_the_table_holds_every_format_once():
    assert list(FORMATS) == EXPECTED_FORMATS
    assert all(entry.name == name for name, entry in FORMATS.items())
    assert {entry.family for entry in FORMATS.values()} == set(CODECS)
    assert set(ALIASES.values()) <= set(FORMATS)


@pytest.mark.parametrize("name", ["fp8_e4m3_row", "fp8_e5m2_row", "f16", "bf16"])
def test_element_ranges_match_torch_finfo(name):
    element, info = FORMATS[name].element, torch.finfo(FORMATS[name].data_dtype)
    assert (element.min_value, element.max_value) == (info.min, info.max)
    assert element.smallest_normal == info.smallest_normal
    codes = torch.tensor([1], dtype=torch.uint8 if element.bits == 8 else torch.int16)
    assert codes.view(FORMATS[name].data_dtype).double().item() == element.smallest_subnormal


def test_bits_per_element():
    expected = {"nvfp4": 4.5, "mxfp4": 4.25, "mxfp8_e4m3": 8.25, "int4_g128": 4.25, "q4_0": 4.5,
                 "q4_1": 5.0, "q8_0": 8.5, "q4_k": 4.5, "q6_k": 6.5625, "bf16": 16.0}  # fmt: skip
    assert {name: FORMATS[name].bits_per_element for name in expected} == expected


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(256,), (5, 512), (3, 4, 256), (2, 3, 2, 256)])
def test_data_and_scale_shapes_match_quantized_tensors(name, shape):
    format = FORMATS[name]
    packed = pack(quantize_to_codes(torch.ones(shape), format), format)
    assert tuple(packed.data.shape) == data_shape(format, shape)
    assert logical_shape(format, packed.data.shape) == shape
    assert packed.data.dtype == format.data_dtype
    assert list(packed.scales) == [scale.name for scale in format.separate_scales]
    for scale in format.separate_scales:
        values = packed.scales[scale.name]
        assert tuple(values.shape) == scale_shape(scale, shape)
        assert values.dtype == scale.dtype


def test_scale_shapes():
    blocks_128x128 = FORMATS["fp8_e4m3_128x128"].scales[0]
    assert scale_shape(blocks_128x128, (576, 7168)) == (5, 56)
    assert scale_shape(blocks_128x128, (8, 130, 100)) == (8, 2, 1)
    assert scale_shape(FORMATS["fp8_e4m3_tensor"].scales[0], (8, 130, 100)) == (8, 1, 1)
    assert scale_shape(FORMATS["int8"].scales[0], (8, 130, 100)) == (8, 130, 1)
    assert scale_shape(FORMATS["nvfp4"].scales[0], (64,)) == (4,)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.block[1] > 1])
def test_k_not_divisible_by_the_block(name):
    format = FORMATS[name]
    width = format.block[1]
    if format.allows_partial_blocks:
        check_shape(format, (4, width + 1))
        return
    with pytest.raises(FormatError) as caught:
        quantize(torch.ones(4, 2 * width + 2), name)
    text = str(caught.value)
    assert f"K={2 * width + 2}" in text
    assert f"[4, {2 * width + 2}]" in text
    assert f"zero-pad K to {3 * width}" in text


def test_formats_without_blocks_along_k_take_any_k():
    for name, format in FORMATS.items():
        if format.block[1] in (WHOLE_DIM, 1):
            assert quantize(torch.ones(3, 7), name).shape == (3, 7)


def test_scalars_and_integers_are_rejected():
    with pytest.raises(FormatError, match="at least one dimension"):
        quantize(torch.tensor(1.0), "int8")
    with pytest.raises(FormatError, match="only floating-point"):
        quantize(torch.ones(2, 32, dtype=torch.int32), "int8")


def test_resolve_format():
    assert resolve_format("FP8") is FORMATS["fp8_e4m3_row"]
    assert resolve_format("Q4_K") is FORMATS["q4_k"]
    assert resolve_format(FORMATS["nvfp4"]) is FORMATS["nvfp4"]
    with pytest.raises(FormatError, match="'nvpf4'") as caught:
        resolve_format("nvpf4")
    assert "one of nvfp4" in str(caught.value)


def test_describe_formats():
    lines = describe_formats().splitlines()
    assert [line.split()[0] for line in lines] == ["format", *FORMATS]
    assert max(map(len, lines)) <= 110


def test_native_formats():
    assert is_native("nvfp4", ["sm_100"])
    assert not is_native("nvfp4", ["sm_90"])
    assert is_native("fp8", ["sm_90"])
    assert is_native("int8", ["avx512_vnni"])
    require_native("mxfp8", ["sm_120"])
    with pytest.raises(FormatError, match="sm_90 has no native matmul for nvfp4") as caught:
        require_native("nvfp4", ["sm_90"])
    assert "native on sm_100" in str(caught.value)
    assert "weight-only" in str(caught.value)
    assert "fp8_e4m3_row" in str(caught.value)
    with pytest.raises(FormatError, match="no native matmul for q4_0"):
        require_native("q4_0", get_device_features("cpu"))


def test_device_features_are_known_archs():
    known = {name for format in FORMATS.values() for name in format.native_archs}
    assert set(get_device_features("cpu")) <= known
    assert get_device_features("meta") == ()
