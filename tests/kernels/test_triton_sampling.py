"""Drawing without sorting against the definition, which sorts."""

from __future__ import annotations

import random

import pytest
import torch

from fulgurite.kernels import sampling

from .triton_support import DEVICE, INTERPRETED

from fulgurite.kernels.triton import sampling as kernels  # isort: skip  (needs triton)

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
    rows = [(*one, u) for one, u in zip(settings, random, strict=True)]
    columns = torch.tensor(rows, dtype=torch.float64)
    got = kernels.sample_rows(logits.to(DEVICE), *columns.unbind(dim=1)).cpu()
    wanted = sampling.one_by_one(logits, *columns.unbind(dim=1))
    assert got.tolist() == wanted.tolist()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many programs a row even of few tokens."""
    for name, size in (("CHUNK", 64), ("STEP", 32), ("BLOCK", 32)):
        monkeypatch.setattr(kernels, name, size)


@pytest.mark.parametrize("size", SIZES)
def test_each_setting_beside_the_others(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    numbers = [0.03, 0.4, 0.61, 0.77, 0.9, 0.999]
    compare(2 * torch.randn(6, size, generator=generator), SETTINGS, numbers)


def rows_of(kind: str, count: int, size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator)
    if kind == "impossible":
        return x.masked_fill(torch.rand(count, size, generator=generator) < 0.4, float("-inf"))
    if kind == "ties":
        return (2 * x).round()
    return x * {"wide": 12.0, "flat": 0.001, "equal": 0.0}[kind]


@pytest.mark.parametrize("size", [130] if INTERPRETED else [63, 130, 200, 5000])
@pytest.mark.parametrize("kind", ["wide", "flat", "equal", "ties", "impossible"])
def test_many_programs_a_row(kind: str, size: int, small_chunks: None) -> None:
    """Edges anywhere: in the first bin, in the last, where all tokens share one."""
    numbers = random.Random(size)
    settings = [
        (
            numbers.choice([0.3, 1.0, 2.0]),
            numbers.choice([0, 0, 0.05, 0.5]),
            numbers.choice([0, 1, 3, 50, 1000]),
            numbers.choice([1.0, 0.9, 0.5, 0.9999, 0.01]),
        )
        for _ in range(6)
    ]
    drawn = [0.0, 1 - 2**-30, *(numbers.random() for _ in range(4))]
    compare(rows_of(kind, 6, size, size), settings, drawn)


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
    numbers = (0.35, 0.999) if INTERPRETED else (0.0, 0.35, 0.999)
    every = [(row, setting, u) for row in range(4) for setting in settings for u in numbers]
    rows, chosen, random = zip(*every, strict=True)
    compare(logits[list(rows)], list(chosen), list(random))


def test_rows_of_a_larger_tensor() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))[::2, :37]
    compare(logits, [(1.0, 0.0, 0, 0.9)] * 2, [0.2, 0.8])


def test_rows_without_a_distribution() -> None:
    """NaN and infinities: the likeliest token, whatever was asked for."""
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(1))
    logits[0, 7], logits[1, 30], logits[2, 5] = float("nan"), float("inf"), float("nan")
    logits[2, 4], logits[3] = float("inf"), float("-inf")
    compare(logits, [(1.0, 0.0, 4, 0.9)] * 5, [0.5] * 5)


def test_greedy(small_chunks: None) -> None:
    logits = torch.randn(9, 200, generator=torch.Generator().manual_seed(2))
    logits[1] = -7.0
    logits[2, 100:] = logits[2].max()
    logits[3, 150], logits[3, 4] = float("nan"), float("inf")
    logits[4, 199] = float("inf")
    logits[5] = float("-inf")
    logits[6], logits[6, 60], logits[6, 70] = -1.0, -0.0, 0.0
    logits[7, 3] = logits[7, 190] = 50.0
    got = kernels.greedy(logits.to(DEVICE)).cpu()
    assert got.tolist() == logits.argmax(dim=-1).tolist()
    half = kernels.greedy(logits.to(DEVICE, torch.bfloat16)).cpu()
    assert half.tolist() == logits.bfloat16().argmax(dim=-1).tolist()
    assert kernels.greedy(logits[:0].to(DEVICE)) is NotImplemented


def test_a_row_does_not_depend_on_its_neighbours(small_chunks: None) -> None:
    logits = rows_of("wide", 3, 150, 5)
    columns = torch.tensor(
        [(1.0, 0.0, 9, 0.9, 0.6), (1.0, 0.0, 0, 1.0, 0.6), (2.0, 0.1, 0, 0.5, 0.1)]
    )
    columns = columns.double()
    together = kernels.sample_rows(logits.to(DEVICE), *columns.unbind(1)).tolist()
    alone = [
        kernels.sample_rows(logits[i : i + 1].to(DEVICE), *columns[i : i + 1].unbind(1)).item()
        for i in range(3)
    ]
    assert together == alone


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long")
@pytest.mark.parametrize("size", [32_000, 151_936, 262_144])
@pytest.mark.parametrize("scale", [0.001, 1.0, 8.0])
def test_vocabularies_of_real_size(size: int, scale: float) -> None:
    logits = scale * torch.randn(6, size, generator=torch.Generator().manual_seed(3))
    compare(logits, SETTINGS, [0.03, 0.4, 0.61, 0.77, 0.9, 0.999])
