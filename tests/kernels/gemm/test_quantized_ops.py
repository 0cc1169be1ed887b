"""The operators over quantized tensors: every format, fake kernels, backward, capture, errors."""

from __future__ import annotations

import pytest
import torch

import fulgurite
from fulgurite.errors import ArgumentError, FormatError
from fulgurite.kernels.gemm.modules import QuantEmbedding, QuantLinear, compute_logits
from fulgurite.kernels.gemm.quant_linear import quant_linear, quant_linear_op
from fulgurite.kernels.gemm.scaled_mm import scaled_mm, scaled_mm_op
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.quantize.ops import quantize, quantize_op
from fulgurite.quant import FORMATS
from fulgurite.quant import quantize as quantize_reference

NAMES = list(FORMATS)


def close(got, left, right, dtype=torch.float32):
    """Within a few roundings of the float64 product, by the sum of magnitudes."""
    want, size = left.double() @ right.double().mT, left.double().abs() @ right.double().abs().mT
    assert got.dtype == dtype and got.shape == want.shape
    assert ((got.double() - want).abs() <= 3e-6 * size).all()


@pytest.mark.parametrize("name", NAMES)
def test_operators_of_every_format(name):
    weight, x = torch.randn(24, 256), torch.randn(5, 256)
    packed, rows = quantize(weight, name), quantize(x, name)
    assert torch.equal(packed, quantize_reference(weight, name))
    close(quant_linear(x, packed), x, packed.dequantize())
    close(scaled_mm(rows, packed), rows.dequantize(), packed.dequantize())
    experts = quantize(torch.randn(3, 24, 256), name)
    out = grouped_gemm(x, torch.tensor([2, 2, 4], dtype=torch.int32), experts)
    close(out[:2], x[:2], experts[0].dequantize())
    close(out[2:4], x[2:4], experts[2].dequantize())
    assert (out[4:] == 0).all()


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "nvfp4", "q4_k", "int4_g32_asym"])
def test_operators_pass_opcheck(name):
    packed, rows = (
        quantize_reference(torch.randn(8, 256), name),
        quantize_reference(torch.randn(3, 256), name),
    )
    x = torch.randn(3, 256, requires_grad=True)
    parts = list(packed.scales.values())
    narrow = any(
        part.dtype.itemsize == 1 for part in (packed.packed, *parts) if part.is_floating_point()
    )
    # torch's schema check multiplies its inputs, which float8 does not support
    tests = ("test_faketensor",) if narrow else ("test_schema", "test_faketensor")
    torch.library.opcheck(quantize_op.overload, (x.detach(), name, None), test_utils=tests)
    arguments = (x, packed.packed, parts, name, torch.randn(8), "none")
    torch.library.opcheck(quant_linear_op.overload, arguments, test_utils=tests)
    left = (rows.packed, list(rows.scales.values()), name)
    right = (packed.packed, parts, name, None, torch.bfloat16)
    torch.library.opcheck(scaled_mm_op.overload, (*left, *right), test_utils=tests)


@pytest.mark.parametrize("name", ["q4_1", "fp8_e4m3_128x128", "nvfp4"])
def test_gradients_equal_those_of_a_dense_linear(name):
    packed = quantize_reference(torch.randn(8, 256), name)
    x, bias = torch.randn(2, 3, 256, requires_grad=True), torch.randn(8, requires_grad=True)
    gradient = torch.randn(2, 3, 8)
    quant_linear(x, packed, bias).backward(gradient)
    torch.testing.assert_close(x.grad, gradient @ packed.dequantize())
    torch.testing.assert_close(bias.grad, gradient.sum((0, 1)))


