"""Sampling against its plain definition, by distribution and by transformers' logits processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fulgurite.kernels.sampling import ops
from fulgurite.serve.engine.request import Request, SamplingParams
from fulgurite.serve.engine.sampler import PRECOMPUTED_POSITIONS, Sampler, process_logits

transformers = pytest.importorskip("transformers", reason="transformers is what these compare with")

COUNT = 500  # tokens with p under 1 / COUNT may be missed


def request(params: SamplingParams, prompt: tuple[int, ...] = (0,), reply: tuple[int, ...] = ()):
    made = Request("r", prompt, params, 1000)
    for token in reply:
        made.append(token)
    return made


def kept_by(logits: Tensor, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> list[int]:
    """All tokens that some random number draws: the steps of the sum, walked through finely."""
    numbers = (np.arange(COUNT) + 0.5) / COUNT
    return sorted({ops.sample_row(logits, 1.0, min_p, top_k, top_p, u) for u in numbers})


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
def test_sampled_distribution_matches_the_reference(setting) -> None:
    logits = 2 * torch.randn(31, generator=torch.Generator().manual_seed(4))
    wanted = definition(logits, *setting)
    count = 2000
    numbers = ops.philox_uniform(np.full(count, 99, dtype=np.uint64), np.arange(count))
    drawn = [ops.sample_row(logits, *setting, u) for u in numbers]
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


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("size", [1, 2, 17, 300, 5000])
@pytest.mark.parametrize("spread", [1, 6])
def test_sample_inverts_the_reference_cdf(setting, size: int, spread: int) -> None:
    """Also where more tokens pass than the first candidates."""
    logits = spread * torch.randn(size, generator=torch.Generator().manual_seed(size))
    sums = definition(logits, *setting).cumsum()
    for u in (0.0, 0.003, 0.31, 0.5, 0.77, 0.999, 1 - 2.0**-53):
        got = ops.sample_row(logits, *setting, u)
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


def test_impossible_tokens_are_never_sampled() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, -200.0, -torch.inf])
    for u in (0.0, 0.5, 1 - 2.0**-53):
        for top_p in (1.0, 0.9):
            assert ops.sample_row(logits, 1.0, 0.0, 0, top_p, u) == 1
    for broken in (torch.nan, torch.inf):  # no distribution: a token all the same
        assert ops.sample_row(torch.tensor([0.0, broken, 1.0]), 1.0, 0.0, 0, 1.0, 0.5) == 1
    assert ops.sample_row(torch.tensor([5.0, 5.0]), 1e-30, 0.0, 0, 1.0, 0.9) == 1


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


def test_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(1, 50)
    ids = torch.tensor([[3, 3, 7, 49, 0]])
    wanted = transformers.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())[0]
    got = logits[0].clone()
    process_logits(got, request(SamplingParams(repetition_penalty=1.7), (3, 3, 7), (49, 0)))
    assert torch.equal(got, wanted)


def test_bias_and_bans_equal_transformers() -> None:
    logits = torch.randn(1, 50)
    ids = torch.tensor([[3]])
    biased = transformers.SequenceBiasLogitsProcessor({(4,): 2.5, (9,): -1.0})
    banned = transformers.NoBadWordsLogitsProcessor([[4], [11]], eos_token_id=[49])
    wanted = banned(ids, biased(ids, logits.clone()))[0]
    got = logits[0].clone()
    process_logits(
        got, request(SamplingParams(logit_bias={4: 2.5, 9: -1.0}, banned_token_ids=(4, 11)), (3,))
    )
    assert torch.equal(got, wanted)


def test_frequency_and_presence_look_at_the_reply_only() -> None:
    logits = torch.zeros(8)
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    process_logits(logits, request(params, (1, 1, 2), (2, 3, 3, 3)))
    assert logits.tolist() == [0, 0, -0.75, -1.75, 0, 0, 0, 0]


def test_logit_processing_order() -> None:
    """Bias, ban, then penalties: a bias counts before a penalty multiplies it."""
    params = SamplingParams(
        logit_bias={1: 3.0}, banned_token_ids=(0,), repetition_penalty=2.0, presence_penalty=1.0
    )
    logits = torch.tensor([9.0, 1.0, -1.0, 0.5])
    process_logits(logits, request(params, (1, 0), (2,)))
    assert logits.tolist() == [-torch.inf, 2.0, -3.0, 0.5]


def test_greedy_and_sampled_requests_in_one_batch() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    greedy, warm = SamplingParams(), SamplingParams(temperature=5.0, seed=3)
    rows = [
        request(greedy),
        request(warm),
        request(SamplingParams(banned_token_ids=(int(logits[2].argmax()),))),
    ]
    before = logits.clone()
    tokens = Sampler().sample(logits, rows)
    assert torch.equal(logits, before)  # log-probabilities are taken from it afterwards
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].topk(2).indices[1]
    assert tokens[1] == Sampler().sample(logits[1:2], [request(warm)])[0]


def test_greedy_tie_breaks_to_the_smallest_id() -> None:
    assert Sampler().sample(torch.tensor([[1.0, 2.0, 2.0]]), [request(SamplingParams())]) == [1]


def test_precomputed_random_numbers_match_each_step():
    """Over the edge of what is made at once; requests go, come, and stand at other positions."""
    hot = SamplingParams(temperature=0.7, top_k=500, top_p=0.9, seed=4)
    cold = SamplingParams(temperature=1e-40, min_p=0.1, seed=2**64 - 1)
    rows = [request(hot), request(cold, reply=(1, 2, 3)), request(SamplingParams(temperature=2.0))]
    sampler, all_settings = Sampler(), []
    for step in range(2 * PRECOMPUTED_POSITIONS + 3):
        if step == 5:
            del rows[1]
        if step == PRECOMPUTED_POSITIONS:
            rows.insert(0, request(cold))
        if step == PRECOMPUTED_POSITIONS + 9:
            rows[0].length -= 10  # as no request does: before the first number
        if step == PRECOMPUTED_POSITIONS + 12:
            rows[1] = request(cold)  # of the same name
        numbers = ops.philox_uniform(
            np.array([one.seed for one in rows], dtype=np.uint64),
            np.array([one.length for one in rows], dtype=np.uint64),
        )
        wanted = [
            [max(p.temperature, 1e-30), p.min_p, min(p.top_k, 100), p.top_p, number]
            for p, number in zip((one.params for one in rows), numbers, strict=True)
        ]
        all_settings.append((sampler.get_settings(list(rows), 100), wanted))
        for one in rows:
            one.append(1)
    for step, (found, wanted) in enumerate(all_settings):  # earlier ones must not change
        assert found.tolist() == wanted, f"step {step}"


def test_reused_sampler_gives_the_same_tokens():
    logits = torch.randn(3, 40)
    rows = [request(SamplingParams(temperature=1.0, seed=seed)) for seed in range(2)]
    rows.insert(1, request(SamplingParams()))
    sampler = Sampler()
    for _ in range(PRECOMPUTED_POSITIONS + 2):
        tokens = sampler.sample(logits, rows)
        assert tokens == Sampler().sample(logits, rows)
        for one, token in zip(rows, tokens, strict=True):
            one.append(token)
