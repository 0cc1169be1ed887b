"""Drawing without sorting against the definition, which sorts."""

from __future__ import annotations

import pytest
import torch

from fulgurite.kernels import sampling

from .triton_support import DEVICE, INTERPRETED

from fulgurite.kernels.triton.sampling import sample_rows  # isort: skip  (needs triton)

SETTINGS = [
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 5, 1.0),
    (1.0, 0.0, 0, 0.8),
    (1.5, 0.1, 0, 1.0),
    (1.2, 0.02, 40, 0.9),
    (1.0, 0.0, 1, 0.5),
]
SIZES = (1, 7, 1025) if INTERPRETED else (1, 7, 1025, 50_001, 151_936)


def compare(logits: torch.Tensor, settings: list[tuple[float, ...]], random: list[float]) -> None:
    columns = torch.tensor([(*one, u) for one, u in zip(settings, random, strict=True)]).double()
    got = sample_rows(logits.to(DEVICE), *columns.unbind(dim=1)).cpu()
    wanted = sampling.one_by_one(logits, *columns.unbind(dim=1))
    assert got.tolist() == wanted.tolist()


@pytest.mark.parametrize("size", SIZES)
def test_each_setting_beside_the_others(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    numbers = [0.03, 0.4, 0.61, 0.77, 0.9, 0.999]
    compare(2 * torch.randn(6, size, generator=generator), SETTINGS, numbers)


def test_ties_and_impossible_tokens() -> None:
    logits = torch.tensor(
        [
            [0.3, 0.4, 0.3, 0.0],
            [0.25, 0.25, 0.25, 0.25],
            [0.5, 0.25, 0.125, 0.125],
            [0.0, 1.0, 0.0, 0.0],
        ]
    ).log()
    settings = [(1.0, 0.0, 2, 1.0), (1.0, 0.0, 0, 0.5), (1.0, 1.0, 0, 1.0), (1.0, 0.0, 3, 0.7)]
    numbers = (0.0, 0.35, 0.999)
    every = [(row, setting, u) for row in range(4) for setting in settings for u in numbers]
    rows, chosen, random = zip(*every, strict=True)
    compare(logits[list(rows)], list(chosen), list(random))


def test_rows_of_a_larger_tensor() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))[::2, :37]
    compare(logits, [(1.0, 0.0, 0, 0.9)] * 2, [0.2, 0.8])
