"""CPU linears against float64 products of exactly the same values, on every instruction set.

The reference is plain torch: the weight dequantized by `fulgurite.quant`, x as it is or quantized
to q8_0, multiplied in float64. Only the order of float32 sums may differ: a few units in the last
place of the sum of magnitudes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fulgurite.errors import ArgumentError, FormatError
from fulgurite.kernels.common import cpu_library as libraries
from fulgurite.kernels.gemm import cpu_linear as module
from fulgurite.kernels.gemm.cpu_layout import concat_panels, pack_panels
from fulgurite.kernels.gemm.cpu_linear import LinearCall, linear, panels_cache
from fulgurite.kernels.gemm.quant_linear import quant_linear
from fulgurite.kernels.gemm.reference import fake_quantize_activations
from fulgurite.quant import FORMATS, QuantTensor, quantize

PACKED = [name for name, format in FORMATS.items() if format.family != "cast"]
# ulp-like: one rounding a product and a sum in float32, then one to the result's dtype
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SHAPES = [(16, 256, 1), (37, 512, 3), (1, 256, 9), (48, 768, 17), (70, 256, 29)]


def check(got, x, weight, activations, bias=None):
    exact_x = fake_quantize_activations(x, activations).double()
    exact_w = weight.dequantize(torch.float64)
    want, size = exact_x @ exact_w.T, exact_x.abs() @ exact_w.abs().T
    if bias is not None:
        want, size = want + bias.double(), size + bias.double().abs()
    assert got.dtype == x.dtype and got.shape == want.shape
    error = (got.double() - want).abs() / size.clamp_min(1e-30)
    assert error.max() < TOLERANCE[x.dtype] if got.numel() else True


@pytest.mark.parametrize("activations", ["none", "q8_0"])
@pytest.mark.parametrize("name", PACKED)
def test_every_format_and_shape(name, activations):
    for rows, columns, tokens in SHAPES:
        weight = quantize(torch.randn(rows, columns) * 3 * torch.rand(rows, 1), name)
        x, bias = torch.randn(tokens, columns), torch.randn(rows)
        check(quant_linear(x, weight, bias, activations), x, weight, activations, bias)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", list(libraries.SIMD))
def test_every_instruction_set(instructions, monkeypatch):
    if instructions == "avx512_vnni" and libraries.best_instruction_set() != instructions:
        pytest.skip("this machine has no AVX-512 VNNI")
    if instructions == "avx2" and libraries.best_instruction_set() == "generic":
        pytest.skip("this machine has no AVX2")
    chosen = libraries.load_library(instructions)
    assert chosen.instructions().decode() == instructions
    monkeypatch.setattr(module, "load_library", lambda: chosen)
    for name in PACKED:
        for activations in ("none", "q8_0"):
            weight, x = quantize(torch.randn(35, 512), name), torch.randn(11, 512)
            check(quant_linear(x, weight, None, activations), x, weight, activations)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", ["q4_1", "q8_0", "nvfp4", "fp8_e5m2_row"])
def test_dtypes_and_strides(name, dtype):
    weight = quantize(torch.randn(21, 256), name)
    wide = torch.randn(6, 512).to(dtype)
    for x in (wide[:, 128:384], wide[::2, :256], wide[:, :256].reshape(2, 3, 256), wide[0, :256]):
        for activations in ("none", "q8_0"):
            check(quant_linear(x, weight, None, activations), x, weight, activations)
    transposed = torch.randn(256, 5).to(dtype).t()
    check(quant_linear(transposed, weight), transposed, weight, "none")


@pytest.mark.parametrize("columns", [1, 31, 33, 100, 130])
@pytest.mark.parametrize("name", ["int8", "fp8_e4m3_row", "fp8_e4m3_128x128", "fp8_e5m2_1x128"])
def test_columns_that_blocks_do_not_divide(name, columns):
    weight, x = quantize(torch.randn(19, columns), name), torch.randn(5, columns)
    check(quant_linear(x, weight), x, weight, "none")


def test_half_a_block_of_nvfp4():
    weight, x = quantize(torch.randn(5, 48), "nvfp4"), torch.randn(3, 48)
    check(quant_linear(x, weight), x, weight, "none")


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 7, 8, 15, 255, 256, 257, 520])
def test_numbers_of_tokens_and_threads(tokens):
    weight, x = quantize(torch.randn(150, 160), "q4_1"), torch.randn(tokens, 160)
    panels = pack_panels(weight)
    for integer, activations in ((True, "q8_0"), (False, "none")):
        one = linear(x, panels, integer=integer, threads=1)
        check(one, x, weight, activations)
        for threads in (2, 3, 7):
            assert torch.equal(linear(x, panels, integer=integer, threads=threads), one)


def test_empty_weights():
    for rows, columns in ((0, 64), (5, 0)):
        weight = quantize(torch.randn(rows, columns), "int8")
        got = quant_linear(torch.randn(3, columns), weight)
        assert torch.equal(got, torch.zeros(3, rows))


def test_nan_and_infinity_in_x():
    weight = quantize(torch.randn(20, 64), "q8_0")
    x = torch.randn(4, 64)
    x[1, 3], x[2, 40], x[3, 40] = float("nan"), float("inf"), float("-inf")
    got = quant_linear(x, weight, None, "q8_0")
    assert got[1].isnan().all() and got[[0, 2, 3]].isfinite().all()
    finite = [0, 2, 3]  # infinities saturate in q8_0
    check(got[finite], x[finite], weight, "q8_0")
    plain = quant_linear(x, weight)
    want = x.double() @ weight.dequantize(torch.float64).T
    assert torch.equal(plain.isnan(), want.isnan())
    assert torch.equal(plain[2:].sign(), want[2:].sign().float())


@pytest.mark.parametrize(
    "name", ["q4_1", "int4_g32", "nvfp4", "mxfp4", "fp8_e4m3_row", "mxfp8_e4m3"]
)
def test_nan_in_a_weight_makes_its_row_nan(name):
    dense = torch.randn(18, 64)
    dense[7, 5] = float("nan")
    weight = quantize(dense, name)
    for activations in ("none", "q8_0"):
        got = quant_linear(torch.randn(3, 64), weight, None, activations)
        assert got[:, 7].isnan().all() and got[:, [*range(7), *range(8, 18)]].isfinite().all()


def test_infinity_in_e5m2_raises():
    codes = torch.full((2, 32), 0x7C, dtype=torch.uint8).view(torch.float8_e5m2)
    weight = QuantTensor("fp8_e5m2_row", codes, {"scale": torch.ones(2, 1)})
    with pytest.raises(FormatError, match="infinities"):
        pack_panels(weight)


@pytest.mark.parametrize("gate", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_pair_with_biases_and_residual(gate, dtype):
    function = F.silu if gate == "silu" else lambda v: F.gelu(v, approximate="tanh")
    gate_w, up_w = (quantize(torch.randn(70, 96) / 10, "q4_1") for _ in range(2))
    bias, up_bias = torch.randn(70), torch.randn(70)
    for tokens in (1, 6, 300):
        x, extra = torch.randn(tokens, 96).to(dtype), torch.randn(tokens, 70).to(dtype)
        out = torch.empty(tokens, 70, dtype=dtype)
        call = LinearCall(
            pack_panels(gate_w), bias, up=pack_panels(up_w), up_bias=up_bias, gate=gate, threads=2
        ).bind(x, out, extra)
        call()
        exact = fake_quantize_activations(x, "q8_0").double()
        left = exact @ gate_w.dequantize(torch.float64).T + bias.double()
        right = exact @ up_w.dequantize(torch.float64).T + up_bias.double()
        want = function(left) * right + extra.double()
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


def test_residual_may_alias_the_output():
    weight, x = quantize(torch.randn(33, 64), "q8_0"), torch.randn(2, 64)
    state = torch.randn(2, 33)
    want = state + quant_linear(x, weight, None, "q8_0")
    LinearCall(pack_panels(weight)).bind(x, state, state)()
    torch.testing.assert_close(state, want)


def test_concatenated_weights_and_shapes_that_do_not_fit():
    parts = [quantize(torch.randn(rows, 64), "q4_1") for rows in (32, 16, 5)]
    x = torch.randn(3, 64)
    got = linear(x, concat_panels([pack_panels(part) for part in parts]), integer=True)
    want = torch.cat([quant_linear(x, part, None, "q8_0") for part in parts], dim=-1)
    assert torch.equal(got, want)
    with pytest.raises(FormatError, match="concatenated"):
        concat_panels([pack_panels(parts[2]), pack_panels(parts[0])])
    with pytest.raises(FormatError, match="concatenated"):
        concat_panels([pack_panels(parts[0]), pack_panels(quantize(torch.randn(16, 64), "q4_0"))])
    with pytest.raises(ArgumentError, match="same shape"):
        LinearCall(pack_panels(parts[0]), up=pack_panels(parts[1]))


def test_panels_are_cached_until_the_weight_is_written():
    weight = quantize(torch.randn(16, 32), "q8_0")
    first = panels_cache(weight.packed, [], "q8_0")
    assert panels_cache(weight.packed, [], "q8_0") is first
    weight.packed.copy_(quantize(torch.randn(16, 32), "q8_0").packed)
    second = panels_cache(weight.packed, [], "q8_0")
    assert second is not first
    x = torch.randn(2, 32)
    check(quant_linear(x, weight), x, weight, "none")


def test_x_is_quantized_as_q8_0():
    """A weight of ones in one column reads back x itself: code * scale, bit for bit."""
    x = torch.cat((torch.randn(64, 32) * torch.logspace(-8, 5, 64)[:, None], torch.zeros(1, 32)))
    x[3, ::2], x[4, 5], x[5, 6] = 0.5, float("inf"), 1e38
    x[6] = torch.arange(-16, 16) + 0.5  # halves
    x[6, 0] = 127.0
    weight = quantize(torch.eye(32) * 127, "int8")  # exact: codes 127 and 0, scale 1
    got = quant_linear(x, weight, None, "q8_0")
    want = quantize(x, "q8_0").dequantize() * 127
    torch.testing.assert_close(got, want, rtol=3e-7, atol=0)
