"""Sampling against its plain definition, by distribution and by transformers' logits processors.

The reference and the C++ kernel go through the same tests.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fulgurite.kernels.sampling import cpu, ops, reference
from fulgurite.kernels.sampling.table import (
    HAS_PENALTIES,
    NAN_LOGITS,
    NO_ALLOWED_TOKEN,
    LogitsTable,
    count_tokens,
    pack_mask,
)

transformers = pytest.importorskip("transformers", reason="transformers is what these compare with")

COUNT = 500  # tokens with p under 1 / COUNT may be missed
SampleRow = Callable[[Tensor, float, float, int, float, float], int]


def sample_in_cpp(logits: Tensor, *settings: float) -> int:
    return int(cpu.sample_rows(logits[None], torch.tensor([settings], dtype=torch.float64)))


@pytest.fixture(params=["reference", "cpp"])
def sample_row(request: pytest.FixtureRequest) -> SampleRow:
    return reference.sample_row if request.param == "reference" else sample_in_cpp


def kept_by(logits: Tensor, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    """All tokens that some random number draws: the steps of the sum, walked through finely."""
    numbers = (np.arange(COUNT) + 0.5) / COUNT
    settings = torch.tensor([(1.0, min_p, top_k, top_p, u) for u in numbers], dtype=torch.float64)
    found = ops.sample_rows(logits.expand(COUNT, -1), settings).tolist()
    wanted = reference.sample_rows_reference(logits.expand(COUNT, -1), settings).tolist()
    assert found == wanted
    return sorted(set(found))


def definition(
    logits: Tensor, temperature: float, min_p: float, top_k: int, top_p: float
) -> np.ndarray:
    """The distribution written out: a sorted list, cut three times, renormalised each time."""
    values = logits.double().numpy() / temperature
    p = np.exp(values - values.max())
    p /= p.sum()
    order = sorted(range(len(p)), key=lambda i: (-p[i], i))
    order = [i for i in order if p[i] >= min_p * p.max()]
    if top_k:
        order = order[:top_k]
    left = sum(p[i] for i in order)
    kept, reached = [], 0.0
    for i in order:
        if reached < top_p * left or top_p == 1:
            kept.append(i)
        reached += p[i]
    result = np.zeros_like(p)
    result[kept] = p[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    ("key", "counter", "wanted"),
    [  # known answers of Random123
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (
            (0xFFFFFFFF, 0xFFFFFFFF),
            (0xFFFFFFFF,) * 4,
            (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        ),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(key, counter, wanted) -> None:
    assert tuple(ops.philox(np.array([key]), np.array([counter]))[0].tolist()) == wanted


def test_philox_uniforms_are_uniform_and_independent() -> None:
    seeds = np.repeat(np.arange(100, dtype=np.uint64), 200)
    numbers = ops.philox_uniform(seeds, np.tile(np.arange(200), 100))
    assert numbers.min() >= 0 and numbers.max() < 1 and len(set(numbers.tolist())) == 20_000
    assert stats.kstest(numbers, "uniform").pvalue > 0.01
    grid = numbers.reshape(100, 200)
    for pairs in (grid[:, :-1].ravel(), grid[:, 1:].ravel()), (grid[:-1].ravel(), grid[1:].ravel()):
        assert abs(np.corrcoef(*pairs)[0, 1]) < 0.03
    top = np.array([2**64 - 1], dtype=np.uint64)
    assert ops.philox_uniform(top, np.array([0])) != ops.philox_uniform(top, np.array([2**32]))


SETTINGS = [
    (1.0, 0.0, 0, 1.0),
    (0.6, 0.0, 0, 1.0),
    (2.5, 0.0, 7, 1.0),
    (1.0, 0.0, 0, 0.7),
    (1.0, 0.15, 0, 1.0),
    (1.3, 0.05, 9, 0.8),
    (1.0, 0.0, 1, 1.0),
    (1.0, 0.0, 3, 0.999),
    (1.0, 0.02, 0, 0.9),
    (1.0, 0.0, 0, 0.01),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampled_distribution_matches_the_reference(setting, sample_row: SampleRow) -> None:
    logits = 2 * torch.randn(31, generator=torch.Generator().manual_seed(4))
    wanted = definition(logits, *setting)
    count = 2000
    numbers = ops.philox_uniform(np.full(count, 99, dtype=np.uint64), np.arange(count))
    drawn = [sample_row(logits, *setting, u) for u in numbers]
    seen = np.bincount(drawn, minlength=31)
    assert not seen[wanted == 0].any()
    many = wanted * count >= 5
    observed, expected = seen[many], wanted[many] * count
    if len(observed) > 1:
        expected = np.append(expected, max(count - expected.sum(), 1e-9))
        observed = np.append(observed, count - observed.sum())
        keep = expected > 1
        expected = expected[keep] * observed[keep].sum() / expected[keep].sum()
        assert stats.chisquare(observed[keep], expected).pvalue > 0.001


@pytest.mark.covering
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("size", [1, 2, 17, 300, 5000])
@pytest.mark.parametrize("spread", [1, 6])
def test_sample_inverts_the_reference_cdf(
    setting, size: int, spread: int, sample_row: SampleRow
) -> None:
    """Also where more tokens pass than the first candidates."""
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(size))
    sums = definition(logits, *setting).cumsum()
    for u in (0.0, 0.003, 0.31, 0.5, 0.77, 0.999, 1 - 2.0**-53):
        got = sample_row(logits, *setting, u)
        low = sums[got - 1] if got else 0.0
        assert low - 1e-6 <= u <= sums[got] + 1e-6 and sums[got] > low


def test_ties_at_a_boundary_are_cut() -> None:
    logits = torch.tensor([0.3, 0.4, 0.3]).log()
    assert kept_by(logits, top_k=2) == [0, 1]
    assert kept_by(logits, top_p=0.5) == [0, 1]
    assert kept_by(logits, top_p=0.39) == [1]
    equal = torch.zeros(100)
    assert kept_by(equal, top_k=3) == [0, 1, 2]
    assert kept_by(equal, top_p=0.295) == list(range(30))
    assert len(kept_by(equal, min_p=1.0)) == 100
    assert kept_by(torch.tensor([1.0, 3.0, 3.0]), min_p=1.0) == [1, 2]


def test_the_token_that_crosses_top_p_is_kept() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert kept_by(logits, top_p=0.5) == [0]
    assert kept_by(logits, top_p=0.51) == [0, 1]
    assert kept_by(logits, top_p=0.75) == [0, 1]
    assert kept_by(logits, top_p=0.99) == [0, 1, 2, 3]


def test_min_p_looks_at_the_distribution_before_top_k() -> None:
    """Cutting and renormalising must not change what min-p compares with."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert kept_by(logits, min_p=0.6, top_k=3, top_p=0.99) == [0, 1]


