"""AdamW with packed states against the optimizer's own steps on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fulgurite.kernels.common.triton_import import tl, triton
from fulgurite.kernels.optimizer.triton_adamw import AdamWStep
from fulgurite.kernels.optimizer.triton_adamw_packed import (
    PackedState,
    PackedWeight,
    can_run,
    find_code,
    packed_adamw_step,
)
from fulgurite.train.optim import AdamW
from fulgurite.train.optim.adamw import make_packed
from fulgurite.train.optim.states import find_edges, make_code
from tests.kernels.triton_support import DEVICE

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@triton.jit
def code_kernel(x, edges, out, size, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    value = tl.load(x + offsets, mask=mask, other=0.0)
    tl.store(out + offsets, find_code(value, edges, SIGNED), mask=mask)


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq"])
def test_codes_are_those_of_a_search(name: str) -> None:
    """Every code, every edge and its neighbours, powers of ten, tiny and special values."""
    cpu = torch.device("cpu")
    code, edges = make_code(name, cpu), find_edges(name, cpu)
    powers = 10.0 ** -torch.arange(0.0, 12.0)
    near = torch.cat([code, edges, powers, torch.tensor([0.0, 1e-30, 1.0])])
    near = torch.cat([near, near.nextafter(torch.tensor(9.0)), near.nextafter(torch.tensor(-9.0))])
    x = torch.cat([near, torch.rand(2000, generator=torch.Generator().manual_seed(0))])
    x = (torch.cat([x, -x]) if name == "exp_avg" else x).clamp(-1 if name == "exp_avg" else 0, 1)
    out = torch.empty_like(x, dtype=torch.int32).to(DEVICE)
    grid = (-(-len(x) // 1024),)
    code_kernel[grid](x.to(DEVICE), edges.to(DEVICE), out, len(x), name == "exp_avg", 1024)
    assert torch.equal(out.cpu(), torch.bucketize(x, edges, out_int32=True))


@pytest.mark.parametrize(
    ("shape", "states", "kind"),
    [
        ((33, 129), "int8", "float32"),
        ((16, 256), "int8", "master"),
        ((3, 11, 200), "int8", "stochastic"),
        ((2, 5, 30), "bfloat16", "stochastic"),
        ((9, 130), "bfloat16", "master"),
        ((70,), "float32", "stochastic"),
        ((300, 1), "bfloat16", "float32"),
    ],
)
def test_steps(shape: tuple[int, ...], states: str, kind: str) -> None:
    generator = torch.Generator().manual_seed(len(shape))
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    start = torch.randn(shape, generator=generator).to(dtype)
    rounding = "stochastic" if kind == "stochastic" else "master"
    ours, theirs = start.clone().to(DEVICE), start.clone()
    optimizers = [
        AdamW([{"params": [x], "names": ["w"]}], **OPTIONS, states=states, rounding=rounding)
        for x in (ours, theirs)
    ]
    for step in (1, 2):
        gradient = torch.randn(shape, generator=generator) * 10.0 ** -torch.randint(
            0, 5, shape, generator=generator
        )
        theirs.grad = gradient.to(dtype)
        optimizers[1].step()
        run_kernel(optimizers[0], ours, gradient.to(dtype).to(DEVICE), step)
        compare(optimizers[0].state[ours], optimizers[1].state[theirs])
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if kind == "float32" else {"rtol": 8e-3, "atol": 0}
        differs = ~torch.isclose(ours.cpu().float(), theirs.float(), **tolerance)
        assert differs.float().mean() <= 1e-3
        copy_state(optimizers[1], theirs, optimizers[0], ours)


def run_kernel(optimizer: AdamW, weight: Tensor, gradient: Tensor, step: int) -> None:
    """One step of the kernel on the optimizer's own states."""
    weight.grad = gradient
    (group,) = optimizer.param_groups
    (slot,) = optimizer._collect(group)
    assert slot.step == step
    parts = make_packed(slot)
    assert can_run(*parts)
    numbers = AdamWStep(group["lr"], group["betas"], group["eps"], group["weight_decay"], step)
    packed_adamw_step(*parts, numbers)


def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Rounding may move an element to the next code, or the next bfloat16, in one of a thousand."""
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        actual = ours[name].cpu().float()
        if expected.dtype == torch.uint8 or expected.dtype == torch.int16:
            if expected.dtype == torch.uint8:
                assert (actual - expected.float()).abs().max() <= 1, name
                assert (actual != expected.float()).float().mean() <= 2e-3, name
            continue
        rtol = 8e-3 if expected.dtype == torch.bfloat16 else 1e-5
        close = torch.isclose(actual, expected.float(), rtol=rtol, atol=1e-8)
        assert close.float().mean() >= 1 - 1e-3, name


def copy_state(source: AdamW, theirs: Tensor, target: AdamW, ours: Tensor) -> None:
    """The next step starts from equal values."""
    ours.copy_(theirs)
    for name, value in source.state[theirs].items():
        target.state[ours][name].copy_(value)


def test_random_bits_follow_the_place_in_the_whole_tensor() -> None:
    """A shard that starts elsewhere rounds as its part of the whole weight."""
    whole = torch.full((8, 130), 1.0 + 2**-9).bfloat16()
    gradient = torch.full((8, 130), 0.37)

    def step(weight: Tensor, offset: tuple[int, ...]) -> Tensor:
        weight = weight.clone().to(DEVICE)
        moments = [PackedState(torch.zeros(weight.shape, device=DEVICE)) for _ in range(2)]
        packed = PackedWeight(weight, None, 12345, offset)
        numbers = AdamWStep(1e-3, (0.9, 0.95), 1e-8, 0.0, 1)
        packed_adamw_step(packed, gradient[: len(weight)].to(DEVICE), *moments, numbers)
        return weight.cpu()

    expected = step(whole, (0, 0))
    assert len(expected.unique()) == 2
    assert torch.equal(step(whole[3:], (3, 0)), expected[3:])
    assert not torch.equal(step(whole[3:], (0, 0)), expected[3:])


def test_what_it_does_not_take() -> None:
    weight, state = torch.ones(4, 8), PackedState(torch.zeros(4, 8))
    assert can_run(PackedWeight(weight), weight, state, state)
    assert not can_run(PackedWeight(weight.double()), weight, state, state)
    assert not can_run(PackedWeight(weight.t()), weight, state, state)
    assert not can_run(PackedWeight(torch.ones(())), weight, state, state)
    assert not can_run(PackedWeight(weight.view(1, 1, 4, 8)), weight, state, state)
    assert not can_run(PackedWeight(weight), weight, state, PackedState(weight.bfloat16()))
