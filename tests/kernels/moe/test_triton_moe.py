"""Experts on a GPU: routing, sorting, grouped GEMMs and sums against definitions in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.elementwise.gated_activation import UNGATED, GatedActivation
from fulgurite.kernels.gemm.reference import fake_quantize_activations
from fulgurite.kernels.grouped_gemm import reference as gemm_reference
from fulgurite.kernels.grouped_gemm.args import DENSE, GroupedGemmArgs
from fulgurite.kernels.grouped_gemm.triton_grouped_gemm import grouped_gemm
from fulgurite.kernels.moe import reference
from fulgurite.kernels.moe.ops import ExpertOrder
from fulgurite.kernels.moe.router_config import RouterConfig
from fulgurite.kernels.moe.triton_moe import combine, sort_by_expert
from fulgurite.kernels.moe.triton_routing import route, route_tokens
from fulgurite.quant import quantize
from tests.kernels.grouped_gemm.cases import map_tensors, to_device, with_quantized_weight
from tests.kernels.moe.cases import GATES, ROUTERS, make_layer, make_routes, route_token
from tests.kernels.triton_support import DEVICE, INTERPRETED, on_device

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_routes(
    routes: tuple[Tensor, Tensor], logits: Tensor, bias: Tensor | None, config: RouterConfig
) -> None:
    weights, experts = (tensor.cpu() for tensor in routes)
    for token in range(len(logits)):
        expected = route_token(
            logits[token].tolist(), None if bias is None else bias.tolist(), config
        )
        assert experts[token].tolist() == list(expected)
        assert weights[token].tolist() == pytest.approx(list(expected.values()), rel=1e-5)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_routes_equal_the_definition(name: str, biased: bool) -> None:
    logits = 2 * torch.randn(6, 8)
    logits[4:] = logits[4:].round()  # ties
    bias = 0.5 * torch.randn(8) if biased else None
    config = ROUTERS[name]
    routes = route(logits.to(DEVICE), None if bias is None else bias.to(DEVICE), config)
    check_routes(routes, logits, bias, config)


@pytest.mark.parametrize("experts", [1, 3, 17, 60])
def test_any_number_of_experts(experts: int) -> None:
    for top_k in sorted({1, min(8, experts)}):
        logits, config = torch.randn(5, experts), RouterConfig(top_k, renormalize=True)
        check_routes(route(logits.to(DEVICE), None, config), logits, None, config)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "top2_softmax"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinity_select_experts_that_exist(name: str) -> None:
    logits = torch.randn(6, 8)
    logits[0] = math.nan
    logits[1, 5] = math.nan
    logits[2, 2] = math.inf
    logits[3] = -math.inf
    logits[4, 1:7] = -math.inf
    logits[5] = math.inf
    weights, experts = route(logits.to(DEVICE), None, ROUTERS[name])
    expected = reference.route(logits, None, ROUTERS[name])
    assert torch.equal(experts.cpu(), expected[1])
    torch.testing.assert_close(weights.cpu(), expected[0], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 18])
def test_routing_from_tokens(tokens: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, 70).to(dtype), torch.randn(19, 70).to(dtype)
    bias, config = torch.randn(19).to(dtype), RouterConfig(4, renormalize=True)
    routes = route_tokens(*on_device(x, weight, bias), None, config)
    check_routes(routes, x.float() @ weight.float().T + bias.float(), None, config)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(0, 4, 2), (1, 1, 1), (1, 60, 8), (5, 5, 5), (37, 7, 3), (100, 6, 3), (70, 40, 8)],
)
def test_pairs_are_sorted_by_expert(tokens: int, experts: int, top_k: int) -> None:
    selected = make_routes(tokens, experts, top_k).experts_Tk
    if tokens > 30:
        selected[3, 1], selected[7, 0] = -1, experts + 5  # no experts
    actual = sort_by_expert(selected.to(DEVICE), experts)
    expected = reference.sort_by_expert(selected, experts)
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_combined(dtype: torch.dtype, weighted: bool) -> None:
    order = reference.sort_by_expert(make_routes(5, 6, 3).experts_Tk, 6)
    y, weights = torch.randn(15, 70).to(dtype), torch.rand(5, 3) if weighted else None
    given = (y, order[4], order[2], order[3])
    actual = combine(*on_device(*given), None if weights is None else weights.to(DEVICE))
    expected = reference.combine(*given, weights)
    torch.testing.assert_close(actual.cpu(), expected)


# ---- grouped GEMM ----------------------------------------------------------------------------------


def check_gemm(
    shape: tuple[int, int, int, int, int],
    gate: GatedActivation,
    dtype: torch.dtype,
    how: str = "random",
    bias: bool = False,
    row_weights: bool = False,
    format: str | None = None,
    activations: str = "none",
) -> None:
    """The gate_up GEMM of a layer against the reference in float64."""
    tokens, experts, top_k, hidden, intermediate = shape
    layer = make_layer(experts, hidden, intermediate, gate, bias)
    routes = make_routes(tokens, experts, top_k, how)
    order = ExpertOrder(*reference.sort_by_expert(routes.experts_Tk, experts))
    x, weight = torch.randn(tokens, hidden).to(dtype), layer.gate_up.to(dtype)
    gate_up_bias = None if layer.gate_up_bias is None else layer.gate_up_bias.to(dtype)
    weights_S = torch.rand(tokens * top_k) + 0.5 if row_weights else None
    dense = GroupedGemmArgs(
        x, order.token_S, weights_S, order.offsets_E, weight, [], DENSE, gate_up_bias, "none", gate
    )
    args = dense
    if format is not None:
        packed = quantize(layer.gate_up.float(), format)
        args = replace(with_quantized_weight(dense, packed), activations=activations)
        dense = replace(dense, data=packed.dequantize(torch.float32))
    actual = grouped_gemm(to_device(args, DEVICE))
    rounded = replace(dense, x=fake_quantize_activations(x, activations))
    expected = gemm_reference.grouped_gemm(map_tensors(rounded, Tensor.double))
    assert actual.dtype == dtype and actual.shape == expected.shape
    if expected.numel():
        error = (actual.cpu().double() - expected).abs().max().item()
        assert error <= 6 * torch.finfo(dtype).eps * max(1.0, expected.abs().max().item())


SHAPES = [  # tokens, experts, top_k, hidden, intermediate
    (0, 4, 2, 16, 16),
    (1, 1, 1, 1, 1),
    (2, 7, 3, 33, 17),
    (13, 3, 2, 130, 40),
    (40, 2, 1, 64, 70),
    (70, 1, 1, 40, 24),  # many rows: `triton_dense.py`
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_and_gated(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check_gemm(shape, GATES[0], dtype)


@pytest.mark.parametrize("gate", [*GATES, GatedActivation("none")], ids=lambda gate: gate.kind)
def test_gates_biases_and_row_weights(gate: GatedActivation) -> None:
    check_gemm((5, 4, 2, 40, 24), gate, torch.float32, bias=True, row_weights=True)


@pytest.mark.parametrize("how", ["same", "even"])
def test_all_at_one_expert_and_empty_experts(how: str) -> None:
    check_gemm((19, 6, 2, 40, 24), GATES[0], torch.float32, how)


FORMATS = ["fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "nvfp4", "mxfp4", "mxfp8_e4m3", "int8",
           "int4_g128", "int4_g32", "int4_g32_asym", "int4_g32_min", "int8_g16", "int8_g32"]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "tokens"),
    [*((format, 3) for format in FORMATS), ("nvfp4", 40), ("fp8_e4m3_128x128", 40),
     ("int8_g16", 40), ("int8_g32", 40)],
)  # fmt: skip
def test_quantized_weights(format: str, tokens: int) -> None:
    check_gemm((tokens, 3, 2, 256, 128), GATES[0], torch.bfloat16, format=format)


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3_128x128", "int8"])
def test_quantized_weights_with_the_whole_epilogue(format: str) -> None:
    check_gemm(
        (5, 3, 2, 128, 128), GATES[3], torch.bfloat16, bias=True, row_weights=True, format=format
    )


@pytest.mark.parametrize(
    ("format", "activations"), [("fp8_e4m3_128x128", "fp8_e4m3_1x128"), ("int8", "int8")]
)
@pytest.mark.parametrize("bias", [False, True])
def test_quantized_activations(format: str, activations: str, bias: bool) -> None:
    check_gemm(
        (9, 3, 2, 128, 128), GATES[3] if bias else GATES[0], torch.bfloat16, bias=bias,
        row_weights=bias, format=format, activations=activations,
    )  # fmt: skip


def test_rows_without_an_expert_are_zero() -> None:
    layer = make_layer(3, 20, 12, GATES[3], bias=True).to(torch.float32, DEVICE)
    order = reference.sort_by_expert(torch.tensor([[0, 7], [5, -1], [2, 1]]), 3)
    _, offsets, tokens, _, _ = on_device(*order)
    args = GroupedGemmArgs(
        torch.randn(3, 20, device=DEVICE), tokens, None, offsets, layer.gate_up, [], DENSE,
        layer.gate_up_bias, "none", GATES[3],
    )  # fmt: skip
    actual = grouped_gemm(args)
    assert torch.equal(actual[3:], torch.zeros_like(actual[3:])) and (actual[:3] != 0).any(-1).all()


def test_transposed_weights() -> None:
    layer = make_layer(3, 40, 24, GATES[0]).to(torch.float32)
    offsets = torch.tensor([2, 2, 9]).int()
    weight = layer.gate_up.transpose(1, 2)
    args = GroupedGemmArgs(
        torch.randn(9, 48), None, None, offsets, weight, [], DENSE, None, "none", UNGATED
    )
    actual = grouped_gemm(to_device(args, DEVICE))
    expected = gemm_reference.grouped_gemm(args)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-5)
