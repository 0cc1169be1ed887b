"""Experts with quantized weights: equal to dequantized ones; recorded decode steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite import native, replay
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.grouped_gemm import reference
from fulgurite.kernels.grouped_gemm.args import GroupedGemmArgs
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm
from fulgurite.kernels.moe.ops import fused_experts, sort_by_expert
from fulgurite.kernels.moe.router_config import RouterConfig, Routes
from fulgurite.kernels.moe.routing import route_tokens
from fulgurite.quant import QuantTensor, quantize
from tests.kernels.moe.cases import GATES, make_layer, make_routes, run_experts_one_by_one

needs_compiler = pytest.mark.skipif(native.find_compiler() is None, reason="needs a C++ compiler")
FORMATS = [
    "q4_0",
    "q8_0",
    "int8",
    "int4_g128",
    "fp8_e4m3_row",
    "fp8_e4m3_128x128",
    "nvfp4",
    "mxfp4",
]


def quantized_layer(
    format: str, gate: GatedActivation, bias: bool = False
) -> tuple[QuantTensor, QuantTensor, object]:
    """Quantized weights, and the layer of their dequantized values."""
    layer = make_layer(5, 128, 128, gate, bias)
    up, down = (quantize(w.float(), format) for w in (layer.gate_up, layer.down))
    exact = type(layer)(
        up.dequantize().double(),
        down.dequantize().double(),
        layer.gate_up_bias,
        layer.down_bias,
        gate,
    )
    return up, down, exact


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_quantized_experts_equal_dequantized_ones(format: str, tokens: int) -> None:
    up, down, exact = quantized_layer(format, GATES[0])
    routes, x = make_routes(tokens, 5, 2), torch.randn(tokens, 128)
    actual = fused_experts(x, routes, up, down)
    expected = run_experts_one_by_one(
        x.double(), Routes(routes.weights_Tk.double(), routes.experts_Tk), exact
    )
    assert (actual.double() - expected).abs().max() <= 2e-5 * expected.abs().max()


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.kind)
@pytest.mark.parametrize("apply_router_weight_on_input", [False, True])
def test_gates_biases_and_router_weight_on_input(
    gate: GatedActivation, apply_router_weight_on_input: bool
) -> None:
    up, down, exact = quantized_layer("q8_0", gate, bias=True)
    routes, x = make_routes(7, 5, 2), torch.randn(7, 128).bfloat16()
    actual = fused_experts(
        x, routes, up, down, gate, gate_up_bias=exact.gate_up_bias.float(),
        down_bias=exact.down_bias.float(), apply_router_weight_on_input=apply_router_weight_on_input,
    )  # fmt: skip
    double = Routes(routes.weights_Tk.double(), routes.experts_Tk)
    expected = run_experts_one_by_one(x.double(), double, exact, apply_router_weight_on_input)
    assert (actual.double() - expected).abs().max() <= 8 * 2**-8 * expected.abs().max()


@pytest.mark.parametrize(
    ("format", "activations"),
    [("q4_0", "q8_0"), ("fp8_e4m3_row", "fp8_e4m3_row"), ("fp8_e4m3_row", "q8_0")],
)
@pytest.mark.parametrize("tokens", [1, 20])
def test_quantized_activations_equal_the_reference(
    format: str, activations: str, tokens: int
) -> None:
    up, _, _ = quantized_layer(format, GATES[0])
    routes, x = make_routes(tokens, 5, 2), torch.randn(tokens, 128)
    order = sort_by_expert(routes.experts_Tk, 5)
    actual = grouped_gemm(
        x, order.offsets_E, up, gate=GATES[0], row_indices_S=order.token_S, activations=activations
    )
    args = GroupedGemmArgs(
        x, order.token_S, None, order.offsets_E, up.packed, list(up.scales.values()),
        up.format.name, None, activations, GATES[0],
    )  # fmt: skip
    expected = reference.grouped_gemm(args)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_gradient_of_x_flows_through_the_dequantized_weight() -> None:
    up, down, exact = quantized_layer("int8", GATES[0])
    routes = make_routes(4, 5, 2)
    x = torch.randn(4, 128, requires_grad=True)
    (actual,) = torch.autograd.grad(fused_experts(x, routes, up, down).square().sum(), x)
    wide = x.detach().double().requires_grad_()
    double = Routes(routes.weights_Tk.double(), routes.experts_Tk)
    (expected,) = torch.autograd.grad(
        run_experts_one_by_one(wide, double, exact).square().sum(), wide
    )
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@needs_compiler
@pytest.mark.parametrize("format", ["dense", "q4_0"])
@pytest.mark.parametrize("apply_router_weight_on_input", [False, True])
def test_a_recorded_step_routes_again(format: str, apply_router_weight_on_input: bool) -> None:
    if format == "dense":
        layer = make_layer(5, 128, 128, GATES[0]).to(torch.float32)
        up, down = layer.gate_up, layer.down
    else:
        up, down, _ = quantized_layer(format, GATES[0])
    router, config = torch.randn(5, 128), RouterConfig(2, renormalize=True)
    activations = ("none", "none") if format == "dense" else ("q8_0", "q8_0")

    def step(x: Tensor) -> Tensor:
        routes = route_tokens(x, router, config)
        return fused_experts(
            x,
            routes,
            up,
            down,
            apply_router_weight_on_input=apply_router_weight_on_input,
            activations=activations,
        )

    with torch.no_grad():
        x = torch.randn(3, 128)
        recorded = replay.record(step, x)
        for _ in range(3):
            x.copy_(torch.randn(3, 128))
            assert torch.equal(recorded(), step(x.clone()))
