"""Gradients of dispatch and combine between ranks that live in one process, in the interpreter (or on a GPU).

Each rank runs a phase before any runs the next, forwards; backwards autograd does the same, since it takes
the latest node first. Experts here have a parameter each: y = weight tanh(a[expert] x). The oracle is one
rank with all of them, in float64.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.kernels.dispatch.wire_format import Wire
from fulgurite.kernels.moe.routing import Routes
from fulgurite.models.config import ExpertsConfig
from fulgurite.models.moe import Experts, gated
from fulgurite.parallel import spread_experts
from tests.kernels.test_triton_dispatch import routes, transports
from tests.kernels.triton_support import DEVICE

from fulgurite.parallel.transport_gradients import (  # isort: skip
    Differentiable,
    gradient_plan,
)
from fulgurite.parallel.transport_symmetric import Plan  # isort: skip


class Inputs(NamedTuple):
    x: Tensor
    slots: Tensor
    weights: Tensor
    wanted: Tensor  # the gradient of what comes out


def make(ranks: int, plan: Plan, dtype: torch.dtype = torch.float32) -> list[Differentiable]:
    there, back = transports(ranks, plan), transports(ranks, gradient_plan(plan, dtype))
    return [Differentiable(*pair) for pair in zip(there, back, strict=True)]


def inputs_of(counts: tuple[int, ...], plan: Plan, slots: int, dtype=torch.float32) -> list[Inputs]:
    found = []
    for rank, tokens in enumerate(counts):
        x, chosen, weights = routes(tokens, plan, slots, 40 + rank)
        generator = torch.Generator().manual_seed(rank)
        gradient = torch.randn(x.shape, generator=generator)
        found.append(Inputs(x.to(dtype), chosen, weights, gradient.to(dtype)))
    return found


def parameters(slots: int, hidden: int) -> Tensor:
    return torch.randn(slots, hidden, generator=torch.Generator().manual_seed(7))


def visit(x_SD: Tensor, experts_S: Tensor, weights_S: Tensor, a_ED: Tensor) -> Tensor:
    """Nobody's rows are poison, in both directions."""
    nobody_S = experts_S >= len(a_ED)
    y_SD = (a_ED[experts_S.clamp(max=len(a_ED) - 1).long()] * x_SD.float()).tanh()
    y_SD = (y_SD * weights_S[:, None]).to(x_SD.dtype)
    return y_SD.masked_fill(nobody_S[:, None], float("nan"))


def step(
    running: list[Differentiable], inputs: list[Inputs], a_PD: Tensor, frozen: bool = False
) -> list[tuple[Tensor, Tensor | None, Tensor | None, Tensor]]:
    """What comes out, and the gradients of tokens, weights and parameters, by rank."""
    count = running[0].there.plan.experts_per_rank
    leaves = []
    for rank, one in enumerate(inputs):
        parameter = a_PD[rank * count : (rank + 1) * count].to(DEVICE, copy=True).requires_grad_()
        x, weights = one.x.to(DEVICE, copy=True), one.weights.to(DEVICE, copy=True)
        leaves.append((x.requires_grad_(not frozen), weights.requires_grad_(not frozen), parameter))
    sent = [
        t.send(x, one.slots.to(DEVICE), len(a_PD), w)
        for t, one, (x, w, _) in zip(running, inputs, leaves, strict=True)
    ]
    arrived = [t.receive(one) for t, one in zip(running, sent, strict=True)]
    back = [
        t.send_back(visit(one.x_SD, one.experts_S, one.weights_S, a), one)
        for t, one, (_, _, a) in zip(running, arrived, leaves, strict=True)
    ]
    outs = [t.sum_up(*pair) for t, *pair in zip(running, back, arrived, strict=True)]
    torch.autograd.backward(outs, [one.wanted.to(DEVICE) for one in inputs])
    for transport in running:
        transport.check()
        assert transport.there.under_way == transport.back.under_way == 0
    return [
        (out.detach(), x.grad, w.grad, a.grad) for out, (x, w, a) in zip(outs, leaves, strict=True)
    ]


def oracle(inputs: list[Inputs], a_PD: Tensor, wire: str) -> tuple[list[list[Tensor]], Tensor]:
    """The same by one rank: out, and the gradients of x and weights, by rank; and of the parameters."""
    a_PD = a_PD.double().requires_grad_()
    found = []
    for one in inputs:
        rounded = Wire(wire, one.x.shape[1]).rounded(one.x)
        x, weights = rounded.double().requires_grad_(), one.weights.double().requires_grad_()
        out = ((a_PD[one.slots] * x[:, None]).tanh() * weights[..., None]).sum(1)
        out.backward(one.wanted.double())
        found.append([out.detach(), x.grad, weights.grad])
    return found, torch.zeros_like(a_PD) if a_PD.grad is None else a_PD.grad


def check(running: list[Differentiable], inputs: list[Inputs], tolerance: float = 1e-5) -> None:
    plan = running[0].there.plan
    a_PD = parameters(plan.experts_per_rank * len(running), plan.hidden)
    found = step(running, inputs, a_PD)
    wanted, a_wanted = oracle(inputs, a_PD, plan.wire)
    for ours, theirs in zip(found, wanted, strict=True):
        for name, one, other in zip(("out", "x", "weights"), ours, theirs, strict=False):
            assert one is not None and one.shape == other.shape, name
            scale = max(float(other.abs().max()), 1.0) if other.numel() else 1.0
            torch.testing.assert_close(
                one.cpu().double(), other, rtol=0, atol=tolerance * scale, msg=name
            )
    ours = torch.cat([a.cpu() for *_, a in found]).double()
    scale = max(float(a_wanted.abs().max()), 1.0)
    torch.testing.assert_close(ours, a_wanted, rtol=0, atol=tolerance * scale)


