"""The AdamW kernel against the optimizer's own formula in float32."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels.optimizer import tensor_list
from fulgurite.kernels.optimizer.triton_adamw import AdamWStep, MasterWeight, adamw_step
from fulgurite.train.optim.adamw import update_adamw
from fulgurite.train.optim.rounding import join_master, split_master
from tests.kernels.triton_support import DEVICE

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("size", [1, 7, 1024, 3001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_steps(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    master = torch.randn(size, generator=generator)
    weight, low = split_master(master)
    weight, low = weight.to(DEVICE), low.to(DEVICE)
    moments = [torch.zeros(size) for _ in range(2)]
    ours = [moment.clone().to(DEVICE) for moment in moments]
    for step in (1, 2, 3):
        gradient = torch.randn(size, generator=generator).to(dtype)
        update_adamw([master], [gradient.float()], [moments[0]], [moments[1]], GROUP, step)
        numbers = AdamWStep(GROUP["lr"], GROUP["betas"], GROUP["eps"], 0.1, step)
        tensors = MasterWeight(weight, low, gradient.to(DEVICE), *ours)
        assert tensors.can_run()
        adamw_step([tensors], numbers)
        joined = join_master(weight.cpu(), low.cpu())
        torch.testing.assert_close(joined, master, rtol=1e-6, atol=1e-7)
        for actual, expected in zip(ours, moments, strict=True):
            torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-7)
        assert torch.equal(weight.cpu(), split_master(joined)[0])


def test_updates_below_one_bfloat16_step_add_up() -> None:
    weight, low = torch.ones(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int16)
    given = [weight, low, torch.zeros(64), torch.zeros(64)]
    weight, low, first, second = (x.to(DEVICE) for x in given)
    gradient = torch.ones(64).to(DEVICE)
    for step in range(1, 51):
        tensors = MasterWeight(weight, low, gradient, first, second)
        adamw_step([tensors], AdamWStep(1e-4, (0.9, 0.95), 1e-8, 0, step))
    assert torch.allclose(join_master(weight.cpu(), low.cpu()), torch.tensor(0.995), atol=1e-5)


def test_infinities_keep_their_kind() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0]).bfloat16().to(DEVICE)
    low = torch.zeros(4, dtype=torch.int16).to(DEVICE)
    zeros = [torch.zeros(4).to(DEVICE) for _ in range(3)]
    step = AdamWStep(1e-3, (0.9, 0.95), 1e-8, 0.0, 1)
    adamw_step([MasterWeight(values, low, *zeros)], step)
    assert values.tolist()[:2] == [float("inf"), float("-inf")] and values[2].isnan()
    assert low.tolist() == [0, 0, 0, 0] and values[3] == 1.0


def test_many_weights_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all sizes, one that is not aligned, gradients of two dtypes: each as if it were alone."""
    monkeypatch.setattr(tensor_list, "BLOCKS_PER_PROGRAM", 2)
    step = AdamWStep(1e-2, (0.9, 0.95), 1e-8, 0.1, 3)
    together, alone = ([make_weight(size) for size in SIZES] for _ in range(2))
    adamw_step(together, step)
    for one, other in zip(together, alone, strict=True):
        adamw_step([other], step)
        before = make_weight(one.weight.numel())
        assert one.weight.numel() == 0 or not torch.equal(one.weight, before.weight)
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


SIZES = (5, 0, 4096, 1, 3001, 16, 8 * 1024 + 3)


def make_weight(size: int) -> MasterWeight:
    generator = torch.Generator().manual_seed(size)
    weight, low = split_master(torch.randn(size + 1, generator=generator))
    gradient = torch.randn(size, generator=generator)
    gradient = gradient if size % 2 else gradient.bfloat16()
    moments = torch.rand(2, size, generator=generator)
    tensors = (weight[1:], low[1:], gradient, moments[0].clone(), moments[1].clone())
    return MasterWeight(*(x.to(DEVICE) for x in tensors))


def test_what_it_does_not_take() -> None:
    def can_run(*tensors: torch.Tensor) -> bool:
        return MasterWeight(*tensors).can_run()

    weight, low, state = torch.ones(4, 4).bfloat16(), torch.zeros(4, 4).short(), torch.zeros(4, 4)
    assert can_run(weight, low, state, state, state)
    assert not can_run(weight.float(), low, state, state, state)
    assert not can_run(weight.t()[:, :2], low[:, :2], state[:, :2], state[:, :2], state[:, :2])
    assert not can_run(weight, low, state, state.bfloat16(), state)
