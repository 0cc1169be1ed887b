"""Fused projections of quantized linears: equal to the modules called one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite import native, replay
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.quant import quantize

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")


def quantized(rows, columns=64, format="q4_1", bias=False):
    weight = quantize(torch.randn(rows, columns), format)
    return QuantLinear(weight, torch.randn(rows) if bias else None)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_linears_equal_the_modules(tokens, bias):
    modules = [quantized(rows, bias=bias) for rows in (48, 16, 16)]
    x = torch.randn(tokens, 64)
    with torch.no_grad():
        for out, module in zip(fused_projections.fused_linears(x, modules), modules, strict=True):
            torch.testing.assert_close(out, module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_fused_gate_up(activation, tokens):
    gate, up = quantized(48), quantized(48)
    x = torch.randn(tokens, 64)
    with torch.no_grad():
        expected = ops.elementwise_binary_reference(gate(x), up(x), activation)
        out = fused_projections.fused_gate_up(x, gate, up, activation)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "modules",
    [
        [nn.Linear(64, 8), nn.Linear(64, 5)],
        [quantized(48), nn.Linear(64, 16)],
        [quantized(48), quantized(16, format="q8_0")],
        [quantized(24), quantized(16)],
        [quantized(48), quantized(16, bias=True)],
    ],
    ids=["dense", "half quantized", "two formats", "odd rows", "one bias"],
)
def test_linears_that_cannot_be_fused(modules):
    x = torch.randn(3, 64)
    with torch.no_grad():
        for _ in range(2):
            for out, module in zip(
                fused_projections.fused_linears(x, modules), modules, strict=True
            ):
                torch.testing.assert_close(out, module(x), rtol=1e-6, atol=1e-6)


def test_replaced_weight_is_used():
    modules = [quantized(16), quantized(16)]
    x = torch.randn(2, 64)
    with torch.no_grad():
        fused_projections.fused_linears(x, modules)
        modules[1].weight = nn.Parameter(quantize(torch.randn(16, 64), "q4_1"), requires_grad=False)
        out = fused_projections.fused_linears(x, modules)
        torch.testing.assert_close(out[1], modules[1](x), rtol=1e-6, atol=1e-6)


def test_weights_loaded_in_place_are_used():
    """Weights, scales and biases written in place, and fewer modules than in the previous call."""
    x = torch.randn(2, 64)
    modules, sources = (
        [quantized(16, format="nvfp4", bias=True) for _ in range(3)] for _ in range(2)
    )
    for module in (*modules, *sources):
        module.activations = "q8_0"
    with torch.no_grad():
        fused_projections.fused_linears(x, modules)
        for module, source in zip(modules, sources, strict=True):
            module.load_state_dict(source.state_dict())
        for out, source in zip(fused_projections.fused_linears(x, modules), sources, strict=True):
            torch.testing.assert_close(out, source(x), rtol=1e-6, atol=1e-6)
        modules[2].bias.add_(1)
        torch.testing.assert_close(fused_projections.fused_linears(x, modules)[2], modules[2](x))
        assert torch.equal(
            fused_projections.fused_linears(x, modules[:2])[1],
            fused_projections.fused_linears(x, modules)[1],
        )


@pytest.mark.parametrize("bias", [False, True])
def test_one_native_call(bias):
    modules = [quantized(rows, bias=bias) for rows in (48, 16, 16)]
    x = torch.randn(1, 64)
    with torch.no_grad():
        recorded = replay.record(lambda: fused_projections.fused_linears(x, modules))
    assert len(recorded.calls) == 1
