"""The functions that ranks run in test_expert.py: expert parallelism against one process.

Ranks import the module of their function, so this module must not import pytest.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from fulgurite.errors import FulguriteError
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.config import MoEConfig
from fulgurite.models.moe import Experts, clamped_swiglu, gated_activation
from fulgurite.parallel import AllToAllDispatcher, Mesh, Placement, apply_expert_parallel
from tests.parallel.model_cases import distance, mesh_of

HIDDEN, INNER = 32, 12
KINDS = {
    "plain": dict(activation=gated_activation("silu")),
    "biases": dict(activation=clamped_swiglu(1.702, 3.0), bias=True),
    "weighs input": dict(activation=gated_activation("gelu"), apply_router_weight_on_input=True),
}


def make_experts(kind: str, count: int, per_token: int, dtype: torch.dtype) -> Experts:
    experts = Experts(HIDDEN, MoEConfig(count, per_token, INNER), **KINDS[kind]).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    return experts


def make_inputs(
    rank: int, tokens: int, count: int, per_token: int, dtype: torch.dtype, only: int | None
) -> tuple[Tensor, Routes]:
    generator = torch.Generator().manual_seed(20 + rank)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=dtype)
    chosen = torch.rand(tokens, count, generator=generator).topk(per_token, dim=-1).indices
    if only is not None:
        chosen = torch.full_like(chosen, only)
    weights = torch.rand(tokens, per_token, generator=generator, dtype=dtype)
    return x, Routes(weights, chosen)


class StraightThrough(torch.autograd.Function):
    """The rounding of a wire format, with gradient 1."""

    @staticmethod
    def forward(ctx, x: Tensor, wire: WireFormat) -> Tensor:
        return wire.unpack(wire.pack(x), x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


def compare(
    shape: tuple[int, int, int],
    tokens: tuple[int, ...],
    *,
    kind: str = "plain",
    count: int = 8,
    per_token: int = 3,
    dtype: torch.dtype = torch.float64,
    wire: str = "same",
    only: int | None = None,
    placement: Placement | None = None,
) -> dict[str, float]:
    """Distances of the output, the gradients of tokens and weights, and of this rank's experts."""
    mesh = mesh_of(shape)
    whole = make_experts(kind, count, per_token, dtype)
    ours = apply_expert_parallel(
        copy.deepcopy(whole),
        AllToAllDispatcher(mesh.expert, dispatch_format=wire),
        placement,
        layer=0,
    )
    group = [
        make_inputs(rank, tokens[rank % len(tokens)], count, per_token, dtype, only)
        for rank in mesh.expert.ranks
    ]
    outs = []
    for x, routes in group:
        x.requires_grad_(), routes.weights_Tk.requires_grad_()
        sent = x if wire == "same" else StraightThrough.apply(x, WireFormat(wire, HIDDEN))
        outs.append(whole(sent, routes))
    torch.cat(outs).square().sum().backward()

    x, routes = group[mesh.expert.index]
    mine = x.detach().clone().requires_grad_()
    weights = routes.weights_Tk.detach().clone().requires_grad_()
    out = ours(mine, Routes(weights, routes.experts_Tk))
    out.square().sum().backward()
    slots = list(range(count)) if placement is None else placement.slots_LS[0].tolist()
    width = len(slots) // mesh.expert.size
    here = slots[mesh.expert.index * width : (mesh.expert.index + 1) * width]
    found = {
        "out": distance(out, outs[mesh.expert.index]),
        "x": distance(mine.grad, x.grad),
        "weights": distance(weights.grad, routes.weights_Tk.grad),
    }
    if placement is None:  # the gradient of an expert in two slots is in two parts
        for name, parameter in ours.experts.named_parameters():
            found[name] = distance(parameter.grad, whole.get_parameter(name).grad[here])
    return found


def refused(
    shape: tuple[int, int, int], tokens: tuple[int, ...], capacity: int | None, bad: int | None
) -> tuple[str, str]:
    """The error a dispatch ends with on this rank; then the same ranks still work together."""
    mesh = mesh_of(shape)
    experts = make_experts("plain", 8, 2, torch.float32)
    x, routes = make_inputs(mesh.rank, tokens[mesh.rank], 8, 2, torch.float32, only=5)
    if bad is not None and mesh.rank == 1:
        routes.experts_Tk[0, 0] = bad
    ours = apply_expert_parallel(experts, AllToAllDispatcher(mesh.expert, capacity=capacity))
    try:
        ours(x, routes)
        text = ""
    except FulguriteError as error:
        text = f"{type(error).__name__}: {error}"
    ours = apply_expert_parallel(
        make_experts("plain", 8, 2, torch.float32), AllToAllDispatcher(mesh.expert)
    )
    routes = Routes(routes.weights_Tk, torch.zeros_like(routes.experts_Tk))
    return text, str(ours(x, routes).shape)


def die(rank: int, how: str, timeout: float) -> str:
    """One rank ends, leaves or stays behind; the others say what they learn of it."""
    import os
    import signal
    import time

    mesh = Mesh(expert=4, timeout=timeout)
    experts = make_experts("plain", 8, 2, torch.float32)
    ours = apply_expert_parallel(experts, AllToAllDispatcher(mesh.expert))
    x, routes = make_inputs(mesh.rank, 4, 8, 2, torch.float32, None)
    ours(x, routes)
    if mesh.rank == rank:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "left":
            mesh.close()
            return "left"
        time.sleep(timeout + 4)
        return "slept"
    started = time.monotonic()
    try:
        for _ in range(3):
            ours(x, routes)
    except FulguriteError as error:
        return f"{time.monotonic() - started:.1f} s\n{type(error).__name__}: {error}"
    return "nothing happened"


def call(function, arguments, how):
    return function(*arguments, **how)


def writing(folder: str, rank: int, how: str, timeout: float) -> None:
    """`die`, and what it says as a file: the pool of ranks ends with the one that is killed."""
    Path(folder, os.environ["RANK"]).write_text(die(rank, how, timeout))
