"""Routing a few tokens: the choice by its definition, the norm before it in float64."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.moe_cases import RULES, route_one
from tests.kernels.triton_support import DEVICE, INTERPRETED

from fulgurite.kernels.moe.routing import RmsNormArgs, RouterConfig, astuple  # isort: skip
from fulgurite.kernels.moe import triton_small_batch_routing  # isort: skip  (needs triton)

UNGROUPED = [name for name, rule in RULES.items() if rule.groups == 1]


def run(x, weight, rule, bias=None, correction_bias=None, norm=None):
    given = (t if t is None else t.to(DEVICE) for t in (x, weight, bias, correction_bias))
    norm = None if norm is None else RmsNormArgs(norm.weight_D.to(DEVICE), norm.eps, norm.offset)
    weights, chosen = triton_small_batch_routing.route_small_batch(*given, norm, *astuple(rule))
    return weights.cpu(), chosen.cpu()


def check(found, logits, correction_bias, rule):
    weights, experts = found
    for token in range(len(logits)):
        bias = None if correction_bias is None else correction_bias.tolist()
        wanted = route_one(logits[token].tolist(), bias, rule)
        assert experts[token].tolist() == list(wanted)
        assert weights[token].tolist() == pytest.approx(list(wanted.values()), rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("name", UNGROUPED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_a_rule_is_its_definition(name, biased, tokens):
    """The weight is the identity, so that x are the logits, with ties."""
    x = (2 * torch.randn(tokens, 8)).round(decimals=1)
    x[:, 3] = x[:, 6]
    correction_bias = 0.5 * torch.randn(8) if biased else None
    check(
        run(x, torch.eye(8), RULES[name], correction_bias=correction_bias),
        x,
        correction_bias,
        RULES[name],
    )


@pytest.mark.parametrize("experts, size", [(1, 1), (17, 33), (60, 130), (128, 2048), (300, 67)])
def test_sizes(experts, size):
    x, weight, bias = torch.randn(2, size), torch.randn(experts, size), torch.randn(experts)
    rule = RouterConfig(min(8, experts), renormalize=True)
    logits = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    check(run(x, weight, rule, bias), logits, None, rule)


def test_the_norm_is_the_formula():
    x, weight, scale = 3 * torch.randn(2, 96), torch.randn(24, 96), torch.randn(96)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (scale.double() + 1)
    logits, rule = normed @ weight.double().T, RouterConfig(4, "sigmoid")
    check(run(x, weight, rule, norm=RmsNormArgs(scale, 1e-5, 1.0)), logits, None, rule)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter cuts bfloat16 off where a GPU rounds")
def test_sixteen_bits():
    x, weight = torch.randn(2, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    logits, rule = x.double() @ weight.double().T, RouterConfig(8, renormalize=True)
    check(run(x, weight, rule), logits, None, rule)


def test_nan_is_chosen_first_and_nothing_is_out_of_range():
    x = torch.randn(2, 8)
    x[0, 5] = float("nan")
    weights, chosen = run(x, torch.eye(8), RouterConfig(3))
    assert ((chosen >= 0) & (chosen < 8)).all()
    assert sorted(chosen[1].tolist()) == sorted(x[1].topk(3).indices.tolist())


def test_what_is_left_to_others():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(8, 8, device=DEVICE)
    for rows, rule in ((3, RouterConfig(2)), (0, RouterConfig(2)), (1, RULES["deepseek_v3"])):
        found = triton_small_batch_routing.route_small_batch(
            x[:rows], weight, None, None, None, *astuple(rule)
        )
        assert found is NotImplemented
