"""Experts on a GPU: routing, sorting, grouped matmuls and sums against definitions in plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.grouped_gemm import ops as plain
from fulgurite.kernels.moe import ops as plain_moe
from fulgurite.kernels.moe import routing as plain_routing
from fulgurite.kernels.moe.ops import GatedActivation, RouterConfig
from fulgurite.quant import quantize
from tests.kernels.moe_cases import GATES, RULES, make_layer, make_routes, route_one
from tests.kernels.triton_support import DEVICE, INTERPRETED, on_device

from fulgurite.kernels.grouped_gemm import triton_grouped_gemm as kernels  # isort: skip  (needs triton)
from fulgurite.kernels.moe import triton_moe, triton_routing  # isort: skip

pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def fields(rule: RouterConfig) -> tuple[object, ...]:
    return plain_routing.astuple(rule)


def check_routes(
    found: tuple[Tensor, Tensor], logits: Tensor, bias: Tensor | None, rule: RouterConfig
) -> None:
    weights, experts = (tensor.cpu() for tensor in found)
    for token in range(len(logits)):
        wanted = route_one(logits[token].tolist(), None if bias is None else bias.tolist(), rule)
        assert experts[token].tolist() == list(wanted)
        assert weights[token].tolist() == pytest.approx(list(wanted.values()), rel=1e-5)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_rule_is_its_definition(name: str, biased: bool) -> None:
    logits = 2 * torch.randn(6, 8)
    logits[4:] = logits[4:].round()  # ties
    bias = 0.5 * torch.randn(8) if biased else None
    found = triton_routing.route(
        logits.to(DEVICE), None if bias is None else bias.to(DEVICE), *fields(RULES[name])
    )
    check_routes(found, logits, bias, RULES[name])


@pytest.mark.parametrize("experts", [1, 3, 17, 60])
def test_any_number_of_experts(experts: int) -> None:
    for per_token in sorted({1, min(8, experts)}):
        logits, rule = torch.randn(5, experts), RouterConfig(per_token, renormalize=True)
        check_routes(
            triton_routing.route(logits.to(DEVICE), None, *fields(rule)), logits, None, rule
        )


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "two_softmax"])
@pytest.mark.filterwarnings("ignore:invalid value")
def test_nan_and_infinity_choose_experts_that_exist(name: str) -> None:
    logits = torch.randn(6, 8)
    logits[0] = math.nan
    logits[1, 5] = math.nan
    logits[2, 2] = math.inf
    logits[3] = -math.inf
    logits[4, 1:7] = -math.inf
    logits[5] = math.inf
    weights, experts = triton_routing.route(logits.to(DEVICE), None, *fields(RULES[name]))
    wanted = plain_routing.reference(logits, None, *fields(RULES[name]))
    assert torch.equal(experts.cpu(), wanted[1])
    torch.testing.assert_close(weights.cpu(), wanted[0], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 18])
def test_routing_from_tokens(tokens: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(tokens, 70).to(dtype), torch.randn(19, 70).to(dtype)
    bias, rule = torch.randn(19).to(dtype), RouterConfig(4, renormalize=True)
    found = triton_routing.route_tokens(*on_device(x, weight, bias), None, *fields(rule))
    check_routes(found, x.float() @ weight.float().T + bias.float(), None, rule)


@pytest.mark.parametrize(
    ("tokens", "experts", "per_token"),
    [(0, 4, 2), (1, 1, 1), (1, 60, 8), (5, 5, 5), (37, 7, 3), (100, 6, 3), (70, 40, 8)],
)
def test_pairs_are_sorted_by_expert(tokens: int, experts: int, per_token: int) -> None:
    chosen = make_routes(tokens, experts, per_token).experts_Tk
    if tokens > 30:
        chosen[3, 1], chosen[7, 0] = -1, experts + 5  # of no expert
    found = triton_moe.sort_by_expert(chosen.to(DEVICE), experts)
    wanted = plain_moe.sort_by_expert_reference(chosen, experts)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_summed(dtype: torch.dtype, weighted: bool) -> None:
    order = plain_moe.sort_by_expert_reference(make_routes(5, 6, 3).experts_Tk, 6)
    y, weights = torch.randn(15, 70).to(dtype), torch.rand(5, 3) if weighted else None
    given = (y, order[4], order[2], order[3])
    found = triton_moe.combine(*on_device(*given), None if weights is None else weights.to(DEVICE))
    wanted = plain_moe.combine_reference(*given, weights)
    torch.testing.assert_close(found.cpu(), wanted)


# ---- grouped matmul --------------------------------------------------------------------------------


def check_matmul(
    shape: tuple[int, int, int, int, int],
    gate: GatedActivation,
    dtype: torch.dtype,
    how: str = "random",
    bias: bool = False,
    factors: bool = False,
    format: str | None = None,
    activations: str = "none",
) -> None:
    """Both matmuls of a layer against the reference in float64."""
    tokens, experts, per_token, hidden, inner = shape
    layer, routes = (
        make_layer(experts, hidden, inner, gate, bias),
        make_routes(tokens, experts, per_token, how),
    )
    order = plain_moe.ExpertOrder(*plain_moe.sort_by_expert_reference(routes.experts_Tk, experts))
    x = torch.randn(tokens, hidden).to(dtype)
    data, scales, exact = layer.gate_up.to(dtype), [], layer.gate_up.to(dtype).double()
    if format is not None:
        packed = quantize(layer.gate_up.float(), format)
        data, scales = packed.packed, list(packed.scales.values())
        exact = packed.dequantize(torch.float32).double()
    first = None if layer.gate_up_bias is None else layer.gate_up_bias.to(dtype)
    scale = torch.rand(tokens * per_token) + 0.5 if factors else None
    place = [
        None if t is None else t.to(DEVICE) for t in (order.token_S, None, scale, order.offsets_E)
    ]
    found = kernels.grouped_gemm(
        x.to(DEVICE), *place, data.to(DEVICE), [s.to(DEVICE) for s in scales], format or "dense",
        None if first is None else first.to(DEVICE), activations, gate.kind, gate.alpha, gate.limit,
    )  # fmt: skip
    wide = None if scale is None else scale.double()
    given = plain.fake_quantize_activations(x, activations).double()
    wanted = plain.reference(
        given, order.token_S, None, wide, order.offsets_E, exact, [], "dense",
        None if first is None else first.double(), "none", gate.kind, gate.alpha, gate.limit,
    )  # fmt: skip
    assert found.dtype == dtype and found.shape == wanted.shape
    if wanted.numel():
        error = (found.cpu().double() - wanted).abs().max().item()
        assert error <= 6 * torch.finfo(dtype).eps * max(1.0, wanted.abs().max().item())


SHAPES = [  # tokens, experts, experts a token, hidden, inner
    (0, 4, 2, 16, 16),
    (1, 1, 1, 1, 1),
    (2, 7, 3, 33, 17),
    (13, 3, 2, 130, 40),
    (40, 2, 1, 64, 70),
    (70, 1, 1, 40, 24),  # many rows: `grouped_dense.py`
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gathered_and_gated(shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    check_matmul(shape, GATES[0], dtype)


@pytest.mark.parametrize("gate", [*GATES, GatedActivation("none")], ids=lambda gate: gate.kind)
def test_gates_biases_and_factors(gate: GatedActivation) -> None:
    check_matmul((5, 4, 2, 40, 24), gate, torch.float32, bias=True, factors=True)


@pytest.mark.parametrize("how", ["same", "even"])
def test_all_at_one_expert_and_experts_without(how: str) -> None:
    check_matmul((19, 6, 2, 40, 24), GATES[0], torch.float32, how)


FORMATS = ["fp8_e4m3_row", "fp8_e4m3_1x128", "fp8_e4m3_128x128", "nvfp4", "mxfp4", "mxfp8_e4m3", "int8",
           "int4_g128", "int4_g32", "int4_g32_asym", "int4_g32_min", "int8_g16", "int8_g32"]  # fmt: skip


@pytest.mark.parametrize(
    ("format", "tokens"),
    [*((format, 3) for format in FORMATS), ("nvfp4", 40), ("fp8_e4m3_128x128", 40),
     ("int8_g16", 40), ("int8_g32", 40)],
)  # fmt: skip
def test_packed_weights(format: str, tokens: int) -> None:
    check_matmul((tokens, 3, 2, 256, 128), GATES[0], torch.bfloat16, format=format)


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3_128x128", "int8"])
def test_packed_weights_with_all_that_follows(format: str) -> None:
    check_matmul(
        (5, 3, 2, 128, 128), GATES[3], torch.bfloat16, bias=True, factors=True, format=format
    )


@pytest.mark.parametrize(
    ("format", "activations"), [("fp8_e4m3_128x128", "fp8_e4m3_1x128"), ("int8", "int8")]
)
@pytest.mark.parametrize("bias", [False, True])
def test_quantized_activations(format: str, activations: str, bias: bool) -> None:
    check_matmul(
        (9, 3, 2, 128, 128), GATES[3] if bias else GATES[0], torch.bfloat16, bias=bias,
        factors=bias, format=format, activations=activations,
    )  # fmt: skip


def test_rows_of_no_expert_are_zero() -> None:
    layer = make_layer(3, 20, 12, GATES[3], bias=True).to(torch.float32, DEVICE)
    order = plain_moe.sort_by_expert_reference(torch.tensor([[0, 7], [5, -1], [2, 1]]), 3)
    _, offsets, tokens, _, _ = on_device(*order)
    found = kernels.grouped_gemm(
        torch.randn(3, 20, device=DEVICE), tokens, None, None, offsets, layer.gate_up, [], "dense",
        layer.gate_up_bias, "none", "clamped", 1.7, 0.7,
    )  # fmt: skip
    assert torch.equal(found[3:], torch.zeros_like(found[3:])) and (found[:3] != 0).any(-1).all()


def test_weights_turned_over() -> None:
    layer, offsets = (
        make_layer(3, 40, 24, GATES[0]).to(torch.float32),
        torch.tensor([2, 2, 9]).int(),
    )
    rows = torch.randn(9, 48)
    arguments = (
        offsets,
        layer.gate_up.transpose(1, 2),
        [],
        "dense",
        None,
        "none",
        "none",
        0.0,
        0.0,
    )
    moved = [a.to(DEVICE) if isinstance(a, Tensor) else a for a in arguments]
    found = kernels.grouped_gemm(rows.to(DEVICE), None, None, None, *moved)
    wanted = plain.reference(rows, None, None, None, *arguments)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_weights(dtype: torch.dtype) -> None:
    offsets = torch.tensor([3, 3, 40, 41]).int()
    a, b = torch.randn(41, 37).to(dtype), torch.randn(41, 70).to(dtype)
    found = kernels.grouped_wgrad(*on_device(a, b, offsets)).cpu()
    wanted = plain.wgrad_reference(a.double(), b.double(), offsets)
    assert (found.double() - wanted).abs().max() <= 4 * torch.finfo(dtype).eps * wanted.abs().max()
