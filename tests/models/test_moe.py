"""Routings against their definitions, token by token; experts against a loop over experts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fulgurite.kernels.moe.routing import route
from fulgurite.models import moe
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import MoEConfig

CONFIG = MoEConfig(
    num_experts=8,
    top_k=3,
    intermediate_size=5,
    renormalize=True,
    routed_scaling_factor=1.7,
    num_groups=4,
    topk_groups=2,
)
Weights = dict[int, float]


def top_k(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:count]


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def reference_softmax_then_topk(logits: list[float], bias: list[float]) -> Weights:
    probabilities = softmax(logits)
    selected = top_k(probabilities, 3)
    total = sum(probabilities[expert] for expert in selected)
    return {expert: probabilities[expert] / total for expert in selected}


def reference_grouped_softmax(logits: list[float], bias: list[float]) -> Weights:
    probabilities = softmax(logits)
    groups = top_k([max(probabilities[2 * group : 2 * group + 2]) for group in range(4)], 2)
    allowed = [
        probability if index // 2 in groups else 0.0
        for index, probability in enumerate(probabilities)
    ]
    return {expert: 1.7 * probabilities[expert] for expert in top_k(allowed, 3)}


def reference_grouped_sigmoid(logits: list[float], bias: list[float]) -> Weights:
    scores = [sigmoid(logit) for logit in logits]
    biased_scores = [score + add for score, add in zip(scores, bias, strict=True)]
    groups = top_k([sum(biased_scores[2 * group : 2 * group + 2]) for group in range(4)], 2)
    allowed = [
        value if index // 2 in groups else -math.inf for index, value in enumerate(biased_scores)
    ]
    selected = top_k(allowed, 3)
    total = sum(scores[expert] for expert in selected)
    return {expert: 1.7 * scores[expert] / total for expert in selected}


def reference_topk_then_softmax(logits: list[float], bias: list[float]) -> Weights:
    selected = top_k(logits, 3)
    return dict(zip(selected, softmax([logits[expert] for expert in selected]), strict=True))


def reference_topk_then_sigmoid(logits: list[float], bias: list[float]) -> Weights:
    return {expert: sigmoid(logits[expert]) for expert in top_k(logits, 3)}


ROUTINGS: list[tuple[moe.RoutingFunction, Callable[[list[float], list[float]], Weights]]] = [
    (moe.softmax_then_topk, reference_softmax_then_topk),
    (moe.grouped_softmax, reference_grouped_softmax),
    (moe.grouped_sigmoid, reference_grouped_sigmoid),
    (moe.topk_then_softmax, reference_topk_then_softmax),
    (moe.topk_then_sigmoid, reference_topk_then_sigmoid),
]


@pytest.mark.parametrize(
    ("routing", "reference"), ROUTINGS, ids=[routing.__name__ for routing, _ in ROUTINGS]
)
def test_routing_matches_its_definition(routing: moe.RoutingFunction, reference) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(50, 8, generator=generator)
    bias = 0.5 * torch.randn(8, generator=generator)
    router = moe.Router(8, CONFIG, routing, correction_bias=routing is moe.grouped_sigmoid)
    router.weight.data = torch.eye(8)
    if router.correction_bias is not None:
        router.correction_bias.data = bias
    routes = router(logits)
    for token in range(50):
        actual = dict(
            zip(routes.experts_Tk[token].tolist(), routes.weights_Tk[token].tolist(), strict=True)
        )
        assert actual == pytest.approx(reference(logits[token].tolist(), bias.tolist()), rel=1e-5)


def make_experts(bias: bool, apply_router_weight_on_input: bool) -> moe.Experts:
    activation = moe.clamped_swiglu(1.702, 1.0) if bias else moe.gated_activation("silu")
    experts = moe.Experts(
        6, CONFIG, activation, bias=bias, apply_router_weight_on_input=apply_router_weight_on_input
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.normal_(generator=generator)
    return experts


@pytest.mark.parametrize("apply_router_weight_on_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts_match_a_loop_over_experts(
    tokens: int, bias: bool, apply_router_weight_on_input: bool
) -> None:
    experts = make_experts(bias, apply_router_weight_on_input)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 6, generator=generator)
    logits = torch.randn(tokens, 8, generator=generator)
    routes = route(logits, moe.topk_then_sigmoid(CONFIG))
    expected = torch.zeros(tokens, 6)
    for token in range(tokens):
        for weight, expert in zip(routes.weights_Tk[token], routes.experts_Tk[token], strict=True):
            hidden = experts.gate_up_proj[expert] @ (
                x[token] * weight if apply_router_weight_on_input else x[token]
            )
            if experts.gate_up_proj_bias is not None:
                hidden = hidden + experts.gate_up_proj_bias[expert]
            out = experts.down_proj[expert] @ experts.activation(hidden)
            if experts.down_proj_bias is not None:
                out = out + experts.down_proj_bias[expert]
            expected[token] += out if apply_router_weight_on_input else out * weight
    torch.testing.assert_close(experts(x, routes), expected, atol=1e-4, rtol=1e-4)


def test_unused_experts_do_not_affect_the_output() -> None:
    experts = make_experts(bias=False, apply_router_weight_on_input=False)
    experts.down_proj[7] = float("inf")
    routes = moe.Routes(torch.ones(9, 2), torch.tensor([[0, 1]] * 9))
    assert experts(torch.randn(9, 6), routes).isfinite().all()


def build_moe_with_shared_expert() -> moe.MoE:
    config = MoEConfig(num_experts=8, top_k=2, intermediate_size=32)
    layer = moe.MoE(
        moe.Router(64, config, moe.softmax_then_topk),
        moe.Experts(64, config, moe.gated_activation("silu")),
        GatedMLP(64, 48, "silu", False),
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return layer


def test_shared_expert_is_added() -> None:
    layer = build_moe_with_shared_expert()
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    routed = layer.experts(x.flatten(0, 1), layer.router(x.flatten(0, 1))).view_as(x)
    expected = routed + layer.shared_expert(x)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x, residual_XD=x), x + expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_shared_expert_overlaps_the_routed_experts(tokens: int) -> None:
    """Without gradients they run on two streams, with gradients one after the other."""
    layer = build_moe_with_shared_expert().to("cuda", torch.bfloat16)
    x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)
    sequential = layer(x, residual_XD=x).detach()
    with torch.no_grad():
        overlapped = [layer(x, residual_XD=x) for _ in range(20)]
    assert all(torch.equal(overlapped[0], output) for output in overlapped)
    torch.testing.assert_close(overlapped[0], sequential, atol=3e-2, rtol=3e-2)
