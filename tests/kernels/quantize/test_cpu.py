"""The C++ quantize kernels against the reference, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.kernels.quantize import cpu as kernels
from fulgurite.kernels.quantize.ops import quantize
from fulgurite.kernels.quantize.reference import quantize as reference
from fulgurite.quant import FORMATS, resolve_format
from fulgurite.quant.codecs import codec

# what GGUF blocks are repacked into, the K formats, whose scales are found by search, and formats
# that are only read from checkpoints
UNSUPPORTED = (
    *("int8_g16", "int8_g32", "int4_g32_min", "q4_k", "q6_k"),
    *("int8_asym", "int8_g16_asym", "int8_g32_asym", "nf4", "fp4"),
)
NAMES = [
    name for name, format in FORMATS.items() if format.family != "cast" and name not in UNSUPPORTED
]
ANY_WIDTH = [
    name for name in NAMES if FORMATS[name].allows_partial_blocks or FORMATS[name].block[1] == 0
]
SHAPES = [
    (1, 128),
    (3, 256),
    (7, 384),
    (130, 128),
    (257, 128),
    (2, 5, 256),
    (2, 1, 130, 128),
    (128,),
]
ODD_SHAPES = [(1, 1), (3, 129), (5, 127), (131, 3), (17,), (2, 129, 257), (63, 65)]


def raw(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).flatten().view(torch.uint8)


def same(ours: list[Tensor], expected: list[Tensor], format: str) -> None:
    """Equal bytes, except that the bits of a NaN may differ."""
    assert len(ours) == len(expected)
    for one, two in zip(ours, expected, strict=True):
        assert one.shape == two.shape and one.dtype == two.dtype and one.is_contiguous()
        left, right = raw(one), raw(two)
        if torch.equal(left, right):
            continue
        if (
            one.dtype == torch.uint8 and resolve_format(format).family == "gguf"
        ):  # scales lie in the data
            assert_same_blocks(one, two, format)
        else:
            assert one.is_floating_point()
            nan = two.float().isnan()
            assert torch.equal(one.float().isnan(), nan)
            size = one.dtype.itemsize
            assert torch.equal(*(v.view(-1, size)[~nan.flatten()] for v in (left, right)))


def assert_same_blocks(one: Tensor, two: Tensor, format: str) -> None:
    entry = resolve_format(format)
    left, right = (codec.unpack(codec.PackedData(data, {}), entry) for data in (one, two))
    assert torch.equal(left.codes, right.codes)
    for name, scale in left.scales.items():
        torch.testing.assert_close(scale, right.scales[name], rtol=0, atol=0, equal_nan=True)


def check(x: Tensor, format: str, static: Tensor | None = None) -> None:
    same(kernels.quantize(x, format, static), reference(x, format, static), format)


@pytest.mark.parametrize("format", NAMES)
def test_shapes_and_dtypes(format):
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for number, shape in enumerate(SHAPES):
        x = torch.randn(shape) * torch.randn(shape).exp()
        check(x.to(dtypes[number % 4]), format)


@pytest.mark.parametrize("format", ANY_WIDTH)
def test_odd_shapes(format):
    for shape in ODD_SHAPES:
        check(torch.randn(shape), format)


@pytest.mark.parametrize("format", NAMES)
def test_strides(format):
    wide = torch.randn(256, 512)
    for x in (
        wide[:, 128:384],
        wide[::3, :256],
        wide.t()[:256],
        wide[:8].view(2, 4, 512)[:, 1:, :256],
    ):
        check(x, format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", NAMES)
def test_nan_infinity_zeros_and_denormals(format, dtype):
    x = torch.randn(9, 256)
    x[0, 5], x[1, 7], x[2, 200] = torch.nan, torch.inf, -torch.inf
    x[3], x[4] = 0.0, -0.0
    x[5] *= 1e-39
    x[6] *= 1e38
    x[7, :128] = torch.nan
    x[8, ::2] = 0.0
    check(x.to(dtype), format)
    for number in (0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3.4e38, 1e-45, 2.0**-126):
        check(torch.full((2, 256), number).to(dtype), format)


@pytest.mark.parametrize("format", NAMES)
def test_every_rounding(format):
    """All ties between neighbouring codes, the numbers next to them, and both signs of one size."""
    for steps in (torch.arange(-256, 256) / 2, torch.arange(-64, 64) / 8):
        near = torch.stack(
            (steps, steps.nextafter(torch.tensor(9.0)), steps.nextafter(-torch.tensor(9.0)))
        )
        for top in (steps.abs().max(), 127.0, 448.0, 6.0, 7.5, 8.0, 15.0):
            rows = near.flatten().view(-1, 128).clone()
            rows[:, 0] = top
            check(rows, format)
            rows[:, 1] = -top
            check(rows.flip(-1).contiguous(), format)


@pytest.mark.parametrize(
    "format", ["fp8_e4m3_row", "fp8_e5m2_1x128", "int8", "mxfp8_e4m3", "nvfp4"]
)
def test_magnitudes_over_all_of_float32(format):
    exponents = torch.arange(-149, 128, dtype=torch.float64).exp2()
    x = (exponents[:, None] * (torch.rand(277, 256, dtype=torch.float64) * 2 - 1)).float()
    check(x, format)


def test_static_scales():
    x = torch.randn(9, 256)
    for format, shape in (("fp8_e4m3_row", (9, 1)), ("fp8_e5m2_1x128", (9, 2)), ("int8", (9, 1))):
        check(x, format, torch.tensor(0.02))
        check(x, format, torch.rand(shape) + 0.01)
    check(x, "nvfp4", torch.tensor(0.001))
    check(x, "fp8_e4m3_tensor", torch.tensor(0.01))
    with pytest.raises(FormatError, match="must be positive"):
        kernels.quantize(x, "int8", torch.tensor(0.0))


def test_threads_do_not_change_the_result(monkeypatch):
    x = torch.randn(513, 384)
    for format in NAMES:
        parts = []
        for threads in (1, 2, 5):
            monkeypatch.setattr(kernels.device, "num_cpu_threads", lambda count=threads: count)
            parts.append(kernels.quantize(x, format))
        for other in parts[1:]:
            same(other, parts[0], format)


def test_the_operator_falls_back_to_the_reference():
    assert kernels.quantize(torch.randn(2, 256), "q4_k") is NotImplemented
    assert kernels.quantize(torch.randn(0, 256), "int8") is NotImplemented
    assert kernels.quantize(torch.randn(2, 64), "int4_g32", torch.tensor(0.1)) is NotImplemented
    x = torch.randn(4, 256)
    for name in FORMATS:
        packed = quantize(x, name)
        same([packed.packed, *packed.scales.values()], reference(x, name), name)
