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
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.config import MoEConfig
from fulgurite.models.moe import Experts, gated_activation
from fulgurite.parallel import apply_expert_parallel
from fulgurite.parallel.dispatch.symmetric_gradients import (
    DifferentiableDispatcher,
    gradient_config,
)
from tests.kernels.dispatch.cases import round_trip
from tests.kernels.dispatch.test_triton_dispatch import routes, transports
from tests.kernels.triton_support import DEVICE

from fulgurite.kernels.dispatch.buffers import DispatchConfig  # isort: skip


class Inputs(NamedTuple):
    x: Tensor
    slots: Tensor
    weights: Tensor
    wanted: Tensor  # the gradient of what comes out


def make(
    ranks: int, plan: DispatchConfig, dtype: torch.dtype = torch.float32
) -> list[DifferentiableDispatcher]:
    there, back = transports(ranks, plan), transports(ranks, gradient_config(plan, dtype))
    return [DifferentiableDispatcher(*pair) for pair in zip(there, back, strict=True)]


def inputs_of(
    counts: tuple[int, ...], plan: DispatchConfig, slots: int, dtype=torch.float32
) -> list[Inputs]:
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
    running: list[DifferentiableDispatcher],
    inputs: list[Inputs],
    a_PD: Tensor,
    frozen: bool = False,
) -> list[tuple[Tensor, Tensor | None, Tensor | None, Tensor]]:
    """What comes out, and the gradients of tokens, weights and parameters, by rank."""
    count = running[0].forward_dispatcher.config.experts_per_rank
    leaves = []
    for rank, one in enumerate(inputs):
        parameter = a_PD[rank * count : (rank + 1) * count].to(DEVICE, copy=True).requires_grad_()
        x, weights = one.x.to(DEVICE, copy=True), one.weights.to(DEVICE, copy=True)
        leaves.append((x.requires_grad_(not frozen), weights.requires_grad_(not frozen), parameter))
    sent = [
        t.start_dispatch(x, one.slots.to(DEVICE), len(a_PD), w)
        for t, one, (x, w, _) in zip(running, inputs, leaves, strict=True)
    ]
    arrived = [t.finish_dispatch(one) for t, one in zip(running, sent, strict=True)]
    back = [
        t.start_combine(visit(one.x_SD, one.experts_S, one.weights_S, a), one)
        for t, one, (_, _, a) in zip(running, arrived, leaves, strict=True)
    ]
    outs = [t.finish_combine(*pair) for t, *pair in zip(running, back, arrived, strict=True)]
    torch.autograd.backward(outs, [one.wanted.to(DEVICE) for one in inputs])
    for transport in running:
        transport.check()
        assert (
            transport.forward_dispatcher.in_flight == transport.gradient_dispatcher.in_flight == 0
        )
    return [
        (out.detach(), x.grad, w.grad, a.grad) for out, (x, w, a) in zip(outs, leaves, strict=True)
    ]


def oracle(inputs: list[Inputs], a_PD: Tensor, wire: str) -> tuple[list[list[Tensor]], Tensor]:
    """The same by one rank: out, and the gradients of x and weights, by rank; and of the parameters."""
    a_PD = a_PD.double().requires_grad_()
    found = []
    for one in inputs:
        rounded = round_trip(wire, one.x)
        x, weights = rounded.double().requires_grad_(), one.weights.double().requires_grad_()
        out = ((a_PD[one.slots] * x[:, None]).tanh() * weights[..., None]).sum(1)
        out.backward(one.wanted.double())
        found.append([out.detach(), x.grad, weights.grad])
    return found, torch.zeros_like(a_PD) if a_PD.grad is None else a_PD.grad


def check(
    running: list[DifferentiableDispatcher], inputs: list[Inputs], tolerance: float = 1e-5
) -> None:
    plan = running[0].forward_dispatcher.config
    a_PD = parameters(plan.experts_per_rank * len(running), plan.hidden_size)
    found = step(running, inputs, a_PD)
    wanted, a_wanted = oracle(inputs, a_PD, plan.dispatch_format)
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
    plan = DispatchConfig(4, 3, 20, 2, dispatch_format="f32", combine_format="f32")
    running = make(3, plan)
    for _ in range(2):
        check(running, inputs_of(counts, plan, 6))