@pytest.mark.parametrize("counts", [(4, 0, 3), (0, 0, 0), (1, 4, 2)], ids=str)
def test_gradients(counts):
    """Uneven tokens, none on a rank, none anywhere; twice through both copies of the buffers."""
    plan = Plan(4, 3, 20, 2, wire="f32", result="f32")
    running = make(3, plan)
    for _ in range(2):
        check(running, inputs_of(counts, plan, 6))


@pytest.mark.parametrize("wire", ["bf16", "fp8", "nvfp4"])
def test_rounding_is_passed_straight_through(wire):
    """Tokens are rounded on their way, gradients are not."""
    plan = Plan(3, 2, 32, 2, wire=wire, result="f32")
    check(make(2, plan), inputs_of((3, 2), plan, 4))


def test_half_precision():
    """Gradients of outputs travel as they are, in bfloat16; sums come back in float32."""
    plan = Plan(4, 2, 24, 2, wire="bf16", result="bf16")
    inputs = inputs_of((4, 3), plan, 4, torch.bfloat16)
    check(make(2, plan, torch.bfloat16), inputs, tolerance=2e-2)


def test_more_experts_a_token_than_a_step_of_columns():
    plan = Plan(2, 9, 5, 5, wire="f32", result="f32")
    assert gradient_plan(plan, torch.float32).hidden == 5 + 16
    check(make(2, plan), inputs_of((2, 1), plan, 10))


def test_only_parameters_want_a_gradient():
    """The first layer of a model: tokens and weights want none, and the way back is whole all the same."""
    plan = Plan(4, 2, 8, 2, wire="f32", result="f32")
    running, inputs = make(2, plan), inputs_of((4, 2), plan, 4)
    for _ in range(3):  # more often than there are buffers
        found = step(running, inputs, parameters(4, 8), frozen=True)
    wanted = oracle(inputs, parameters(4, 8), "f32")[1]
    ours = torch.cat([a.cpu() for *_, a in found]).double()
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    assert all(x is None and w is None for _, x, w, _ in found)


def test_one_expert_takes_everything():
    plan = Plan(5, 1, 8, 2, wire="f32", result="f32")
    inputs = inputs_of((5, 5), plan, 4)
    check(make(2, plan), [one._replace(slots=torch.full_like(one.slots, 3)) for one in inputs])


def test_without_gradients_nothing_travels_back():
    plan = Plan(3, 2, 8, 2, wire="f32", result="f32")
    running = make(2, plan)
    one = inputs_of((3, 3), plan, 4)[0]
    with torch.no_grad():
        sent = [
            t.send(one.x.to(DEVICE), one.slots.to(DEVICE), 4, one.weights.to(DEVICE))
            for t in running
        ]
        arrived = [t.receive(each) for t, each in zip(running, sent, strict=True)]
        assert not any(each.x_SD.requires_grad for each in arrived)


def test_a_transport_of_another_plan_is_refused():
    plan = Plan(3, 2, 8, 2)
    with pytest.raises(ArgumentError, match="gradient_plan"):
        Differentiable(transports(2, plan)[0], transports(2, plan)[0])


@pytest.mark.parametrize("weigh_input", [False, True])
def test_the_experts_of_a_model(weigh_input):
    """Their own backward meets rows of nobody, and leaves them out."""
    plan = Plan(5, 2, 32, 2, wire="f32", result="f32")
    running, inputs = make(2, plan), inputs_of((5, 3), plan, 4)
    config = ExpertsConfig(4, 2, 12)
    whole = Experts(32, config, gated("silu"), weigh_input=weigh_input)
    generator = torch.Generator().manual_seed(3)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    spread = [
        spread_experts(copy.deepcopy(whole).to(DEVICE), transport).train() for transport in running
    ]
    leaves = [
        tuple(part.to(DEVICE, copy=True).requires_grad_() for part in (one.x, one.weights))
        for one in inputs
    ]
    sent = [
        part.send(x, Routes(w, one.slots.to(DEVICE)))
        for part, one, (x, w) in zip(spread, inputs, leaves, strict=True)
    ]
    arrived = [t.receive(one) for t, one in zip(running, sent, strict=True)]
    back = [
        t.send_back(
            part.experts(one.x_SD, Routes(one.weights_S[:, None], one.experts_S[:, None])), one
        )
        for t, part, one in zip(running, spread, arrived, strict=True)
    ]
    outs = [t.sum_up(*pair) for t, *pair in zip(running, back, arrived, strict=True)]
    torch.autograd.backward(outs, [one.wanted.to(DEVICE) for one in inputs])
    for one, out, (x, w) in zip(inputs, outs, leaves, strict=True):
        their_x, their_w = one.x.clone().requires_grad_(), one.weights.clone().requires_grad_()
        wanted = whole(their_x, Routes(their_w, one.slots))
        wanted.backward(one.wanted)
        for ours, theirs in ((out, wanted), (x.grad, their_x.grad), (w.grad, their_w.grad)):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)
    for name, parameter in whole.named_parameters():
        ours = torch.cat([part.experts.get_parameter(name).grad.cpu() for part in spread])
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-4)
