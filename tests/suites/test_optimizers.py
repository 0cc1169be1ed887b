"""Compiled optimizer steps against eager ones: forms, schedules of the learning rate, few kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import fulgurite

SHAPES = [(5, 3), (7,), (1,), (2, 3, 4), (5, 3)]


def make_parameters(dtypes=(torch.float32,)):
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to(dtypes[k % len(dtypes)]))
        for k, shape in enumerate(SHAPES)
    ]


def set_gradients(step, *groups):
    generator = torch.Generator().manual_seed(step)
    for each in zip(*groups, strict=True):
        gradient = torch.randn(each[0].shape, generator=generator).to(each[0].dtype)
        for parameter in each:
            parameter.grad = gradient.clone()


def run_steps(make, *, steps=5, dtypes=(torch.float32,), change=None, **tolerance):
    """Eager and compiled steps side by side. Returns the compiled step."""
    eager = make_parameters(dtypes)
    ours = copy.deepcopy(eager)
    optimizers = [make(eager), make(ours)]
    compiled = fulgurite.compile(optimizers[1].step)
    for step in range(steps):
        set_gradients(step, eager, ours)
        for optimizer in optimizers:
            if change is not None:
                change(optimizer, step)
        optimizers[0].step()
        compiled()
        for found, expected in zip(ours, eager, strict=True):
            torch.testing.assert_close(found, expected, **tolerance)
    return compiled


ADAM = {"lr": 1e-2, "weight_decay": 0.1}
CASES = {
    "adamw": lambda p: torch.optim.AdamW(p, **ADAM),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, **ADAM, foreach=True),
    "adamw_one_by_one": lambda p: torch.optim.AdamW(p, **ADAM, foreach=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, **ADAM, fused=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, **ADAM, amsgrad=True, foreach=True),
    "adamw_tensor_lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adam_maximize": lambda p: torch.optim.Adam(p, **ADAM, maximize=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd_nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_equal_eager(name):
    run_steps(CASES[name], steps=3)


@pytest.mark.parametrize("name", ["adamw", "adamw_foreach", "sgd_nesterov", "sgd"])
def test_a_schedule_of_the_learning_rate_does_not_recompile(name):
    def change(optimizer, step):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)

    if name.startswith("sgd") and torch.__version__ < "2.13":
        pytest.skip("TorchDynamo specializes on `alpha` before our decomposition")
    compiled = run_steps(CASES[name], steps=7, change=change)
    # the first state, the state after it, and the learning rate as a symbol
    assert len(compiled.session.graphs) <= 3


def test_parameters_of_several_dtypes():
    # captured optimizers count steps in float32 tensors, as with capturable=True
    dtypes = (torch.float32, torch.float64)
    run_steps(CASES["adamw_foreach"], dtypes=dtypes, steps=3, rtol=1e-5, atol=1e-6)


def test_one_kernel_library_for_all_parameters():
    compiled = run_steps(CASES["adamw"], steps=2)
    final = compiled.session.graphs[-1].final_trace("inference")
    calls = [node for node in final.graph.nodes if node.op == "call_function"]
    assert len(calls) == 1


def test_a_training_step_with_the_optimizer_inside():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]

    def train(model, optimizer, x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = fulgurite.compile(lambda x: train(model, optimizers[0], x))
    for _ in range(4):  # a later call sees the parameters that an earlier one wrote
        x = torch.randn(3, 4)
        torch.testing.assert_close(compiled(x), train(reference, optimizers[1], x))
        for found, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found, expected)
