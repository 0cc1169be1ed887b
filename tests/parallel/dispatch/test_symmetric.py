"""The symmetric transport between processes that share one GPU: the same results as one rank's experts.

Their kernels take turns on the GPU, so this shows that it is right, not how fast it is.
"""

from __future__ import annotations

import copy

import pytest
import torch

from tests.kernels.dispatch.cases import round_trip
from tests.parallel.experts import expert_cases as cases
from tests.parallel.model_cases import distance, mesh_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def several_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")


def compare(count: int, wire: str, kind: str, rounds: int) -> float:
    """The largest distance over many steps with changing numbers of tokens, none among them."""
    from fulgurite.parallel import apply_expert_parallel
    from fulgurite.parallel.dispatch.symmetric import (
        DispatchConfig,
        SymmetricMemoryDispatcher,
    )

    mesh = mesh_of((count, 1, count))
    plan = DispatchConfig(
        16, 3, cases.HIDDEN, 8 // count, dispatch_format=wire, combine_format="f32"
    )
    transport = SymmetricMemoryDispatcher.create(mesh.expert, plan, mesh.device)
    whole = cases.make_experts(kind, 8, 3, torch.float32).to(mesh.device)
    ours = apply_expert_parallel(copy.deepcopy(whole), transport)
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for round in range(rounds):
        tokens = torch.randint(0, 17, (count,), generator=generator).tolist()[mesh.rank]
        x, routes = cases.make_inputs(10 * round + mesh.rank, tokens, 8, 3, torch.float32, None)
        if round < 8:  # three experts take everything
            routes.experts_Tk[:] = torch.arange(round, round + 3) % 8
        x, routes = x.to(mesh.device), type(routes)(*(part.to(mesh.device) for part in routes))
        with torch.no_grad():
            out = ours(x, routes)
            rounded = round_trip(wire, x)
            worst = max(worst, distance(out, whole(rounded, routes)))
        transport.check()
    return worst


@pytest.mark.parametrize("wire", ["f32", "bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("kind", cases.KINDS)
def test_two_ranks(several_on_one_gpu, kind, wire):
    from fulgurite.parallel import launch

    assert max(launch(compare, 2, 2, wire, kind, 20)) < 1e-4


def test_four_ranks_under_pressure(several_on_one_gpu):
    from fulgurite.parallel import launch

    assert max(launch(compare, 4, 4, "f32", "plain", 100)) < 1e-4


def compare_gradients(count: int, rounds: int) -> float:
    """Of tokens, weights and this rank's experts, against all experts on one rank."""
    from fulgurite.parallel import apply_expert_parallel
    from fulgurite.parallel.collectives import all_reduce
    from fulgurite.parallel.dispatch.symmetric import (
        DispatchConfig,
        SymmetricMemoryDispatcher,
    )
    from fulgurite.parallel.dispatch.symmetric_gradients import (
        DifferentiableDispatcher,
        gradient_config,
    )

    mesh = mesh_of((count, 1, count))
    there = DispatchConfig(
        16, 3, cases.HIDDEN, 8 // count, dispatch_format="f32", combine_format="f32"
    )
    plans = there, gradient_config(there, torch.float32)
    transport = DifferentiableDispatcher(
        *(SymmetricMemoryDispatcher.create(mesh.expert, plan, mesh.device) for plan in plans)
    )
    whole = cases.make_experts("plain", 8, 3, torch.float32).to(mesh.device)
    ours = apply_expert_parallel(copy.deepcopy(whole), transport)
    worst = 0.0
    for round in range(rounds):
        tokens = (5 * mesh.rank + 3 * round) % 17
        x, routes = cases.make_inputs(10 * round + mesh.rank, tokens, 8, 3, torch.float32, None)
        pairs = []
        for experts in (ours, whole):
            experts.zero_grad(set_to_none=True)
            given, weights = (
                one.to(mesh.device, copy=True).requires_grad_() for one in (x, routes.weights_Tk)
            )
            out = experts(given, type(routes)(weights, routes.experts_Tk.to(mesh.device)))
            (out.tanh().sum() + 0 * given.sum()).backward()
            pairs.append((out.detach(), given.grad, weights.grad))
        transport.check()
        worst = max(worst, *(distance(*pair) for pair in zip(*pairs, strict=True)))
        first = mesh.rank * 8 // count
        for name, parameter in ours.experts.named_parameters():
            alone = whole.get_parameter(name).grad
            alone = torch.zeros_like(whole.get_parameter(name)) if alone is None else alone
            total = all_reduce(alone.cpu(), mesh.expert)[first : first + 8 // count]
            worst = max(worst, distance(parameter.grad.cpu(), total))
    return worst


def test_gradients_of_two_ranks(several_on_one_gpu):
    from fulgurite.parallel import launch

    assert max(launch(compare_gradients, 2, 2, 6)) < 1e-4