@pytest.mark.parametrize("name", ["q4_1", "fp8_e4m3_row", "int4_g32_asym"])
def test_modules_are_captured_and_agree(name):
    layer = QuantLinear(quantize_reference(torch.randn(24, 64), name), torch.randn(24))
    table = QuantEmbedding(quantize_reference(torch.randn(50, 64), name))
    ids = torch.tensor([[3, 49], [0, 3]])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.table = layer, table

        def forward(self, ids):
            x = self.table(ids)
            return self.layer(x).relu(), compute_logits(x, self.table)

    model = Model()
    dense = table.weight.dequantize()
    assert torch.equal(model.table(ids), dense[ids])
    with torch.no_grad():
        compiled = fulgurite.compile(model)(ids)
    for got, want in zip(compiled, model(ids), strict=True):
        torch.testing.assert_close(got, want)


def test_default_activations_follow_the_weight_to_its_device():
    weight = quantize_reference(torch.randn(8, 64), "q8_0")
    default, fixed = QuantLinear(weight), QuantLinear(weight, activations="q8_0")
    assert default.activations == fixed.activations == "q8_0"
    default.to("meta"), fixed.to("meta")
    assert (default.activations, fixed.activations) == ("none", "q8_0")


def test_a_static_scale_is_used():
    layer = QuantLinear(
        quantize_reference(torch.randn(8, 64), "fp8_e4m3_row"),
        None,
        "fp8_e4m3_tensor",
        torch.tensor(0.05),
    )
    x = torch.randn(2, 3, 64)
    rows = quantize_reference(x.flatten(0, 1), "fp8_e4m3_tensor", scale=0.05).dequantize()
    close(layer(x).flatten(0, 1), rows, layer.weight.dequantize())


@pytest.mark.parametrize("shape", [(16,), (1,), (1, 48)])
def test_a_bias_of_another_shape_raises(shape):
    """A short one was read past its end once."""
    weight, x, bias = quantize(torch.randn(48, 64), "q8_0"), torch.randn(2, 64), torch.ones(shape)
    stack, ends = quantize(torch.randn(2, 48, 64), "q8_0"), torch.tensor([1, 2], dtype=torch.int32)
    packed = quantize(x, "q8_0")
    for call in (
        lambda: quant_linear(x, weight, bias),
        lambda: scaled_mm(packed, weight, bias),
        lambda: grouped_gemm(x, ends, stack, bias),
    ):
        with pytest.raises(FormatError, match="bias .* must be"):
            call()


def test_error_messages():
    weight = quantize_reference(torch.randn(8, 64), "q4_0")
    with pytest.raises(FormatError, match="x has 32 columns, and the weight has K = 64"):
        quant_linear(torch.randn(2, 32), weight)
    with pytest.raises(FormatError, match="not a multiple"):
        quantize(torch.randn(2, 40), "mxfp4")
    with pytest.raises(FormatError, match="floating"):
        quant_linear(torch.zeros(2, 64, dtype=torch.int8), weight)
    with pytest.raises(FormatError, match="two dimensions"):
        quant_linear(torch.randn(2, 64), quantize_reference(torch.randn(2, 8, 64), "q4_0"))
    with pytest.raises(FormatError, match="must be positive and finite"):
        quantize(torch.randn(2, 64), "fp8_e4m3_tensor", torch.tensor(0.0))
    with pytest.raises(FormatError, match="must be positive and finite"):
        quantize(torch.randn(2, 64), "int8", torch.tensor(float("nan")))
    with pytest.raises(FormatError, match="no static scale"):
        quantize(torch.randn(2, 64), "mxfp4", torch.tensor(1.0))
    with pytest.raises(FormatError, match="can't be multiplied"):
        scaled_mm(quantize_reference(torch.randn(2, 32), "q8_0"), weight)
    with pytest.raises(ArgumentError, match=r"int32\[3\]"):
        grouped_gemm(
            torch.randn(4, 64), torch.tensor([4]), quantize_reference(torch.randn(3, 8, 64), "q8_0")
        )
    with pytest.raises(FormatError, match="span several rows"):
        QuantEmbedding(quantize_reference(torch.randn(128, 128), "fp8_e4m3_128x128"))(
            torch.tensor([1])
        )
