"""Quantization to FP8 and int8 fused with the ops before it: one kernel, the reference's bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite import fuser
from fulgurite.executors.fuser import kernels_of
from fulgurite.kernels.gemm import modules
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.kernels.quantize.reference import quantize as reference
from fulgurite.op import get_decomposition
from fulgurite.quant import quantize
from fulgurite.quant.format import resolve_format
from tests.fuser import support

FORMATS = ["fp8_e4m3_row", "fp8_e5m2_row", "fp8_e4m3_1x128", "fp8_e5m2_1x128", "int8"]


def rms_norm(x, w):
    return F.rms_norm(x, (x.shape[-1],), w, 1e-6)


def gated_silu(x, w):
    return F.silu(x) * (x + w)


def count_kernels(before, format, width):
    """One; but a GPU program does not hold long rows that a norm and block scales both reduce."""
    has_blocks = resolve_format(format).block[1] and width > 128
    is_long = support.TARGET != "cpp" and width > 8192
    return 2 if before is rms_norm and has_blocks and is_long else 1


def check_quantized(quantized, hidden, format):
    """Equal bits, except for NaN payloads."""
    for ours, expected in zip(quantized, reference(hidden, format), strict=True):
        ours = ours.cpu()
        assert ours.dtype == expected.dtype and ours.shape == expected.shape
        if expected.is_floating_point():
            nan = expected.float().isnan()
            assert torch.equal(ours.float().isnan(), nan)
            ours, expected = (t.float().masked_fill(nan, 0.0) for t in (ours, expected))
            assert torch.equal(torch.signbit(ours), torch.signbit(expected))
        assert torch.equal(ours, expected)


def make_rows(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(count, width) * torch.randn(count, 1).exp()
    x[0] = 0.0
    if count > 3:
        x[1, 5], x[2, 7], x[3, 9] = torch.nan, torch.inf, -torch.inf
    return x, torch.randn(width)


@pytest.mark.parametrize("before", [rms_norm, gated_silu])
@pytest.mark.parametrize("format", FORMATS)
def test_decomposed_quantization_is_fused(before, format):
    """In C++, in Triton's interpreter and on a GPU."""
    decomposition = get_decomposition(quantize_op.overload)

    def function(x, w):
        hidden = before(x, w)
        return (hidden, *decomposition(hidden, format))

    arguments = tuple(map(support.to_target, make_rows(7, 256)))
    region = fuser.lower_region(
        support.trace(function, arguments), use_triton=support.TARGET == "triton"
    )
    hidden, *quantized = region(*arguments)
    check_quantized(quantized, hidden.cpu(), format)
    expected = count_kernels(before, format, 256)
    assert len(region.kernels) == expected, [str(k.schedule) for k in region.kernels]


@pytest.mark.covering
@pytest.mark.parametrize("count, width", [(1, 128), (5, 384), (3, 1), (17, 129), (64, 4096)])
@pytest.mark.parametrize("before", [rms_norm, gated_silu])
@pytest.mark.parametrize("format", FORMATS)
def test_compiled_quantization_is_fused(before, format, count, width):
    if resolve_format(format).block[1] and width % 128:
        pytest.skip("a partial block stays with the operator's own kernel")

    def function(x, w):
        hidden = before(x, w)
        return (hidden, *quantize_op(hidden, format))

    x, w = make_rows(count, width)
    compiled = fulgurite.compile(function, autotune=False)
    with torch.no_grad():
        hidden, *quantized = compiled(x, w)
    check_quantized(quantized, hidden, format)
    kernels = kernels_of(compiled.last_trace())
    assert len(kernels) == count_kernels(before, format, width), str(compiled.last_trace())
    assert "fulgurite.quantize" not in str(compiled.last_trace())


def test_format_without_a_decomposition_keeps_its_operator():
    def function(x, w):
        return quantize_op(rms_norm(x, w), "int4_g32")

    x, w = make_rows(5, 256)
    compiled = fulgurite.compile(function, autotune=False)
    with torch.no_grad():
        data = compiled(x, w)[0]
    expected = reference(rms_norm(x, w), "int4_g32")[0]
    assert data.dtype == torch.uint8 and data.shape == expected.shape
    assert "fulgurite.quantize" in str(compiled.last_trace())


@pytest.mark.parametrize(
    "weights, activations", [("fp8_e4m3_row", "fp8_e4m3_row"), ("int8", "int8")]
)
def test_norm_before_a_quantized_linear_quantizes_its_input(monkeypatch, weights, activations):
    """As on a GPU: one generated kernel for norm and quantization, then a GEMM of quantized operands."""
    monkeypatch.setattr(modules, "SEPARATE_CAST_DEVICES", ("cpu",))
    x, w = make_rows(6, 128)
    x[1:4] = torch.randn(3, 128)  # finite
    layer = modules.QuantLinear(
        quantize(torch.randn(48, 128), weights), torch.randn(48), activations
    )
    compiled = fulgurite.compile(lambda x, w: layer(rms_norm(x, w)), autotune=False)
    with torch.no_grad():
        ours = compiled(x, w)
        expected = layer(rms_norm(x, w))
    text = str(compiled.last_trace())
    assert len(kernels_of(compiled.last_trace())) == 1 and "fulgurite.scaled_mm" in text
    assert "fulgurite.quantize" not in text and "fulgurite.quant_linear" not in text
    # a value may round the other way
    assert (ours - expected).norm() <= 1e-3 * expected.norm()
