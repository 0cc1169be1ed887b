"""Casts decomposed for the fuser: the codes and scales of `fulgurite.quant`, alone and fused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fulgurite
from fulgurite.kernels.quantize.decompositions import decompose_quantize
from fulgurite.kernels.quantize.ops import quantize_op
from fulgurite.quant import quantize, resolve_format

FORMATS = ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp4", "nvfp4", "fp8_e4m3_row", "fp8_e4m3_1x128", "int8"]


def hard_rows(columns: int) -> torch.Tensor:
    """Magnitudes over 40 decades, zeros, NaN, infinities, subnormals, the largest numbers."""
    torch.manual_seed(columns)
    x = torch.randn(16, columns) * torch.exp(torch.randn(16, 1) * 20)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0.0, float("nan"), float("inf"), -float("inf")
    x[4] *= 1e-38
    x[5], x[6], x[7, 0], x[8] = 1e-45, 3e38, -0.0, 2.0**-126
    x[9] = torch.linspace(-8, 8, columns)  # ties and saturation of e2m1
    return x


def assert_same_codes(actual, expected) -> None:
    """The same bits, and NaN scales where NaN scales are."""
    wanted = [expected.packed, *expected.scales.values()]
    assert len(actual) == len(wanted)
    for ours, theirs in zip(actual, wanted, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            ours, theirs = (x.contiguous().view(torch.uint8) for x in (ours, theirs))
            assert torch.equal(ours, theirs)


@pytest.mark.covering
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_decomposed_casts_match_the_codec(format, dtype):
    x = hard_rows(256).to(dtype)
    expected, entry = quantize(x, format), resolve_format(format)
    assert_same_codes(decompose_quantize(x, entry), expected)
    fused = fulgurite.fuse(lambda x: tuple(decompose_quantize(x, entry)), dynamic=False)
    assert_same_codes(fused(x), expected)


@pytest.mark.parametrize("format", FORMATS)
def test_stacked_matrices(format):
    x = torch.stack([hard_rows(128), hard_rows(128) * 3])
    assert_same_codes(decompose_quantize(x, resolve_format(format)), quantize(x, format))


def test_what_stays_with_the_operator():
    x = torch.randn(4, 128)
    for case in (x[0], x[:0], x.t(), x[:, :48]):
        assert decompose_quantize(case, resolve_format("mxfp4")) is NotImplemented
    assert decompose_quantize(x, resolve_format("fp8_e4m3_128x128")) is NotImplemented
    assert decompose_quantize(x, resolve_format("int4_g32")) is NotImplemented


def test_an_mxfp8_cast_shares_the_kernel_of_the_gate_before_it():
    torch._dynamo.reset()
    gate, up = torch.randn(64, 256), torch.randn(64, 256)

    def swiglu(gate, up):
        return quantize_op(F.silu(gate) * up, "mxfp8_e4m3")

    compiled = fulgurite.compile(swiglu, autotune=False)
    actual = compiled(gate, up)
    # silu in generated code may differ from eager's by an ulp, which may move a code by one step
    expected = quantize(F.silu(gate) * up, "mxfp8_e4m3").dequantize(torch.float32)
    values = actual[0].float() * actual[1].float().repeat_interleave(32, 1)
    assert ((values - expected).abs() <= 0.07 * expected.abs() + 1e-6).all()
    calls = str(compiled.last_trace()).split("def forward")[1]
    assert "fulgurite.quantize" not in calls and calls.count("# fuser") == 1
