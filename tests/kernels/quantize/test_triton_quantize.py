"""The Triton quantize kernels in the interpreter (or on a GPU) against the reference, bit for
bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.quantize.reference import quantize as reference
from fulgurite.kernels.quantize.triton_quantize import quantize
from fulgurite.kernels.tuning import override_heuristics
from fulgurite.kernels.tuning.generic import GenericHeuristics
from tests.kernels.triton_support import DEVICE

FORMATS = [
    *("fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    *("fp8_e5m2_tensor", "fp8_e5m2_row", "fp8_e5m2_1x128", "fp8_e5m2_128x128"),
    *("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "int8", "int4_g32", "int4_g64", "int4_g128"),
]
WHOLE_ROWS = ("tensor", "row", "1x128", "128x128", "int8")  # take any K
SHAPES = [(1, 128), (3, 256), (7, 384), (130, 128), (2, 5, 256), (2, 1, 130, 128), (128,)]
ODD_SHAPES = [(1, 1), (3, 129), (5, 127), (131, 3), (17,)]


def same(ours: list[Tensor], expected: list[Tensor]) -> None:
    assert len(ours) == len(expected)
    for one, two in zip(ours, expected, strict=True):
        one = one.cpu()
        assert one.shape == two.shape and one.dtype == two.dtype
        if one.dtype.is_floating_point and one.dtype != torch.float8_e8m0fnu:
            one, two = one.float(), two.float()  # the bits of a NaN may differ
            assert torch.equal(one.isnan(), two.isnan())
            one, two = one.nan_to_num(nan=0.0), two.nan_to_num(nan=0.0)
            assert torch.equal(torch.signbit(one), torch.signbit(two))
        assert (
            torch.equal(one, two)
            if one.dtype == torch.float32
            else torch.equal(one.view(torch.uint8), two.view(torch.uint8))
        )


def check(x: Tensor, format: str, static: Tensor | None = None) -> None:
    given = None if static is None else static.to(DEVICE)
    same(quantize(x.to(DEVICE), format, given), reference(x, format, static))


@pytest.mark.parametrize("format", FORMATS)
def test_shapes_and_dtypes(format):
    for number, shape in enumerate(SHAPES):
        x = torch.randn(shape) * torch.randn(shape).exp()
        check(x.to((torch.float32, torch.bfloat16, torch.float16)[number % 3]), format)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.endswith(WHOLE_ROWS)])
def test_odd_shapes(format):
    for shape in ODD_SHAPES:
        check(torch.randn(shape), format)


@pytest.mark.parametrize("format", FORMATS)
def test_nan_infinity_zeros_and_denormals(format):
    x = torch.randn(9, 256)
    x[0, 5], x[1, 7], x[2, 200] = torch.nan, torch.inf, -torch.inf
    x[3], x[4] = 0.0, -0.0
    x[5] *= 1e-39
    x[6] *= 1e38
    x[7, :128] = torch.nan
    x[8, ::2] = 0.0
    check(x, format)
    check(torch.zeros(2, 256), format)
    check(torch.full((2, 256), torch.inf), format)


@pytest.mark.parametrize("format", FORMATS)
def test_every_rounding(format):
    """All ties between neighbouring codes, and the numbers next to them."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    near = torch.cat(
        [values, ties, torch.nextafter(ties, values[1:]), torch.nextafter(ties, values[:-1])]
    )
    near = near[near.abs() <= 448]
    x = torch.zeros(1, 1280)
    x[0, : near.numel()] = near
    x[0, -1] = 448.0
    check(x, format)
    check(x.reshape(10, 128), format)
    check(x.reshape(10, 128) * 3, format)


@pytest.mark.parametrize("format", ["fp8_e4m3_row", "fp8_e4m3_1x128", "nvfp4", "fp8_e4m3_tensor"])
def test_views(format):
    x = torch.randn(6, 512)
    for view in (
        x[:, :256],
        x[::2],
        x[:, 256:],
        x.t()[:256].t(),
        x[:, ::2],
        x.t().contiguous().t(),
    ):
        check(view, format)
    for view in (torch.randn(256, 128).t(), torch.randn(2, 256, 128).transpose(-1, -2)):
        check(view, format)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.endswith(WHOLE_ROWS)])
def test_transposes(format):
    for rows, columns in ((1, 1), (130, 33), (257, 128), (64, 200)):
        x = torch.randn(rows, columns) * torch.randn(columns).exp()
        x[0, 0] = torch.inf
        check(x.t(), format)
        check(torch.cat([x, x], 1)[:, :columns].bfloat16().t(), format)


def unusual_bfloat16(rows: int, columns: int) -> Tensor:
    """Values that kernels of bf16x2 must distinguish, by rows. No denormals: the interpreter gets
    those of bfloat16 wrong."""
    x = torch.randn(rows, columns) * torch.randn(rows, columns).exp()
    x[0, 5], x[1, 7], x[2, 100] = torch.nan, torch.inf, -torch.inf
    x[3], x[4] = 0.0, -0.0
    x[5] = x[5].sign() * 2.0**-125
    x[6] *= 1e38
    x[7, :128] = torch.nan
    x[8, :64], x[8, 64:128] = torch.inf, -torch.inf
    x[9] = torch.arange(columns) / 4
    x[10, :3] = torch.tensor([3.3895313892515355e38, -torch.inf, torch.inf])
    x[11] = 2.0**-126
    x[11, ::3] = -torch.inf
    x[12:16] = (4 * torch.randn(4, columns)).round() / 4
    return x.bfloat16()


@pytest.mark.parametrize("format", FORMATS)
def test_bf16x2(format):
    x = unusual_bfloat16(20, 384)
    check(x[:, :256], format)
    check(x[12:].contiguous(), format)
    check(torch.stack([x[:8], x[12:]]), format)
    tiny = torch.randn(4, 256).sign() * (1 + 7 * torch.rand(4, 256)) * 2.0**-122
    check(tiny.bfloat16(), format)


@pytest.mark.parametrize("format", [f for f in FORMATS if f.endswith(WHOLE_ROWS)])
def test_transposed_bf16x2(format):
    for rows, columns in ((16, 256), (132, 130), (4, 2)):
        x = torch.randn(rows, columns).bfloat16()
        check(x.t(), format)
        if rows == 16:
            check(unusual_bfloat16(rows, columns).t(), format)


def test_rows_that_do_not_fit_in_registers():
    class ShortRows(GenericHeuristics):
        max_register_row = 64

    with override_heuristics(ShortRows()):
        for format in ("fp8_e4m3_row", "int8"):
            check(torch.randn(3, 1000), format)


def test_a_static_scale():
    check(torch.randn(5, 64), "fp8_e4m3_tensor", torch.tensor(0.02))
    check(torch.randn(5, 64).t(), "fp8_e5m2_tensor", torch.tensor([[0.02]]))
    check(torch.randn(2, 5, 64), "fp8_e4m3_tensor", torch.tensor([[[0.02]], [[0.03]]]))
    assert quantize(torch.randn(5, 64), "int8", torch.tensor(0.1)) is NotImplemented


def test_unsupported_calls():
    x = torch.randn(2, 256)
    for format in ("q4_0", "q4_k", "bf16", "int4_g128_asym", "int4_g32_min", "int8_g32"):
        assert quantize(x, format) is NotImplemented
    assert quantize(x.double(), "int8") is NotImplemented
    assert quantize(x[:0], "int8") is NotImplemented
