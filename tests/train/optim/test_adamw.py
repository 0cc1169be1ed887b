"""AdamW against torch.optim.AdamW; small updates, odd shapes, missing gradients, checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.train.optim.adamw import AdamW

SHAPES = [(5, 3), (7,), (), (0, 4), (2, 3, 4), (129, 130)]


def make_parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def set_gradients(parameters, step, scale=1.0):
    generator = torch.Generator().manual_seed(step)
    for parameter in parameters:
        gradient = scale * torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.to(parameter.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_torch_to_the_bit(dtype):
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    optimizers = [AdamW(ours, **options), torch.optim.AdamW(theirs, **options, foreach=True)]
    for step in range(10):
        for parameters, optimizer in zip((ours, theirs), optimizers, strict=True):
            set_gradients(parameters, step)
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            optimizer.step()
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)


def test_a_parameter_without_gradient_keeps_weight_states_and_step():
    parameters = make_parameters()
    optimizer = AdamW(parameters)
    set_gradients(parameters, 0)
    parameters[0].grad = None
    before = parameters[0].clone()
    optimizer.step()
    assert torch.equal(parameters[0], before)
    assert optimizer.state[parameters[0]]["step"] == 0
    assert optimizer.state[parameters[1]]["step"] == 1
    set_gradients(parameters, 1)
    optimizer.step()  # two different steps in one call
    reference = make_parameters()[:1]
    expected = torch.optim.AdamW(reference, 1e-3, (0.9, 0.95), weight_decay=0.1)
    reference[0].grad = parameters[0].grad.clone()
    expected.step()
    assert torch.equal(parameters[0], reference[0])


def test_small_updates_of_bfloat16_weights_are_not_lost():
    weight = nn.Parameter(torch.ones(64, 65, dtype=torch.bfloat16))
    reference = nn.Parameter(torch.ones(64, 65))
    optimizers = [
        AdamW([weight], lr=1e-5, weight_decay=0.0),
        torch.optim.AdamW([reference], lr=1e-5, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for _ in range(1000):  # one bfloat16 step at 1 is 0.004 downwards: 400 updates
        for parameter, optimizer in zip((weight, reference), optimizers, strict=True):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert torch.allclose(reference, torch.tensor(0.99), atol=1e-4)
    torch.testing.assert_close(weight.float(), reference, rtol=2**-8, atol=0.0)
    assert (weight < 1).all()


def test_bfloat16_with_low_bits_equals_float32_weights_to_the_bit():
    ours, theirs = make_parameters(torch.bfloat16), make_parameters(torch.bfloat16)
    masters = [nn.Parameter(p.detach().float()) for p in theirs]
    first, second = AdamW(ours, lr=1e-3), AdamW(masters, lr=1e-3)
    for step in range(5):
        set_gradients(ours, step)
        for master, parameter in zip(masters, ours, strict=True):
            master.grad = parameter.grad.float()
        first.step()
        second.step()
    for parameter, master in zip(ours, masters, strict=True):
        difference = (parameter.detach().float() - master.detach()).abs()
        assert (difference <= master.detach().abs() * 2**-8).all()
        low = first.state[parameter]["master_low"]
        bits = (parameter.detach().view(torch.int16).int() << 16) + low
        assert torch.equal(bits.view(torch.float32), master.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_a_restart_repeats_every_bit(dtype, states, rounding):
    def run(parameters, optimizer, steps):
        for step in steps:
            set_gradients(parameters, step)
            optimizer.step()

    parameters = make_parameters(dtype)
    optimizer = AdamW(parameters, states=states, rounding=rounding)
    run(parameters, optimizer, range(3))
    others = [nn.Parameter(p.detach().clone()) for p in parameters]
    restarted = AdamW(others, states=states, rounding=rounding)
    restarted.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for old, new in zip(parameters, others, strict=True):
        for name, value in optimizer.state[old].items():
            assert restarted.state[new][name].dtype == value.dtype
    run(parameters, optimizer, range(3, 6))
    run(others, restarted, range(3, 6))
    for found, expected in zip(others, parameters, strict=True):
        assert torch.equal(found, expected)


def test_a_closure_gives_the_loss():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = AdamW([parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == 3.0
    assert (parameter < 1).all()


@pytest.mark.parametrize(
    "options",
    [{"states": "int4"}, {"rounding": "up"}, {"betas": (1.0, 0.9)}, {"eps": -1.0}],
)
def test_wrong_options_say_what_is_allowed(options):
    with pytest.raises(ArgumentError, match="optimizer"):
        AdamW(make_parameters(), **options)


def test_float16_weights_and_sparse_gradients_are_refused():
    with pytest.raises(ArgumentError, match="float16"):
        AdamW(make_parameters(torch.float16))
    parameter = nn.Parameter(torch.ones(4, 2))
    optimizer = AdamW([{"params": [parameter], "names": ["embed"]}])
    parameter.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(ArgumentError, match="embed is sparse"):
        optimizer.step()
