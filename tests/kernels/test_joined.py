"""Linears in one pass: equal to the modules called one by one, packed or not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite import native, replay
from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.quant import quantize

pytestmark = pytest.mark.skipif(native.compiler() is None, reason="needs a C++ compiler")


def packed(rows, columns=64, format="q4_1", bias=False):
    weight = quantize(torch.randn(rows, columns), format)
    return QuantLinear(weight, torch.randn(rows) if bias else None)


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_joined_linears_are_the_modules(tokens, bias):
    modules = [packed(rows, bias=bias) for rows in (48, 16, 16)]
    x = torch.randn(tokens, 64)
    with torch.no_grad():
        for found, module in zip(fused_projections.linears(x, modules), modules, strict=True):
            torch.testing.assert_close(found, module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu"])
@pytest.mark.parametrize("tokens", [1, 33])
def test_gated(activation, tokens):
    gate, up = packed(48), packed(48)
    x = torch.randn(tokens, 64)
    with torch.no_grad():
        plain = ops.plain_combine(gate(x), up(x), activation)
        found = fused_projections.gated(x, gate, up, activation)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "modules",
    [
        [nn.Linear(64, 8), nn.Linear(64, 5)],
        [packed(48), nn.Linear(64, 16)],
        [packed(48), packed(16, format="q8_0")],
        [packed(24), packed(16)],
        [packed(48), packed(16, bias=True)],
    ],
    ids=["dense", "half packed", "two formats", "odd rows", "one bias"],
)
def test_what_cant_be_joined_is_called_apart(modules):
    x = torch.randn(3, 64)
    with torch.no_grad():
        for _ in range(2):
            for found, module in zip(fused_projections.linears(x, modules), modules, strict=True):
                torch.testing.assert_close(found, module(x), rtol=1e-6, atol=1e-6)


def test_a_new_weight_is_seen():
    modules = [packed(16), packed(16)]
    x = torch.randn(2, 64)
    with torch.no_grad():
        fused_projections.linears(x, modules)
        modules[1].weight = nn.Parameter(quantize(torch.randn(16, 64), "q4_1"), requires_grad=False)
        found = fused_projections.linears(x, modules)
        torch.testing.assert_close(found[1], modules[1](x), rtol=1e-6, atol=1e-6)


def test_what_is_loaded_into_the_modules_is_seen():
    """Weights, scales and biases written to in place, and fewer modules than the call before."""
    x = torch.randn(2, 64)
    modules, others = ([packed(16, format="nvfp4", bias=True) for _ in range(3)] for _ in range(2))
    for module in (*modules, *others):
        module.activations = "q8_0"
    with torch.no_grad():
        fused_projections.linears(x, modules)
        for module, other in zip(modules, others, strict=True):
            module.load_state_dict(other.state_dict())
        for found, other in zip(fused_projections.linears(x, modules), others, strict=True):
            torch.testing.assert_close(found, other(x), rtol=1e-6, atol=1e-6)
        modules[2].bias.add_(1)
        torch.testing.assert_close(fused_projections.linears(x, modules)[2], modules[2](x))
        assert torch.equal(
            fused_projections.linears(x, modules[:2])[1], fused_projections.linears(x, modules)[1]
        )


@pytest.mark.parametrize("bias", [False, True])
def test_one_native_call(bias):
    modules = [packed(rows, bias=bias) for rows in (48, 16, 16)]
    x = torch.randn(1, 64)
    with torch.no_grad():
        recorded = replay.record(lambda: fused_projections.linears(x, modules))
    assert len(recorded.calls) == 1
