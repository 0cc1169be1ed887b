"""Routing of small batches: the selection by its definition, the norm in float64."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.moe.router_config import RmsNormArgs, RouterConfig
from fulgurite.kernels.moe.triton_small_batch_routing import route_small_batch
from tests.kernels.moe.cases import ROUTERS, route_token
from tests.kernels.triton_support import DEVICE, INTERPRETED

UNGROUPED = [name for name, config in ROUTERS.items() if config.num_groups == 1]


def run(x, weight, config, bias=None, correction_bias=None, norm=None):
    tensors = (t if t is None else t.to(DEVICE) for t in (x, weight, bias, correction_bias))
    norm = None if norm is None else RmsNormArgs(norm.weight_D.to(DEVICE), norm.eps, norm.offset)
    weights, selected = route_small_batch(*tensors, norm, config)
    return weights.cpu(), selected.cpu()


def check(routes, logits, correction_bias, config):
    weights, experts = routes
    for token in range(len(logits)):
        bias = None if correction_bias is None else correction_bias.tolist()
        expected = route_token(logits[token].tolist(), bias, config)
        assert experts[token].tolist() == list(expected)
        assert weights[token].tolist() == pytest.approx(list(expected.values()), rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("name", UNGROUPED)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [1, 2])
def test_routes_equal_the_definition(name, biased, tokens):
    """The weight is the identity, so that x are the logits, with ties."""
    x = (2 * torch.randn(tokens, 8)).round(decimals=1)
    x[:, 3] = x[:, 6]
    config, bias = ROUTERS[name], 0.5 * torch.randn(8) if biased else None
    check(run(x, torch.eye(8), config, correction_bias=bias), x, bias, config)


@pytest.mark.parametrize("experts, size", [(1, 1), (17, 33), (60, 130), (128, 2048), (300, 67)])
def test_sizes(experts, size):
    x, weight, bias = torch.randn(2, size), torch.randn(experts, size), torch.randn(experts)
    config = RouterConfig(min(8, experts), renormalize=True)
    logits = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    check(run(x, weight, config, bias), logits, None, config)


def test_norm():
    x, weight, scale = 3 * torch.randn(2, 96), torch.randn(24, 96), torch.randn(96)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (scale.double() + 1)
    logits, config = normed @ weight.double().T, RouterConfig(4, "sigmoid")
    check(run(x, weight, config, norm=RmsNormArgs(scale, 1e-5, 1.0)), logits, None, config)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates bfloat16 where a GPU rounds")
def test_bfloat16():
    x, weight = torch.randn(2, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    logits, config = x.double() @ weight.double().T, RouterConfig(8, renormalize=True)
    check(run(x, weight, config), logits, None, config)


def test_nan_is_selected_first_and_nothing_is_out_of_range():
    x = torch.randn(2, 8)
    x[0, 5] = float("nan")
    weights, selected = run(x, torch.eye(8), RouterConfig(3))
    assert ((selected >= 0) & (selected < 8)).all()
    assert sorted(selected[1].tolist()) == sorted(x[1].topk(3).indices.tolist())


def test_unsupported_calls():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(8, 8, device=DEVICE)
    for rows, config in ((3, RouterConfig(2)), (0, RouterConfig(2)), (1, ROUTERS["deepseek_v3"])):
        routes = route_small_batch(x[:rows], weight, None, None, None, config)
        assert routes is NotImplemented
