"""The table against torch's own facts, and the errors about shapes and devices."""

import pytest
import torch

from fulgurite.errors import FormatError
from fulgurite.quant import (
    ALIASES,
    FORMATS,
    WHOLE,
    describe_formats,
    encode,
    features_of,
    is_native,
    pack,
    quantize,
    require_native,
    resolve,
)
from fulgurite.quant.codec import CODECS
from fulgurite.quant.shapes import check_shape, data_shape, logical_shape, scale_shape

ASKED_FOR = [
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
    "int4_g32",
    "int4_g64",
    "int4_g128",
    "int4_g32_asym",
    "int4_g64_asym",
    "int4_g128_asym",
    "int4_g32_min",
    "q4_0",
    "q4_1",
    "q8_0",
    "q4_k",
    "q6_k",
    "f16",
    "bf16",
]


def test_the_table_holds_every_format_once():
    assert list(FORMATS) == ASKED_FOR
    assert all(entry.name == name for name, entry in FORMATS.items())
    assert {entry.family for entry in FORMATS.values()} == set(CODECS)
    assert set(ALIASES.values()) <= set(FORMATS)


@pytest.mark.parametrize("name", ["fp8_e4m3_row", "fp8_e5m2_row", "f16", "bf16"])
def test_ranges_are_torchs(name):
    element, facts = FORMATS[name].element, torch.finfo(FORMATS[name].data_dtype)
    assert (element.lowest, element.highest) == (facts.min, facts.max)
    assert element.smallest_normal == facts.smallest_normal
    codes = torch.tensor([1], dtype=torch.uint8 if element.bits == 8 else torch.int16)
    assert codes.view(FORMATS[name].data_dtype).double().item() == element.smallest_subnormal


def test_bits_an_element():
    published = {"nvfp4": 4.5, "mxfp4": 4.25, "mxfp8_e4m3": 8.25, "int4_g128": 4.25, "q4_0": 4.5,
                 "q4_1": 5.0, "q8_0": 8.5, "q4_k": 4.5, "q6_k": 6.5625, "bf16": 16.0}  # fmt: skip
    assert {name: FORMATS[name].bits_per_element for name in published} == published


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(256,), (5, 512), (3, 4, 256), (2, 3, 2, 256)])
def test_shapes_of_data_and_scales_are_what_quantizing_makes(name, shape):
    format = FORMATS[name]
    packed = pack(encode(torch.ones(shape), format), format)
    assert tuple(packed.data.shape) == data_shape(format, shape)
    assert logical_shape(format, packed.data.shape) == shape
    assert packed.data.dtype == format.data_dtype
    assert list(packed.scales) == [scale.name for scale in format.stored_scales]
    for scale in format.stored_scales:
        values = packed.scales[scale.name]
        assert tuple(values.shape) == scale_shape(scale, shape)
        assert values.dtype == scale.dtype


def test_scale_shapes_by_hand():
    tile = FORMATS["fp8_e4m3_128x128"].scales[0]
    assert scale_shape(tile, (576, 7168)) == (5, 56)
    assert scale_shape(tile, (8, 130, 100)) == (8, 2, 1)
    assert scale_shape(FORMATS["fp8_e4m3_tensor"].scales[0], (8, 130, 100)) == (8, 1, 1)
    assert scale_shape(FORMATS["int8"].scales[0], (8, 130, 100)) == (8, 130, 1)
    assert scale_shape(FORMATS["nvfp4"].scales[0], (64,)) == (4,)


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.block[1] > 1])
def test_a_block_that_does_not_divide(name):
    format = FORMATS[name]
    width = format.block[1]
    if format.may_end_early:
        check_shape(format, (4, width + 1))
        return
    with pytest.raises(FormatError) as caught:
        quantize(torch.ones(4, 2 * width + 2), name)
    text = str(caught.value)
    assert f"K = {2 * width + 2}" in text
    assert f"[4, {2 * width + 2}]" in text
    assert f"pad K to {3 * width}" in text


def test_formats_without_blocks_along_k_take_any_k():
    for name, format in FORMATS.items():
        if format.block[1] in (WHOLE, 1):
            assert quantize(torch.ones(3, 7), name).shape == (3, 7)


def test_single_numbers_and_integers_are_refused():
    with pytest.raises(FormatError, match="at least one dimension"):
        quantize(torch.tensor(1.0), "int8")
    with pytest.raises(FormatError, match="only floating-point"):
        quantize(torch.ones(2, 32, dtype=torch.int32), "int8")


def test_names():
    assert resolve("FP8") is FORMATS["fp8_e4m3_row"]
    assert resolve("Q4_K") is FORMATS["q4_k"]
    assert resolve(FORMATS["nvfp4"]) is FORMATS["nvfp4"]
    with pytest.raises(FormatError, match="'nvpf4'") as caught:
        resolve("nvpf4")
    assert "one of nvfp4" in str(caught.value)


def test_every_line_of_the_description_names_its_format():
    lines = describe_formats().splitlines()
    assert [line.split()[0] for line in lines] == ["format", *FORMATS]
    assert max(map(len, lines)) <= 110


def test_what_runs_natively():
    assert is_native("nvfp4", ["sm_100"])
    assert not is_native("nvfp4", ["sm_90"])
    assert is_native("fp8", ["sm_90"])
    assert is_native("int8", ["avx512_vnni"])
    require_native("mxfp8", ["sm_120"])
    with pytest.raises(FormatError, match="sm_90 can't multiply in nvfp4") as caught:
        require_native("nvfp4", ["sm_90"])
    assert "native on sm_100" in str(caught.value)
    assert "weight only" in str(caught.value)
    assert "fp8_e4m3_row" in str(caught.value)
    with pytest.raises(FormatError, match="can't multiply in q4_0"):
        require_native("q4_0", features_of("cpu"))


def test_features_of_a_cpu_are_names_of_the_table():
    known = {name for format in FORMATS.values() for name in format.native}
    assert set(features_of("cpu")) <= known
    assert features_of("meta") == ()