@pytest.mark.parametrize("wire", ["bf16", "fp8", "nvfp4"])
def test_rounding_has_gradient_one(wire):
    """Tokens are rounded on their way, gradients are not."""
    plan = DispatchConfig(3, 2, 32, 2, dispatch_format=wire, combine_format="f32")
    check(make(2, plan), inputs_of((3, 2), plan, 4))


def test_half_precision():
    """Gradients of outputs travel as they are, in bfloat16; sums come back in float32."""
    plan = DispatchConfig(4, 2, 24, 2, dispatch_format="bf16", combine_format="bf16")
    inputs = inputs_of((4, 3), plan, 4, torch.bfloat16)
    check(make(2, plan, torch.bfloat16), inputs, tolerance=2e-2)


def test_top_k_larger_than_the_row_alignment():
    plan = DispatchConfig(2, 9, 5, 5, dispatch_format="f32", combine_format="f32")
    assert gradient_config(plan, torch.float32).hidden_size == 5 + 16
    check(make(2, plan), inputs_of((2, 1), plan, 10))


def test_only_parameters_require_gradients():
    """The first layer of a model: tokens and weights want none, and the way back is whole all the same."""
    plan = DispatchConfig(4, 2, 8, 2, dispatch_format="f32", combine_format="f32")
    running, inputs = make(2, plan), inputs_of((4, 2), plan, 4)
    for _ in range(3):  # more often than there are buffers
        found = step(running, inputs, parameters(4, 8), frozen=True)
    wanted = oracle(inputs, parameters(4, 8), "f32")[1]
    ours = torch.cat([a.cpu() for *_, a in found]).double()
    torch.testing.assert_close(ours, wanted, rtol=0, atol=1e-5)
    assert all(x is None and w is None for _, x, w, _ in found)


def test_one_expert_takes_everything():
    plan = DispatchConfig(5, 1, 8, 2, dispatch_format="f32", combine_format="f32")
    inputs = inputs_of((5, 5), plan, 4)
    check(make(2, plan), [one._replace(slots=torch.full_like(one.slots, 3)) for one in inputs])


def test_no_grad_sends_no_gradients():
    plan = DispatchConfig(3, 2, 8, 2, dispatch_format="f32", combine_format="f32")
    running = make(2, plan)
    one = inputs_of((3, 3), plan, 4)[0]
    with torch.no_grad():
        sent = [
            t.start_dispatch(one.x.to(DEVICE), one.slots.to(DEVICE), 4, one.weights.to(DEVICE))
            for t in running
        ]
        arrived = [t.finish_dispatch(each) for t, each in zip(running, sent, strict=True)]
        assert not any(each.x_SD.requires_grad for each in arrived)


def test_wrong_gradient_config_raises():
    plan = DispatchConfig(3, 2, 8, 2)
    with pytest.raises(ArgumentError, match="gradient_config"):
        DifferentiableDispatcher(transports(2, plan)[0], transports(2, plan)[0])


@pytest.mark.parametrize("apply_router_weight_on_input", [False, True])
def test_the_experts_of_a_model(apply_router_weight_on_input):
    """Their own backward meets rows of nobody, and leaves them out."""
    plan = DispatchConfig(5, 2, 32, 2, dispatch_format="f32", combine_format="f32")
    running, inputs = make(2, plan), inputs_of((5, 3), plan, 4)
    config = MoEConfig(4, 2, 12)
    whole = Experts(
        32,
        config,
        gated_activation("silu"),
        apply_router_weight_on_input=apply_router_weight_on_input,
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    spread = [
        apply_expert_parallel(copy.deepcopy(whole).to(DEVICE), transport).train()
        for transport in running
    ]
    leaves = [
        tuple(part.to(DEVICE, copy=True).requires_grad_() for part in (one.x, one.weights))
        for one in inputs
    ]
    sent = [
        part.start_dispatch(x, Routes(w, one.slots.to(DEVICE)))[0]
        for part, one, (x, w) in zip(spread, inputs, leaves, strict=True)
    ]
    arrived = [t.finish_dispatch(one) for t, one in zip(running, sent, strict=True)]
    back = [
        t.start_combine(
            part.experts(one.x_SD, Routes(one.weights_S[:, None], one.experts_S[:, None])), one
        )
        for t, part, one in zip(running, spread, arrived, strict=True)
    ]
    outs = [t.finish_combine(*pair) for t, *pair in zip(running, back, arrived, strict=True)]
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
