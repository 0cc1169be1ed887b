"""Sampling kernels, which don't sort, against the reference, which does."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from fulgurite.cudagraph import capture_graph
from fulgurite.kernels.sampling import reference, triton_sampling
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from tests.kernels.triton_support import DEVICE, INTERPRETED

SETTINGS = [
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 5, 1.0),
    (1.0, 0.0, 0, 0.8),
    (1.5, 0.1, 0, 1.0),
    (1.2, 0.02, 40, 0.9),
    (1.0, 0.0, 1, 0.5),
]
RANDOM = [0.03, 0.4, 0.61, 0.77, 0.9, 0.999]
SIZES = (1, 7, 1025) if INTERPRETED else (1, 7, 1025, 50_001, 151_936)
ROUNDING = 2.0**-18  # relative error of a p: its exponent, 31 at most, in float32


def build_settings(settings: list[tuple[float, ...]], random: list[float]) -> Tensor:
    rows = [(*one, u) for one, u in zip(settings, random, strict=True)]
    return torch.tensor(rows, dtype=torch.float64)


def compare(logits: Tensor, settings: list[tuple[float, ...]], random: list[float]) -> None:
    rows = build_settings(settings, random)
    sampled = triton_sampling.sample_rows(logits.to(DEVICE), rows).cpu()
    assert sampled.tolist() == reference.sample_rows_reference(logits, rows).tolist()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs per row even for few tokens, and candidate lists that overflow."""
    sizes = {"chunk": 64, "pivot_chunk": 128, "stretch": 16, "list_tile": 16, "list_block": 32}
    sizes |= {"capacity": 48}
    for name, size in sizes.items():
        monkeypatch.setattr(Sm90Heuristics, f"sampling_{name}", size)


@pytest.mark.parametrize("size", SIZES)
def test_all_settings_in_one_batch(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    compare(2 * torch.randn(6, size, generator=generator), SETTINGS, RANDOM)


def build_logits(kind: str, count: int, size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, size, generator=generator)
    if kind == "impossible":
        return x.masked_fill(torch.rand(count, size, generator=generator) < 0.4, float("-inf"))
    if kind == "ties":
        return (2 * x).round()
    return x * {"wide": 12.0, "flat": 0.001, "equal": 0.0}[kind]


@pytest.mark.parametrize("size", [200] if INTERPRETED else [63, 130, 200, 5000])
@pytest.mark.parametrize("kind", ["wide", "flat", "equal", "ties", "impossible"])
def test_several_programs_per_row(kind: str, size: int, small_chunks: None) -> None:
    """Thresholds anywhere: above the first pivot, below the last, where all tokens share one p."""
    rng = random.Random(size)
    settings = [
        (
            rng.choice([0.3, 1.0, 2.0]),
            rng.choice([0, 0, 0.05, 0.5]),
            rng.choice([0, 0, 1, 3, 50, 1000]),
            rng.choice([1.0, 0.9, 0.5, 0.9999, 0.01]),
        )
        for _ in range(6)
    ]
    first = 2**-28 if kind == "wide" else 0.0  # float64 tells p of 1e-50 from 0, float32 does not
    drawn = [first, 1 - 2**-30, *(rng.random() for _ in range(4))]
    compare(build_logits(kind, 6, size, size), settings, drawn)


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
    uniforms = (0.35, 0.999) if INTERPRETED else (0.0, 0.35, 0.999)
    every = [(row, setting, u) for row in range(4) for setting in settings for u in uniforms]
    rows, chosen, random = zip(*every, strict=True)
    compare(logits[list(rows)], list(chosen), list(random))


def test_list_of_exactly_k_candidates(small_chunks: None) -> None:
    """The k largest are in k stretches, so the list has k tokens; top-p filters those."""
    logits = torch.zeros(3, 200)
    logits[:, :80:16] = torch.tensor([3.0, 2.9, 2.8, 2.7, 2.6])
    settings = [(1.0, 0.0, 5, 0.5), (1.0, 0.0, 5, 1.0), (1.0, 0.5, 7, 0.5)]
    compare(logits, settings, [0.9, 0.95, 0.9])


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long")
def test_frequencies_match_probabilities() -> None:
    """Chi-square of many samples of one row against the p that the reference keeps."""
    logits = torch.randn(90, generator=torch.Generator().manual_seed(6))
    draws = 40_000
    u = torch.rand(draws, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    settings = torch.tensor([1.0, 0.0, 12, 0.9]).double().repeat(draws, 1)
    rows = torch.cat([settings, u[:, None]], dim=1)
    sampled = triton_sampling.sample_rows(
        logits.expand(draws, -1).contiguous().to(DEVICE), rows
    ).cpu()
    p = (logits - logits.max()).exp()
    kept = reference._filter_tokens(p, 0.0, 12, 0.9)
    expected = draws * p[kept].double() / p[kept].double().sum()
    seen = torch.bincount(sampled, minlength=90)[kept]
    assert int(seen.sum()) == draws, "a filtered token was sampled"
    assert float(((seen - expected) ** 2 / expected).sum()) < 3 * len(kept)


def test_strided_rows() -> None:
    logits = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))[::2, :37]
    compare(logits, [(1.0, 0.0, 0, 0.9)] * 2, [0.2, 0.8])


def test_settings_on_the_device() -> None:
    """The host reads nothing, so a CUDA graph can be replayed with other settings."""
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(4))
    rows = build_settings(SETTINGS, RANDOM)
    sampled = triton_sampling.sample_rows(logits.to(DEVICE), rows.to(DEVICE)).cpu()
    assert sampled.tolist() == reference.sample_rows_reference(logits, rows).tolist()


