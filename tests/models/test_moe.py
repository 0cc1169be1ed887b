"""Routing rules by their definitions, one token at a time, and experts one at a time."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from fulgurite.kernels.moe.ops import route
from fulgurite.models import moe
from fulgurite.models.config import ExpertsConfig
from fulgurite.models.layers import GatedMLP

CONFIG = ExpertsConfig(
    count=8, per_token=3, inner=5, renormalise=True, scaling=1.7, groups=4, groups_kept=2
)
Weights = dict[int, float]


def best(scores: list[float], count: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])[:count]


def softmax(values: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in values)
    return [math.exp(value) / total for value in values]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def plain_softmax_then_top_k(logits: list[float], bias: list[float]) -> Weights:
    chances = softmax(logits)
    chosen = best(chances, 3)
    total = sum(chances[expert] for expert in chosen)
    return {expert: chances[expert] / total for expert in chosen}


def plain_grouped_softmax(logits: list[float], bias: list[float]) -> Weights:
    chances = softmax(logits)
    groups = best([max(chances[2 * group : 2 * group + 2]) for group in range(4)], 2)
    allowed = [chance if index // 2 in groups else 0.0 for index, chance in enumerate(chances)]
    return {expert: 1.7 * chances[expert] for expert in best(allowed, 3)}


def plain_grouped_sigmoid(logits: list[float], bias: list[float]) -> Weights:
    scores = [sigmoid(logit) for logit in logits]
    choice = [score + add for score, add in zip(scores, bias, strict=True)]
    groups = best([sum(choice[2 * group : 2 * group + 2]) for group in range(4)], 2)
    allowed = [value if index // 2 in groups else -math.inf for index, value in enumerate(choice)]
    chosen = best(allowed, 3)
    total = sum(scores[expert] for expert in chosen)
    return {expert: 1.7 * scores[expert] / total for expert in chosen}


def plain_top_k_then_softmax(logits: list[float], bias: list[float]) -> Weights:
    chosen = best(logits, 3)
    return dict(zip(chosen, softmax([logits[expert] for expert in chosen]), strict=True))


def plain_top_k_then_sigmoid(logits: list[float], bias: list[float]) -> Weights:
    return {expert: sigmoid(logits[expert]) for expert in best(logits, 3)}


RULES: list[tuple[moe.RoutingRule, Callable[[list[float], list[float]], Weights]]] = [
    (moe.softmax_then_top_k, plain_softmax_then_top_k),
    (moe.grouped_softmax, plain_grouped_softmax),
    (moe.grouped_sigmoid, plain_grouped_sigmoid),
    (moe.top_k_then_softmax, plain_top_k_then_softmax),
    (moe.top_k_then_sigmoid, plain_top_k_then_sigmoid),
]


@pytest.mark.parametrize(("rule", "plain"), RULES, ids=[rule.__name__ for rule, _ in RULES])
def test_a_rule_is_its_definition(rule: moe.RoutingRule, plain) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(50, 8, generator=generator)
    bias = 0.5 * torch.randn(8, generator=generator)
    router = moe.Router(8, CONFIG, rule, choice_bias=rule is moe.grouped_sigmoid)
    router.weight.data = torch.eye(8)
    if router.choice_bias is not None:
        router.choice_bias.data = bias
    routes = router(logits)
    for token in range(50):
        ours = dict(
            zip(routes.experts_Tk[token].tolist(), routes.weights_Tk[token].tolist(), strict=True)
        )
        assert ours == pytest.approx(plain(logits[token].tolist(), bias.tolist()), rel=1e-5)


def make_experts(bias: bool, weigh_input: bool) -> moe.Experts:
    gate = moe.clamped_gate(1.702, 1.0) if bias else moe.gated("silu")
    experts = moe.Experts(6, CONFIG, gate, bias=bias, weigh_input=weigh_input)
    generator = torch.Generator().manual_seed(1)
    for parameter in experts.parameters():
        parameter.normal_(generator=generator)
    return experts


@pytest.mark.parametrize("weigh_input", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_experts_are_one_expert_at_a_time(tokens: int, bias: bool, weigh_input: bool) -> None:
    experts = make_experts(bias, weigh_input)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, 6, generator=generator)
    logits = torch.randn(tokens, 8, generator=generator)
    routes = route(logits, moe.top_k_then_sigmoid(CONFIG))
    wanted = torch.zeros(tokens, 6)
    for token in range(tokens):
        for weight, expert in zip(routes.weights_Tk[token], routes.experts_Tk[token], strict=True):
            hidden = experts.gate_up[expert] @ (x[token] * weight if weigh_input else x[token])
            if experts.gate_up_bias is not None:
                hidden = hidden + experts.gate_up_bias[expert]
            out = experts.down[expert] @ experts.gate(hidden)
            if experts.down_bias is not None:
                out = out + experts.down_bias[expert]
            wanted[token] += out if weigh_input else out * weight
    torch.testing.assert_close(experts(x, routes), wanted, atol=1e-4, rtol=1e-4)


def test_an_expert_that_nobody_asked_for_may_overflow() -> None:
    experts = make_experts(bias=False, weigh_input=False)
    experts.down[7] = float("inf")
    routes = moe.Routes(torch.ones(9, 2), torch.tensor([[0, 1]] * 9))
    assert experts(torch.randn(9, 6), routes).isfinite().all()


def mixture_with_shared() -> moe.MixtureOfExperts:
    config = ExpertsConfig(count=8, per_token=2, inner=32)
    mixture = moe.MixtureOfExperts(
        moe.Router(64, config, moe.softmax_then_top_k),
        moe.Experts(64, config, moe.gated("silu")),
        GatedMLP(64, 48, "silu", False),
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    return mixture


def test_a_shared_expert_is_added() -> None:
    mixture = mixture_with_shared()
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    routed = mixture.experts(x.flatten(0, 1), mixture.router(x.flatten(0, 1))).view_as(x)
    expected = routed + mixture.shared(x)
    torch.testing.assert_close(mixture(x), expected)
    torch.testing.assert_close(mixture(x, onto_XD=x), x + expected)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_a_shared_expert_runs_beside_the_others(tokens: int) -> None:
    """Without gradients on two streams; with them one after the other."""
    mixture = mixture_with_shared().to("cuda", torch.bfloat16)
    x = torch.randn(tokens, 64, device="cuda", dtype=torch.bfloat16)
    after = mixture(x, onto_XD=x).detach()
    with torch.no_grad():
        beside = [mixture(x, onto_XD=x) for _ in range(20)]
    assert all(torch.equal(beside[0], one) for one in beside)
    torch.testing.assert_close(beside[0], after, atol=3e-2, rtol=3e-2)
