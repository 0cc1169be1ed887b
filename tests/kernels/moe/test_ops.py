"""Routing, sorting, experts and their sum against definitions written one token at a time."""

from __future__ import annotations

import math
from dataclasses import astuple
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, FormatError
from fulgurite.kernels.elementwise.gated_activation import GatedActivation
from fulgurite.kernels.grouped_gemm.ops import grouped_gemm, grouped_gemm_op
from fulgurite.kernels.moe import reference
from fulgurite.kernels.moe.ops import (
    ExpertOrder,
    combine,
    combine_op,
    experts_forward,
    fused_experts,
    gather_weights,
    sort_by_expert,
    sort_by_expert_op,
)
from fulgurite.kernels.moe.router_config import RouterConfig, Routes
from fulgurite.kernels.moe.routing import route, route_op, route_tokens
from fulgurite.quant import quantize
from tests.kernels.moe.cases import (
    GATES,
    ROUTERS,
    make_layer,
    make_routes,
    route_token,
    run_experts_one_by_one,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_routes(
    routes: Routes,
    logits: Tensor,
    bias: Tensor | None,
    config: RouterConfig,
    rel: float = 1e-5,
) -> None:
    assert routes.weights_Tk.shape == routes.experts_Tk.shape == (len(logits), config.top_k)
    assert routes.experts_Tk.dtype == torch.int64
    for token in range(len(logits)):
        expected = route_token(
            logits[token].tolist(), None if bias is None else bias.tolist(), config
        )
        assert routes.experts_Tk[token].tolist() == list(expected)
        assert routes.weights_Tk[token].tolist() == pytest.approx(list(expected.values()), rel=rel)


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_routes_equal_the_definition(name: str, biased: bool, how: str) -> None:
    logits = 2 * torch.randn(37, 8)
    bias = 0.5 * torch.randn(8) if biased else None
    if how == "kernel":
        routes = route(logits, ROUTERS[name], bias)
    else:
        routes = Routes(*reference.route(logits, bias, ROUTERS[name]))
    check_routes(routes, logits, bias, ROUTERS[name])


@pytest.mark.parametrize("experts", [1, 3, 15, 16, 17, 60, 128, 257])
def test_any_number_of_experts(experts: int) -> None:
    for top_k in sorted({1, min(8, experts), experts}):
        logits = torch.randn(5, experts)
        config = RouterConfig(top_k, "softmax", renormalize=True)
        check_routes(route(logits, config), logits, None, config)


@pytest.mark.parametrize("name", ROUTERS)
def test_ties_go_to_the_smaller_index(name: str) -> None:
    logits = torch.randint(-1, 2, (64, 8)).float()
    logits[0] = 0.0
    logits[1] = -0.0
    logits[1, ::2] = 0.0
    check_routes(route(logits, ROUTERS[name]), logits, None, ROUTERS[name])


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("biased", [False, True])
def test_nan_and_infinity_select_experts_that_exist(name: str, biased: bool) -> None:
    logits = torch.randn(6, 8)
    logits[0] = math.nan
    logits[1, 5] = math.nan
    logits[2, 2] = math.inf
    logits[3] = -math.inf
    logits[4, 1:7] = -math.inf
    logits[5] = math.inf
    bias = torch.randn(8) if biased else None
    config = ROUTERS[name]
    actual = route(logits, config, bias)
    expected = reference.route(logits, bias, config)
    assert (actual.experts_Tk.sort(dim=-1).values.diff(dim=-1) > 0).all(), "an expert twice"
    assert ((actual.experts_Tk >= 0) & (actual.experts_Tk < 8)).all()
    assert torch.equal(actual.experts_Tk, expected[1])
    torch.testing.assert_close(actual.weights_Tk, expected[0], equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
@pytest.mark.parametrize("hidden", [1, 16, 37, 130])
def test_routing_from_tokens_is_routing_of_float32_logits(
    hidden: int, tokens: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(tokens, hidden).to(dtype), torch.randn(19, hidden).to(dtype)
    bias, config = torch.randn(19).to(dtype), RouterConfig(4, "softmax", renormalize=True)
    actual = route_tokens(x, weight, config, bias)
    check_routes(actual, x.float() @ weight.float().T + bias.float(), None, config, rel=3e-5)


def test_tokens_that_are_rows_of_a_larger_tensor() -> None:
    x, weight, config = torch.randn(6, 40)[::2, 3:36], torch.randn(9, 70)[:, :33], RouterConfig(2)
    check_routes(route_tokens(x, weight, config), x @ weight.T, None, config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (RouterConfig(9), "top_k=9, and 8 of 8"),
        (RouterConfig(0), "top_k=0"),
        (RouterConfig(3, num_groups=4, topk_groups=1), "top_k=3, and 2 of 8"),
        (RouterConfig(1, num_groups=3), "8 experts can't be selected from 1 of 3"),
        (RouterConfig(1, "tanh"), "scoring='tanh'"),
        (RouterConfig(1, group_score="sum"), "group_score='sum'"),
    ],
)
def test_a_config_that_does_not_fit_raises(config: RouterConfig, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        route(torch.zeros(2, 8), config)


@pytest.mark.parametrize("name", ROUTERS)
def test_gradients_of_routing(name: str) -> None:
    config = ROUTERS[name]
    logits = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    experts = route(logits, config).experts_Tk
    if config.topk_before_scoring:
        weights = reference.compute_weights(logits.gather(-1, experts), config)
    else:
        weights = reference.compute_weights(
            reference.apply_scoring(logits, config).gather(-1, experts), config
        )
    seed = torch.randn_like(weights)
    (expected,) = torch.autograd.grad(weights, logits, seed)
    (actual,) = torch.autograd.grad(route(logits, config).weights_Tk, logits, seed)
    torch.testing.assert_close(actual, expected)


# ---- sorting ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [0, 1, 2, 13, 257])
@pytest.mark.parametrize(("experts", "top_k"), [(1, 1), (7, 3), (5, 5), (128, 8), (300, 2)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_pairs_are_sorted_by_expert(
    tokens: int, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    selected = make_routes(tokens, experts, top_k).experts_Tk.to(dtype)
    check_order(sort_by_expert(selected, experts), selected, experts)


def check_order(order: ExpertOrder, selected: Tensor, experts: int) -> None:
    tokens, top_k = selected.shape
    pairs = [(int(selected[t, j]), t, j) for t in range(tokens) for j in range(top_k)]
    key = {expert: expert for expert in range(experts)}
    expected = sorted(pairs, key=lambda pair: (key.get(pair[0], experts), pair[1], pair[2]))
    counts = [sum(pair[0] == expert for pair in pairs) for expert in range(experts)]
    assert order.counts_E.tolist() == counts
    assert order.offsets_E.tolist() == [sum(counts[: e + 1]) for e in range(experts)]
    assert order.token_S.tolist() == [pair[1] for pair in expected]
    assert order.slot_S.tolist() == [pair[2] for pair in expected]
    assert order.position_Tk.shape == selected.shape
    for row, (_, token, slot) in enumerate(expected):
        assert order.position_Tk[token, slot] == row
    assert all(field.dtype == torch.int32 for field in order)


def test_indices_without_an_expert_come_last() -> None:
    selected = torch.tensor([[3, -1, 0], [9, 3, 2**40], [1, 4, -(2**40)]])
    check_order(sort_by_expert(selected, 4), selected, 4)


def test_pairs_as_a_slice() -> None:
    selected = torch.randint(0, 6, (9, 8))[::2, 1:4]
    check_order(sort_by_expert(selected, 6), selected, 6)


def test_float_experts_raise() -> None:
    with pytest.raises(ArgumentError, match="int64"):
        sort_by_expert(torch.zeros(3, 2), 4)


# ---- experts ---------------------------------------------------------------------------------------


def check_experts(
    dtype: torch.dtype,
    shape: tuple[int, int, int, int, int],
    gate: GatedActivation,
    how: str = "random",
    bias: bool = False,
    apply_router_weight_on_input: bool = False,
) -> None:
    """Against float64: no worse than a plain loop in the same dtype, and some rounding."""
    tokens, experts, top_k, hidden, intermediate = shape
    layer, routes = (
        make_layer(experts, hidden, intermediate, gate, bias),
        make_routes(tokens, experts, top_k, how),
    )
    narrow, x = layer.to(dtype), torch.randn(tokens, hidden).to(dtype)
    actual = fused_experts(
        x,
        routes,
        narrow.gate_up,
        narrow.down,
        gate,
        gate_up_bias=narrow.gate_up_bias,
        down_bias=narrow.down_bias,
        apply_router_weight_on_input=apply_router_weight_on_input,
    )
    wide = Routes(routes.weights_Tk.double(), routes.experts_Tk)
    exact = run_experts_one_by_one(
        x.double(), wide, narrow.to(torch.float64), apply_router_weight_on_input
    )
    assert actual.dtype == dtype and actual.shape == x.shape
    if not tokens:
        return
    allowed = 8 * torch.finfo(dtype).eps * max(1.0, exact.abs().max().item())
    assert (actual.double() - exact).abs().max() <= allowed


SHAPES = [  # tokens, experts, experts a token, hidden, intermediate
    (0, 4, 2, 16, 16),
    (1, 1, 1, 1, 1),
    (1, 8, 2, 64, 32),
    (2, 7, 3, 33, 17),
    (5, 5, 5, 48, 21),
    (13, 6, 2, 96, 40),
    (41, 3, 1, 50, 31),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.kind)
def test_experts(
    shape: tuple[int, int, int, int, int], gate: GatedActivation, dtype: torch.dtype
) -> None:
    check_experts(dtype, shape, gate)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("apply_router_weight_on_input", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.kind)
def test_biases_and_router_weight_on_input(
    gate: GatedActivation, apply_router_weight_on_input: bool, dtype: torch.dtype
) -> None:
    for tokens in (1, 3, 40):
        check_experts(
            dtype, (tokens, 6, 2, 40, 24), gate, "random", True, apply_router_weight_on_input
        )


@pytest.mark.parametrize("how", ["same", "even"])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_all_tokens_at_one_expert_and_empty_experts(how: str, tokens: int) -> None:
    check_experts(torch.float32, (tokens, 6, 2, 40, 24), GATES[0], how)


def test_an_unselected_expert_may_overflow() -> None:
    layer = make_layer(4, 16, 8, GATES[0]).to(torch.float32)
    layer.down[3] = math.inf
    for tokens in (1, 50):
        routes = Routes(torch.ones(tokens, 2), torch.tensor([[0, 1]] * tokens))
        out = fused_experts(torch.randn(tokens, 16), routes, layer.gate_up, layer.down)
        assert out.isfinite().all()


def test_nan_stays_with_its_token() -> None:
    layer = make_layer(4, 40, 24, GATES[0]).to(torch.float32)
    for tokens in (3, 70):
        x = torch.randn(tokens, 40)
        x[1, 7] = math.nan
        routes = make_routes(tokens, 4, 2)
        out = fused_experts(x, routes, layer.gate_up, layer.down)
        bad = out.isnan().any(dim=-1)
        assert bad[1] and bad.sum() == 1


def test_rows_without_an_expert_are_zero() -> None:
    layer = make_layer(3, 20, 12, GATES[3], bias=True).to(torch.float32)
    selected = torch.tensor([[0, 7], [5, -1], [2, 1]])
    order = sort_by_expert(selected, 3)
    x = torch.randn(3, 20)
    y = experts_forward(
        (x, order),
        order.offsets_E,
        layer.gate_up,
        layer.down,
        GATES[3],
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
    )
    assert torch.equal(y[3:], torch.zeros(3, 20)) and (y[:3] != 0).any(dim=-1).all()
    out = combine(y, order, torch.ones(3, 2))
    assert torch.equal(out[1], torch.zeros(20)) and torch.equal(out[0], y[0])


def test_strided_index_tensors() -> None:
    x, weight = torch.randn(5, 24), torch.randn(3, 8, 24)
    ends, rows = torch.tensor([1, 3, 4]).int(), torch.tensor([4, 0, 2, 1]).int()
    factors = torch.randn(4)
    for held in (weight, quantize(torch.randn(3, 8, 32), "q8_0")):
        given = x if held is weight else torch.randn(5, 32)
        want = grouped_gemm(given, ends, held, row_indices_S=rows, row_weights_S=factors)
        strided = [torch.stack((t, t + 99), dim=1)[:, 0] for t in (ends, rows, factors)]
        actual = grouped_gemm(
            given, strided[0], held, row_indices_S=strided[1], row_weights_S=strided[2]
        )
        assert torch.equal(actual, want)


ints = partial(torch.tensor, dtype=torch.int32)


@pytest.mark.parametrize(
    "message, call",
    [
        ("offset is past", lambda x, w: grouped_gemm(x, ints([1, 200]), w)),
        ("offset is past", lambda x, w: grouped_gemm(x, ints([-1, 2]), w)),
        (
            "index is out of range",
            lambda x, w: grouped_gemm(x, ints([1, 2]), w, row_indices_S=ints([0, 7])),
        ),
        (
            "index is out of range",
            lambda x, w: grouped_gemm(x, ints([1, 2]), w, row_indices_S=ints([0, -1])),
        ),
        ("row_weights", lambda x, w: grouped_gemm(x, ints([1, 2]), w, row_weights_S=torch.ones(1))),
        ("bias", lambda x, w: grouped_gemm(x, ints([1, 2]), w, torch.ones(2, 16))),
        ("index is out of range", lambda x, w: combine(x[:1], sort_by_expert(ints([[0], [1]]), 2))),
        ("weights", lambda x, w: combine(x, sort_by_expert(ints([[0], [1]]), 2), torch.ones(1, 1))),
        (
            "weights",
            lambda x, w: gather_weights(torch.ones(1, 1), sort_by_expert(ints([[0], [1]]), 2)),
        ),
        ("must be", lambda x, w: route(x[0], RouterConfig(1))),
        ("a bias", lambda x, w: route(x, RouterConfig(1), torch.zeros(16))),
        ("don't fit", lambda x, w: route_tokens(x, torch.randn(4, 16), RouterConfig(1))),
        (
            "a bias",
            lambda x, w: route_tokens(x, torch.randn(4, 64), RouterConfig(1), torch.ones(1)),
        ),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_out_of_range_indices_and_short_tensors_raise(
    message: str, call: Any, packed: bool
) -> None:
    weight = torch.randn(2, 48, 64)
    with pytest.raises((ArgumentError, FormatError), match=message):
        call(torch.randn(2, 64), quantize(weight, "q8_0") if packed else weight)


def test_no_experts_at_all() -> None:
    out = grouped_gemm(torch.randn(3, 8), torch.empty(0, dtype=torch.int32), torch.randn(0, 4, 8))
    assert torch.equal(out, torch.zeros(3, 4))


def test_sorted_rows_equal_gathered_rows() -> None:
    layer, routes = make_layer(5, 24, 16, GATES[0]).to(torch.float32), make_routes(11, 5, 2)
    order, x = sort_by_expert(routes.experts_Tk, 5), torch.randn(11, 24)
    given = (order.offsets_E, layer.gate_up, layer.down)
    y = experts_forward((x, order), *given)
    torch.testing.assert_close(experts_forward(x[order.token_S], *given), y)


def test_strided_tokens_and_weights() -> None:
    layer, routes = make_layer(4, 24, 16, GATES[0]).to(torch.float32), make_routes(7, 4, 2)
    x = torch.randn(14, 48)[::2, ::2]
    up = layer.gate_up.transpose(1, 2).contiguous().transpose(1, 2)
    for tokens in (2, 7):
        first = Routes(routes.weights_Tk[:tokens], routes.experts_Tk[:tokens])
        actual = fused_experts(x[:tokens], first, up, layer.down)
        expected = fused_experts(x[:tokens].contiguous(), first, layer.gate_up, layer.down)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("tokens", [3, 40])
def test_a_token_does_not_depend_on_other_tokens_routes(tokens: int) -> None:
    layer, x = make_layer(6, 70, 40, GATES[0]).to(torch.float32), torch.randn(tokens, 70)
    results = []
    for seed in range(4):
        torch.manual_seed(seed)
        selected = torch.rand(tokens, 6).topk(2, dim=-1).indices
        selected[0] = torch.tensor([4, 1])
        routes = Routes(torch.full((tokens, 2), 0.5), selected)
        results.append(fused_experts(x, routes, layer.gate_up, layer.down)[0])
    assert all(torch.equal(result, results[0]) for result in results)


# ---- gradients, capture ----------------------------------------------------------------------------


@pytest.mark.parametrize("apply_router_weight_on_input", [False, True])
@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.kind)
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_equal_those_of_the_plain_loop(
    gate: GatedActivation, bias: bool, apply_router_weight_on_input: bool
) -> None:
    layer, routes = make_layer(5, 9, 7, gate, bias), make_routes(6, 5, 2, "even")
    tensors = [
        torch.randn(6, 9, dtype=torch.float64),
        routes.weights_Tk.double(),
        layer.gate_up,
        layer.down,
        *([layer.gate_up_bias, layer.down_bias] if bias else []),
    ]
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    x, weights, gate_up, down, *biases = leaves
    first, second = biases or (None, None)
    ours = fused_experts(
        x, Routes(weights, routes.experts_Tk), gate_up, down, gate,
        gate_up_bias=first, down_bias=second, apply_router_weight_on_input=apply_router_weight_on_input,
    )  # fmt: skip
    plain = type(layer)(gate_up, down, first, second, gate)
    theirs = run_experts_one_by_one(
        x, Routes(weights, routes.experts_Tk), plain, apply_router_weight_on_input
    )
    torch.testing.assert_close(ours, theirs)
    seed = torch.randn_like(ours)
    expected = torch.autograd.grad(theirs, leaves, seed)
    for actual, one in zip(torch.autograd.grad(ours, leaves, seed), expected, strict=True):
        torch.testing.assert_close(actual, one)


def test_operators_pass_opcheck() -> None:
    layer, routes = make_layer(4, 6, 5, GATES[0], bias=True).to(torch.float32), make_routes(3, 4, 2)
    logits = torch.randn(3, 4, requires_grad=True)
    torch.library.opcheck(route_op.overload, (logits, None, *astuple(RouterConfig(2))))
    torch.library.opcheck(sort_by_expert_op.overload, (routes.experts_Tk, 4))
    order, y = sort_by_expert(routes.experts_Tk, 4), torch.randn(6, 6, requires_grad=True)
    weights = routes.weights_Tk.requires_grad_()
    arguments = (y, order.position_Tk, order.token_S, order.slot_S, weights)
    torch.library.opcheck(combine_op.overload, arguments)
    x = torch.randn(3, 6, requires_grad=True)
    many = (
        x, order.token_S, order.position_Tk, None, order.offsets_E, layer.gate_up.requires_grad_(),
        [], "dense", None, "none", "silu", 0.0, 0.0,
    )  # fmt: skip
    torch.library.opcheck(grouped_gemm_op.overload, many)


def test_capture_with_fullgraph_and_gradients() -> None:
    layer = make_layer(4, 12, 8, GATES[0]).to(torch.float32)
    config, router = RouterConfig(2, renormalize=True), torch.randn(4, 12)

    def run(x: Tensor, gate_up: Tensor) -> Tensor:
        return fused_experts(x, route_tokens(x, router, config), gate_up, layer.down)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=False)
    gradients = []
    for function in (run, compiled):
        x = torch.randn(5, 12, generator=torch.Generator().manual_seed(3)).requires_grad_()
        gate_up = layer.gate_up.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(x, gate_up).square().sum(), (x, gate_up)))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
