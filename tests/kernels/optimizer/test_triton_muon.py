"""Muon's kernels against the formula in float64, and the optimizer with them against the one without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fulgurite.kernels.optimizer import tensor_list
from fulgurite.kernels.optimizer.triton_muon import MuonWeight, add_momentum, apply_updates
from fulgurite.train.optim import muon
from fulgurite.train.optim.rounding import join_master, split_master
from tests.kernels.triton_support import DEVICE

SIZES = (5, 0, 4096, 1, 3001, 16, 8 * 1024 + 3)


def make_weight(size: int, has_low: bool) -> tuple[MuonWeight, Tensor]:
    """A weight that may start off alignment, and its float32 master."""
    generator = torch.Generator().manual_seed(size)
    master = torch.randn(size + 1, generator=generator)[1:]
    weight, low = split_master(master)
    gradient = torch.randn(size, generator=generator)
    gradient = gradient if size % 2 else gradient.bfloat16()
    momentum = torch.randn(size, generator=generator)
    weight = weight if has_low else master.clone()
    tensors = (x.to(DEVICE) for x in (weight, low, gradient, momentum))
    first, second, *others = tensors
    return MuonWeight(first, second if has_low else None, *others), master


@pytest.mark.parametrize("has_low", [True, False])
def test_many_matrices_in_one_launch(has_low: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_list, "BLOCKS_PER_PROGRAM", 2)
    made = [make_weight(size, has_low) for size in SIZES]
    weights = [weight for weight, _ in made]
    assert all(weight.can_run() for weight in weights)
    before = [(one.gradient.double().cpu(), one.momentum.double().cpu()) for one in weights]
    updates = [torch.full_like(one.weight, 9, dtype=torch.bfloat16) for one in weights]
    add_momentum(weights, updates, 0.9)
    for one, update, (gradient, momentum) in zip(weights, updates, before, strict=True):
        momentum = 0.9 * momentum + 0.1 * gradient
        torch.testing.assert_close(one.momentum.cpu().double(), momentum, rtol=1e-5, atol=1e-6)
        wanted = 0.1 * gradient + 0.9 * momentum
        rtol = 2**-7  # the interpreter truncates to bfloat16
        torch.testing.assert_close(update.cpu().double(), wanted, rtol=rtol, atol=1e-6)
    apply_updates(weights, updates, 0.99, 0.03)
    for one, update, (_, master) in zip(weights, updates, made, strict=True):
        wanted = 0.99 * master.double() - 0.03 * update.cpu().double()
        found = (
            one.weight.cpu() if one.low is None else join_master(one.weight.cpu(), one.low.cpu())
        )
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)
        assert one.low is None or torch.equal(one.weight.cpu(), split_master(found)[0])


def test_infinities_and_nans_keep_their_kind() -> None:
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), 1.0]).bfloat16().to(DEVICE)
    low, zeros = torch.zeros(4, dtype=torch.int16).to(DEVICE), torch.zeros(4).to(DEVICE)
    weight = MuonWeight(values, low, zeros, zeros.clone())
    apply_updates([weight], [zeros.bfloat16()], 1.0, 1.0)
    assert values.tolist()[:2] == [float("inf"), float("-inf")] and values[2].isnan()
    assert low.tolist() == [0, 0, 0, 0] and values[3] == 1.0


def test_what_they_do_not_take() -> None:
    half, low, wide = torch.zeros(4, 4).bfloat16(), torch.zeros(4, 4).short(), torch.zeros(4, 4)
    assert MuonWeight(half, low, wide, wide).can_run()
    assert MuonWeight(wide, None, half, wide).can_run()
    assert not MuonWeight(half, None, wide, wide).can_run(), "it is rounded stochastically"
    assert not MuonWeight(half, low, wide, half).can_run(), "momenta in 16 bit"
    assert not MuonWeight(wide.double(), None, wide, wide).can_run()
    assert not MuonWeight(half, low, wide.t()[:, ::2], wide).can_run()


SHAPES = [(24, 24), (40, 8), (8, 40), (1, 6), (5, 1), (4, 24, 16), (0, 3, 4), (24, 24)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"batched": False}, {"states": "int8"}])
def test_the_optimizer_with_and_without_kernels(
    dtype: torch.dtype, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """int8 momenta of small matrices are float32; a large one of 64 x 70 has no kernel."""
    launches: list[int] = []

    def count(weights: list[MuonWeight], *arguments: object) -> None:
        launches.append(len(weights))
        apply_updates(weights, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(muon.triton_muon, "apply_updates", count)

    def train(has_kernels: bool) -> list[Tensor]:
        monkeypatch.setattr(muon, "has_kernels", lambda device: has_kernels)
        # Without kernels in the dtype that a GPU iterates in, too.
        monkeypatch.setattr(muon, "MATMUL_DTYPES", dict.fromkeys(("cpu", "cuda"), torch.bfloat16))
        generator = torch.Generator().manual_seed(0)
        shapes = [*SHAPES, (64, 70)]
        made = [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes]
        weights = [nn.Parameter(weight) for weight in made]
        group = {"params": weights, "algorithm": "muon"}
        optimizer = muon.Muon([group], lr=0.02, **options)  # type: ignore[arg-type]
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).to(dtype).to(DEVICE)
            optimizer.step()
        return [weight.detach().cpu() for weight in weights]

    wanted = train(False)
    assert not launches
    found = train(True)
    with_elements = sum(0 not in shape for shape in SHAPES)
    assert sum(launches) == 3 * (with_elements + ("states" not in options))
    for one, other in zip(found, wanted, strict=True):
        scale = 0.2 * max(one.shape[-2:]) ** 0.5 * 0.02
        torch.testing.assert_close(one, other, rtol=2**-7, atol=3 * scale * 0.02)
