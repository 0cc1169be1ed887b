"""fp8_linear against float64 arithmetic on the operands as they are after quantizing."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.fp8_linear import FP8_RECIPES, fp8_linear
from fulgurite.quant import quantize

SHAPES = [
    ((5, 7), 48, 64),
    ((1,), 16, 16),
    ((130,), 272, 144),
    ((3, 129), 128, 256),
    ((7,), 64, 96),
]


def cast(x: Tensor, format: str) -> Tensor:
    return quantize(x, format).dequantize(torch.float32).double()


def expected(x: Tensor, weight: Tensor, gradient: Tensor, recipe: str) -> tuple[Tensor, ...]:
    """y, and the gradients of x and of the weight, from quantized operands in float64."""
    formats = FP8_RECIPES[recipe]
    rows, g = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    y = cast(rows, formats.x) @ cast(weight, formats.weight).t()
    grad_x = cast(g, formats.gradient) @ cast(weight.t(), formats.weight).t()
    if recipe == "mxfp8":  # rows are padded to whole blocks of scales
        rows, g = (F.pad(matrix, (0, 0, 0, -len(matrix) % 32)) for matrix in (rows, g))
    grad_weight = cast(g.t(), formats.gradient) @ cast(rows.t(), formats.x).t()
    return y.reshape(gradient.shape), grad_x.reshape(x.shape), grad_weight


def assert_near(ours: Tensor, exact: Tensor, terms: int) -> None:
    """Rounded once to its dtype, after float32 sums of `terms` products."""
    allowed = torch.finfo(ours.dtype).eps / 2 + terms**0.5 * 2.0**-23
    distance = (ours.double() - exact).norm() / exact.norm()
    assert distance <= allowed, f"{distance} from the exact result, {allowed} allowed"


@pytest.mark.covering
@pytest.mark.parametrize("weights", ["recompute", "keep"])
@pytest.mark.parametrize("recipe", FP8_RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("leading, n, k", SHAPES)
def test_forward_and_both_gradients(leading, n, k, dtype, recipe, weights):
    if recipe == "mxfp8" and (n % 32 or k % 32):
        pytest.skip("MX blocks have 32 columns")
    x = torch.randn(*leading, k).to(dtype).requires_grad_()
    weight = (torch.randn(n, k) * torch.randn(n, 1).exp()).to(dtype).requires_grad_()
    gradient = torch.randn(*leading, n).to(dtype)
    y = fp8_linear(x, weight, None, recipe, weights)
    y.backward(gradient)
    exact = expected(x.detach(), weight.detach(), gradient, recipe)
    rows = x.numel() // k
    assert y.dtype == dtype
    for ours, wanted, terms in zip((y, x.grad, weight.grad), exact, (k, n, rows), strict=True):
        assert_near(ours.detach(), wanted, terms)


def test_a_bias_and_its_gradient():
    x, weight, bias = torch.randn(9, 32), torch.randn(16, 32), torch.randn(16, requires_grad=True)
    without = fp8_linear(x, weight)
    y = fp8_linear(x, weight, bias)
    torch.testing.assert_close(y, without + bias)
    gradient = torch.randn(9, 16)
    y.backward(gradient)
    torch.testing.assert_close(bias.grad, gradient.sum(0))


def test_only_what_needs_a_gradient_gets_one():
    x, weight = torch.randn(8, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    fp8_linear(x, weight.detach()).sum().backward()
    assert weight.grad is None and x.grad is not None
    x.grad = None
    fp8_linear(x.detach(), weight).sum().backward()
    assert x.grad is None and weight.grad is not None
    assert not fp8_linear(x.detach(), weight.detach()).requires_grad


def test_no_rows_and_a_nan():
    weight = torch.randn(16, 32, requires_grad=True)
    y = fp8_linear(torch.empty(0, 32), weight)
    assert y.shape == (0, 16)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(16, 32))
    x = torch.randn(3, 32)
    x[1, 5] = torch.nan
    bad = fp8_linear(x, weight).isnan()
    assert bad[1].all() and not bad[0].any() and not bad[2].any()


def test_autocast_decides_the_result():
    x, weight = torch.randn(4, 32), torch.randn(16, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_linear(x, weight)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_unknown_names():
    with pytest.raises(ArgumentError, match="rowwise"):
        fp8_linear(torch.randn(1, 16), torch.randn(16, 16), None, "columnwise")
    with pytest.raises(ArgumentError, match="recompute"):
        fp8_linear(torch.randn(1, 16), torch.randn(16, 16), None, "rowwise", "drop")