def test_rows_without_a_distribution() -> None:
    """+inf: the likeliest token, whatever the settings. NaN or all -inf: which of the two it is."""
    logits = torch.randn(5, 90, generator=torch.Generator().manual_seed(1))
    logits[0, 7], logits[1, 30], logits[2, 5] = float("nan"), float("inf"), float("nan")
    logits[2, 4], logits[3] = float("inf"), float("-inf")
    compare(logits, [(1.0, 0.0, 4, 0.9)] * 5, [0.5] * 5)
    compare(logits, [(1.0, 0.0, 0, 0.9)] * 5, [0.5] * 5)
    compare(logits, [(0.0, 0.0, 0, 1.0)] * 5, [0.0] * 5)


def test_temperature_0_is_greedy(small_chunks: None) -> None:
    """In one batch with sampled rows; logits that differ by little, and equal ones."""
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(2))
    logits[1] = 1e-3
    logits[1, 70] += 1e-10
    logits[2, 100:] = logits[2].max()
    logits[3] *= 1e-20
    settings = [(0.0, 0.0, 0, 1.0)] * 4 + [(1.0, 0.0, 4, 0.9)]
    compare(logits, settings, [0.0] * 4 + [0.7])


def test_greedy(small_chunks: None) -> None:
    logits = torch.randn(9, 200, generator=torch.Generator().manual_seed(2))
    logits[1] = -7.0
    logits[2, 100:] = logits[2].max()
    logits[3, 150], logits[3, 4] = float("nan"), float("inf")
    logits[4, 199] = float("inf")
    logits[5] = float("-inf")
    logits[6], logits[6, 60], logits[6, 70] = -1.0, -0.0, 0.0
    logits[7, 3] = logits[7, 190] = 50.0
    sampled = triton_sampling.greedy_sample(logits.to(DEVICE)).cpu()
    assert sampled.tolist() == reference.argmax_reference(logits).tolist()
    half = triton_sampling.greedy_sample(logits.to(DEVICE, torch.bfloat16)).cpu()
    assert half.tolist() == reference.argmax_reference(logits.bfloat16()).tolist()
    assert triton_sampling.greedy_sample(logits[:0].to(DEVICE)) is NotImplemented


def test_row_does_not_depend_on_the_batch(small_chunks: None) -> None:
    logits = build_logits("wide", 3, 150, 5)
    rows = torch.tensor(
        [(1.0, 0.0, 9, 0.9, 0.6), (1.0, 0.0, 0, 1.0, 0.6), (2.0, 0.1, 0, 0.5, 0.1)]
    ).double()
    batched = triton_sampling.sample_rows(logits.to(DEVICE), rows).tolist()
    alone = [
        triton_sampling.sample_rows(logits[i : i + 1].to(DEVICE), rows[i : i + 1]).item()
        for i in range(3)
    ]
    assert batched == alone


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="records CUDA graphs")
def test_captured_sampling() -> None:
    """Replayed for other logits at the same address and other settings."""
    generator = torch.Generator().manual_seed(8)
    buffer, settings = torch.zeros(6, 5000, device=DEVICE), build_settings(SETTINGS, RANDOM)
    settings = settings.to(DEVICE)
    graph = capture_graph(lambda: triton_sampling.sample_rows(buffer, settings), warmups=1)
    for _ in range(6):
        logits = 2 * torch.randn(6, 5000, generator=generator)
        buffer.copy_(logits)
        rows = build_settings(SETTINGS, torch.rand(6, generator=generator).tolist())
        settings.copy_(rows)
        sampled = graph.replay().tolist()
        assert sampled == reference.sample_rows_reference(logits, rows).tolist()


@pytest.mark.skipif(INTERPRETED, reason="takes the interpreter too long")
@pytest.mark.parametrize("size", [32_000, 151_936, 262_144])
@pytest.mark.parametrize("scale", [0.0, 0.001, 0.1, 1.0, 8.0])
def test_vocabularies_of_real_size(size: int, scale: float) -> None:
    """Where thousands of tokens have nearly one p, rounding decides which of them come first."""
    logits = scale * torch.randn(7, size, generator=torch.Generator().manual_seed(3))
    rows = build_settings([*SETTINGS, (1.0, 0.0, 9000, 0.97)], [*RANDOM, 0.5])
    sampled = triton_sampling.sample_rows(logits.to(DEVICE), rows).tolist()
    expected = reference.sample_rows_reference(logits, rows).tolist()
    for logits_O, row, token, right in zip(logits, rows.tolist(), sampled, expected, strict=True):
        assert token == right or is_plausible(logits_O, row, token), f"{row}: {token}, not {right}"


def is_plausible(logits_O: Tensor, row: list[float], token: int) -> bool:
    """Whether p's within ROUNDING of the exact ones lead to the token."""
    temperature, min_p, top_k, top_p, u = row
    p_O = ((logits_O - logits_O.max()).double() / temperature).exp()
    kept = reference._filter_tokens(p_O.float(), min_p, int(top_k), top_p)
    threshold = float(p_O[kept].min())
    near_O = (p_O / threshold - 1).abs() <= ROUNDING
    sure_O, near_O = p_O * ((p_O > threshold) & ~near_O), p_O * near_O
    least, most = float(sure_O.sum()), float((sure_O + near_O).sum())
    start, end = float(sure_O[:token].sum()), float((sure_O + near_O)[: token + 1].sum())
    is_kept = float((sure_O + near_O)[token]) > 0
    return (
        is_kept
        and start * (1 - ROUNDING) <= u * most * (1 + ROUNDING)
        and u * least * (1 - ROUNDING) <= end * (1 + ROUNDING)
    )