def test_impossible_tokens_are_never_sampled(sample_row: SampleRow) -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, -200.0, -torch.inf])
    for u in (0.0, 0.5, 1 - 2.0**-53):
        for top_p in (1.0, 0.9):
            assert sample_row(logits, 1.0, 0.0, 0, top_p, u) == 1
    infinite = torch.tensor([0.0, torch.inf, 1.0])  # no distribution: a token all the same
    assert sample_row(infinite, 1.0, 0.0, 0, 1.0, 0.5) == 1
    assert sample_row(torch.tensor([5.0, 5.0]), 1e-30, 0.0, 0, 1.0, 0.9) == 1


@pytest.mark.parametrize("trial", range(6))
def test_filters_equal_transformers(trial: int) -> None:
    generator = torch.Generator().manual_seed(trial)
    logits = 3 * torch.randn(1, 50, generator=generator)
    min_p, top_k, top_p = [(0.1, 0, 1.0), (0.0, 7, 1.0), (0.0, 0, 0.8)][trial % 3]
    ids = torch.zeros(1, 1, dtype=torch.long)
    if min_p:
        theirs = transformers.MinPLogitsWarper(min_p)(ids, logits)
    elif top_k:
        theirs = transformers.TopKLogitsWarper(top_k)(ids, logits)
    else:
        theirs = transformers.TopPLogitsWarper(top_p)(ids, logits)
    wanted = theirs[0].softmax(dim=-1)
    possible = (wanted > 2 / COUNT).nonzero().flatten().tolist()
    got = kept_by(logits[0], min_p, top_k, top_p)
    assert set(possible) <= set(got) <= set((wanted > 0).nonzero().flatten().tolist())


