"""Muon against a float64 reference of the published algorithm; stacks, odd shapes, shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.train.optim.muon import Muon, newton_schulz

SHAPES = [(24, 24), (40, 8), (8, 40), (1, 6), (5, 1), (4, 24, 16), (0, 3, 4), (24, 24)]


def reference_newton_schulz(matrix):
    """As published: X = G / |G|; five times A = X X^T, B = b A + c A A, X = a X + B X."""
    x = matrix.double()
    transposed = x.shape[0] > x.shape[1]
    x = x.T if transposed else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        b = -4.7750 * a + 2.0315 * a @ a
        x = 3.4445 * x + b @ x
    return x.T if transposed else x


class ReferenceMuon:
    """One matrix, float64."""

    def __init__(self, weight, lr, momentum, weight_decay):
        self.weight, self.buffer = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay

    def step(self, gradient):
        gradient = gradient.double()
        self.buffer = self.momentum * self.buffer + (1 - self.momentum) * gradient
        update = (1 - self.momentum) * gradient + self.momentum * self.buffer
        scale = 0.2 * max(self.weight.shape) ** 0.5
        self.weight = self.weight * (1 - self.lr * self.weight_decay)
        self.weight = self.weight - self.lr * scale * reference_newton_schulz(update)


def make_parameters(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("batched", [True, False])
def test_equals_the_published_algorithm(batched):
    weights = [nn.Parameter(w) for w in make_parameters()]
    group = {"params": weights, "algorithm": "muon"}
    optimizer = Muon([group], lr=0.05, momentum=0.9, weight_decay=0.1, batched=batched)
    references = [
        [ReferenceMuon(m, 0.05, 0.9, 0.1) for m in w.detach().reshape(-1, *w.shape[-2:])]
        for w in weights
    ]
    for step in range(4):
        for weight, gradient, stack in zip(
            weights, make_parameters(10 + step), references, strict=True
        ):
            weight.grad = gradient
            for part, reference in zip(
                gradient.reshape(-1, *gradient.shape[-2:]), stack, strict=True
            ):
                reference.step(part)
        optimizer.step()
    for weight, stack in zip(weights, references, strict=True):
        for found, reference in zip(weight.reshape(-1, *weight.shape[-2:]), stack, strict=True):
            torch.testing.assert_close(found.double(), reference.weight, rtol=1e-4, atol=1e-4)


def test_equals_torch():
    """torch's iterates in bfloat16, so results agree to that."""
    ours, theirs = (nn.Parameter(make_parameters()[0]) for _ in range(2))
    optimizers = (
        Muon([{"params": [ours], "algorithm": "muon"}], lr=0.02, weight_decay=0.1),
        torch.optim.Muon(
            [theirs], lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
    )
    for step in range(3):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = make_parameters(step)[0]
            optimizer.step()
    update = (theirs - make_parameters()[0]).abs().max()
    assert (ours - theirs).abs().max() < 0.03 * update


def test_singular_values_are_near_one():
    """The iteration ends between 0.65 and 1.25 for values above 0.01 of the norm."""
    generator = torch.Generator().manual_seed(0)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(3, 20, 33, generator=generator)))
    assert values.min() > 0.6 and values.max() < 1.25
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


def test_the_update_does_not_depend_on_the_size_of_the_gradient():
    weights = [nn.Parameter(torch.zeros(12, 8)) for _ in range(2)]
    for weight, factor in zip(weights, (1e-6, 1e4), strict=True):
        weight.grad = make_parameters()[1][:12] * factor
        Muon([{"params": [weight], "algorithm": "muon"}], lr=0.1).step()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
def test_bfloat16_weights_and_small_states_restart_to_the_bit(states):
    def make():
        weights = [nn.Parameter(w) for w in make_parameters(dtype=torch.bfloat16)]
        weights.append(nn.Parameter(torch.ones(64, 70, dtype=torch.bfloat16)))
        norm = nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
        groups = [{"params": weights, "algorithm": "muon"}, {"params": [norm]}]
        return [*weights, norm], Muon(groups, states=states, rounding="stochastic")

    def run(parameters, optimizer, steps):
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for p in parameters:
                p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            optimizer.step()

    parameters, optimizer = make()
    run(parameters, optimizer, range(3))
    others, restarted = make()
    for new, old in zip(others, parameters, strict=True):
        new.data.copy_(old)
    restarted.load_state_dict(optimizer.state_dict())
    run(others, restarted, range(3, 5))
    again, whole = make()
    run(again, whole, range(5))
    for found, expected in zip(others, again, strict=True):
        assert torch.equal(found, expected)


def test_vectors_and_wrong_momentum_are_refused():
    with pytest.raises(ArgumentError, match="updates matrices"):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "algorithm": "muon"}])
    with pytest.raises(ArgumentError, match="momentum=1"):
        Muon([nn.Parameter(torch.ones(3))], momentum=1.0)
