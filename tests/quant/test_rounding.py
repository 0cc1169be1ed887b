"""Scale search and second-order rounding, against round-to-nearest and the codecs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.errors import FormatError
from fulgurite.quant import FORMATS, compute_sqnr, quantize
from fulgurite.quant.rounding import (
    factor_inverse_hessian,
    round_second_order,
    round_to_nearest,
    supports_second_order,
)

FOUR_BITS = ["nvfp4", "mxfp4", "int4_g32", "int4_g128", "int4_g64_asym"]


def make_weight(rows: int = 48, columns: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator) * 0.02


def make_inputs(columns: int = 256, tokens: int = 600) -> Tensor:
    """Correlated inputs with some large channels, as hidden states have."""
    generator = torch.Generator().manual_seed(1)
    mix = torch.randn(columns, columns, generator=generator) / columns**0.5
    x = torch.randn(tokens, columns, generator=generator) @ mix
    return x * (1 + 4 * (torch.arange(columns) % 37 == 0))


def output_error(weight: Tensor, quantized: Tensor, x: Tensor) -> float:
    error = x.double() @ (weight - quantized.dequantize(torch.float32)).double().t()
    return float(error.square().sum() / (x.double() @ weight.double().t()).square().sum())


@pytest.mark.parametrize("name", FOUR_BITS)
def test_second_order_rounding_lowers_the_output_error(name):
    weight, x = make_weight(), make_inputs()
    nearest = output_error(weight, quantize(weight, name), x)
    searched = output_error(weight, round_to_nearest(weight, FORMATS[name]), x)
    second = output_error(weight, round_second_order(weight, FORMATS[name], x.t() @ x), x)
    assert second < 0.6 * nearest
    assert second < 0.7 * searched
    assert searched < nearest


@pytest.mark.parametrize("name", FOUR_BITS)
def test_searched_scales_have_no_larger_error_in_any_block(name):
    weight, format = make_weight(), FORMATS[name]

    def block_errors(quantized: Tensor) -> Tensor:
        error = (weight - quantized.dequantize(torch.float32)).square()
        return error.unflatten(-1, (-1, format.block[1])).sum(-1)

    searched, nearest = round_to_nearest(weight, format), quantize(weight, name)
    assert bool((block_errors(searched) <= block_errors(nearest) * (1 + 1e-5)).all())


@pytest.mark.parametrize(
    "name", ["fp8_e4m3_row", "fp8_e4m3_128x128", "int8", "mxfp8_e4m3", "fp8_e4m3_tensor"]
)
def test_8_bit_formats_are_the_codec_s(name):
    weight = make_weight(65, 160)
    assert torch.equal(round_to_nearest(weight, FORMATS[name]), quantize(weight, name))


@pytest.mark.parametrize("name", ["fp8_e4m3_row", "int8", "int4_g32", "int4_g32_asym"])
def test_scales_in_bfloat16_are_exact_there(name):
    weight = make_weight(16, 64)
    quantized = round_to_nearest(weight, FORMATS[name], scale_dtype=torch.bfloat16)
    scale = quantized.scales["scale"]
    assert torch.equal(scale, scale.bfloat16().float())
    assert compute_sqnr(weight, quantized) > compute_sqnr(weight, quantize(weight, name)) - 0.4


def test_a_diagonal_hessian_compensates_nothing():
    """Uncorrelated inputs: no other column can make up for an error."""
    weight = make_weight(8, 64)
    quantized = round_second_order(weight, FORMATS["mxfp4"], torch.eye(64))
    assert torch.equal(quantized, round_to_nearest(weight, FORMATS["mxfp4"]))


@pytest.mark.parametrize("name", FOUR_BITS)
@pytest.mark.parametrize("rows", [1, 17])
def test_odd_sizes_zeros_and_unused_inputs(name, rows):
    format = FORMATS[name]
    columns = 3 * format.block[1]
    weight, x = make_weight(rows, columns), make_inputs(columns, 20)  # fewer tokens than columns
    weight[:, : format.block[1]] = 0
    x[:, 5] = 0
    quantized = round_second_order(weight, format, x.t() @ x).dequantize()
    assert bool((quantized[:, : format.block[1]] == 0).all())
    assert bool(quantized.isfinite().all())
    assert (weight - quantized).norm() < 0.5 * weight.norm()


def test_the_inverse_factor():
    x = make_inputs(32, 500).double()
    hessian = (x.t() @ x).float()
    factor, is_used = factor_inverse_hessian(hessian)
    damped = hessian.double() + 0.01 * hessian.diagonal().mean().double() * torch.eye(32)
    torch.testing.assert_close(
        factor.double().t() @ factor.double(), damped.inverse(), rtol=1e-3, atol=1e-8
    )
    assert bool(is_used.all()) and torch.equal(factor, factor.triu())


def test_a_hessian_that_is_not_finite_is_an_error():
    with pytest.raises(FormatError, match="not finite"):
        round_second_order(make_weight(4, 32), FORMATS["mxfp4"], torch.full((32, 32), torch.inf))


def test_which_formats_are_rounded_second_order():
    assert all(supports_second_order(FORMATS[name]) for name in FOUR_BITS)
    for name in ("fp8_e4m3_row", "int8", "mxfp8_e4m3", "fp8_e4m3_128x128"):
        assert not supports_second_order(FORMATS[name])