# ---- all steps, against numpy in float64 -----------------------------------------------------------


def oracle_logits(
    logits: np.ndarray,
    prompt: list[int],
    reply: list[int],
    bias: dict[int, float],
    allowed: list[bool],
    penalties: tuple[float, float, float],
) -> np.ndarray:
    """Bias, mask and penalties of one row, token by token."""
    repetition, frequency, presence = penalties
    result = logits.astype(np.float64)
    for token, value in bias.items():
        result[token] += value
    result[~np.array(allowed)] = -np.inf
    for token in {*prompt, *reply}:
        result[token] = (
            result[token] * repetition if result[token] < 0 else result[token] / repetition
        )
    for token in set(reply):
        result[token] -= frequency * reply.count(token) + presence
    return result


def random_rows(
    rng: random.Random, rows: int, size: int
) -> tuple[Tensor, Tensor, Tensor, LogitsTable, list[np.ndarray]]:
    """Logits, settings, processing, the table, and the logits that numpy makes of it."""
    logits = torch.tensor([[rng.gauss(0, 3) for _ in range(size)] for _ in range(rows)])
    table = LogitsTable.allocate(rows + 2, size, torch.device("cpu"))
    for tensor in (table.counts_WO, table.bias_WO, table.allowed_WM):
        tensor.fill_(77)  # what others left behind
    places = rng.sample(range(rows + 2), rows)
    settings, processing, wanted = [], [], []
    for row, place in enumerate(places):
        flags = rng.randrange(8)
        prompt, reply = (rng.choices(range(size), k=rng.randrange(9)) for _ in range(2))
        bias = {rng.randrange(size): rng.uniform(-5, 5) for _ in range(rng.randrange(5))}
        allowed = [rng.random() < 0.6 for _ in range(size)]
        allowed[rng.randrange(size)] = True
        penalties = rng.choice([1.0, 1.3, 0.6]), rng.choice([0, 0.7, -1.5]), rng.choice([0, 0.4])
        if flags & 1:
            table.bias_WO[place] = 0
            for token, value in bias.items():
                table.bias_WO[place, token] = value
        if flags & 2:
            table.allowed_WM[place] = pack_mask(torch.tensor(allowed))
        if flags & 4:
            count_tokens(
                table.counts_WO[place], torch.tensor(prompt + reply, dtype=torch.int64), len(prompt)
            )
        wanted.append(
            oracle_logits(
                logits[row].numpy(),
                prompt if flags & 4 else [],
                reply if flags & 4 else [],
                bias if flags & 1 else {},
                allowed if flags & 2 else [True] * size,
                penalties,
            )
        )
        temperature = rng.choice([0.0, 0.5, 1.0, 3.0])
        settings.append(
            (
                temperature,
                rng.choice([0, 0.1]),
                rng.choice([0, 1, 5]),
                rng.choice([1, 0.8]),
                rng.random(),
            )
        )
        processing.append((place, flags, *penalties))
    numbers = (torch.tensor(x, dtype=torch.float64) for x in (settings, processing))
    return logits, *numbers, table, wanted


@pytest.mark.parametrize("size", [1, 31, 32, 33, 130])
def test_processed_logits_equal_numpy(size: int) -> None:
    rng = random.Random(size)
    for _ in range(10):
        logits, settings, processing, table, wanted = random_rows(rng, 3, size)
        processed = ops.process_logits(logits, processing, table)
        for found, one in zip(processed, wanted, strict=True):
            torch.testing.assert_close(found.double(), torch.from_numpy(one), rtol=1e-6, atol=1e-5)
        sampled = ops.sample_tokens(logits, settings, processing, table)
        assert sampled.tolist() == reference.sample_rows_reference(processed, settings).tolist()
        greedy = ops.sample_tokens(logits, None, processing, table)
        assert greedy.tolist() == [int(one.argmax()) for one in wanted]


def test_a_row_does_not_depend_on_its_companions() -> None:
    logits, settings, processing, table, _ = random_rows(random.Random(3), 9, 257)
    together = ops.sample_tokens(logits, settings, processing, table)
    for row in range(9):
        part = slice(row, row + 1)
        alone = ops.sample_tokens(logits[part].clone(), settings[part], processing[part], table)
        assert alone.item() == together[row]


def test_rows_without_a_token_say_why() -> None:
    logits = torch.zeros(5, 70)
    logits[1, 69] = torch.nan
    logits[2] = -torch.inf
    logits[3, :] = torch.nan
    wanted = [0, NAN_LOGITS, NO_ALLOWED_TOKEN, NAN_LOGITS, 0]
    assert ops.greedy_sample(logits).tolist() == wanted
    for setting in ((1.0, 0.0, 0, 1.0, 0.0), (1.0, 0.1, 5, 0.9, 0.0), (0.0, 0.0, 0, 1.0, 0.0)):
        rows = torch.tensor([setting] * 5, dtype=torch.float64)
        assert ops.sample_rows(logits, rows).tolist() == wanted
        assert reference.sample_rows_reference(logits, rows).tolist() == wanted


def test_one_token_left_by_bias() -> None:
    table = LogitsTable.allocate(1, 40, torch.device("cpu"))
    table.bias_WO.fill_(-torch.inf)
    table.bias_WO[0, 17] = -1e30
    processing = torch.tensor([[0, 1, 1.0, 0.0, 0.0]], dtype=torch.float64)
    for setting in ((1.0, 0.0, 0, 1.0, 0.99), (0.5, 0.5, 3, 0.5, 0.0)):
        settings = torch.tensor([setting], dtype=torch.float64)
        assert ops.sample_tokens(torch.randn(1, 40), settings, processing, table).item() == 17


def test_counts_follow_the_sampled_tokens() -> None:
    table = LogitsTable.allocate(4, 10, torch.device("cpu"))
    count_tokens(table.counts_WO[2], torch.tensor([3, 3, 5, 5, 6]), prompt_length=3)
    assert table.counts_WO[2].tolist() == [0, 0, 0, 1, 0, 3, 2, 0, 0, 0]
    rows = [(2, HAS_PENALTIES, 1, 0, 0), (0, 0, 1, 0, 0), (1, HAS_PENALTIES, 1, 0, 0)]
    processing = torch.tensor(rows, dtype=torch.float64)
    last = torch.full((4,), 9)
    ops.record_tokens(torch.tensor([5, 4, NAN_LOGITS]), processing, last, table.counts_WO)
    assert last.tolist() == [4, 0, 5, 9]
    assert table.counts_WO[2].tolist() == [0, 0, 0, 1, 0, 5, 2, 0, 0, 0]
    assert not table.counts_WO[0].any() and table.counts_WO[1].tolist() == [2] + [0] * 9
    ids = torch.tensor([7, -1, -1])
    ops.fill_pending_tokens(ids, torch.tensor([2, 2, 0]), last)
    assert ids.tolist() == [7, 5, 4]


@pytest.mark.parametrize("size", [1, 31, 32, 33, 100])
def test_masks_are_packed_as_grammars_pack_them(size: int) -> None:
    """Bit i % 32 of word i // 32, as in llguidance and xgrammar."""
    mask = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 0.5
    words = pack_mask(mask)
    assert words.dtype == torch.int32 and len(words) == -(-size // 32)
    bits = [(int(words[i // 32]) >> i % 32) & 1 == 1 for i in range(size)]
    assert bits == mask.tolist() == reference.unpack_mask(words, size).tolist()
