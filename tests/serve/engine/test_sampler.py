"""The sampler: settings of requests on the device, against transformers' processors and by hand."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import Tensor

from fulgurite.kernels.sampling import ops
from fulgurite.serve.engine import logprobs
from fulgurite.serve.engine.request import Request, SamplingParams
from fulgurite.serve.engine.sampler import PRECOMPUTED_POSITIONS, Sampler

transformers = pytest.importorskip("transformers", reason="transformers is what these compare with")


def request(
    params: SamplingParams,
    prompt: tuple[int, ...] = (0,),
    reply: tuple[int, ...] = (),
    **options: object,
) -> Request:
    made = Request("r", prompt, params, 1000, **options)  # type: ignore[arg-type]
    for token in reply:
        made.append(token)
    return made


def make_sampler(vocab_size: int, requests: list[Request]) -> Sampler:
    for row, one in enumerate(requests):
        one.block_table_row = row
    return Sampler(len(requests), vocab_size, torch.device("cpu"))


def process(logits: Tensor, one: Request) -> Tensor:
    """Bias, mask and penalties of one request."""
    sampler = make_sampler(logits.shape[-1], [one])
    inputs = sampler.prepare([one])
    sampler.write_grammar_masks(inputs)
    assert sampler.rows.table is not None
    processing = torch.from_numpy(inputs.processing_R5)
    return ops.process_logits(logits.reshape(1, -1), processing, sampler.rows.table)[0]


def sample(sampler: Sampler, logits: Tensor, requests: list[Request]) -> list[int]:
    """One step: sample, and append the tokens."""
    inputs = sampler.prepare(list(requests))
    tokens = sampler.run_eagerly(logits, inputs)
    sampler.finish(inputs)
    found, _ = sampler.collect(logits, tokens, requests).read()
    for one, token in zip(requests, found, strict=True):
        one.append(token)
    return found


def test_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(1, 50)
    ids = torch.tensor([[3, 3, 7, 49, 0]])
    wanted = transformers.RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())[0]
    got = process(logits, request(SamplingParams(repetition_penalty=1.7), (3, 3, 7), (49, 0)))
    assert torch.equal(got, wanted)


def test_bias_and_bans_equal_transformers() -> None:
    logits = torch.randn(1, 50)
    ids = torch.tensor([[3]])
    biased = transformers.SequenceBiasLogitsProcessor({(4,): 2.5, (9,): -1.0})
    banned = transformers.NoBadWordsLogitsProcessor([[4], [11]], eos_token_id=[49])
    wanted = banned(ids, biased(ids, logits.clone()))[0]
    params = SamplingParams(logit_bias={4: 2.5, 9: -1.0}, banned_token_ids=(4, 11))
    assert torch.equal(process(logits, request(params, (3,))), wanted)


def test_min_tokens_equals_transformers() -> None:
    params = SamplingParams(min_tokens=3)
    for length in range(5):
        logits, ids = torch.randn(1, 50), torch.zeros(1, 2 + length, dtype=torch.long)
        wanted = transformers.MinNewTokensLengthLogitsProcessor(2, 3, [4, 40], device="cpu")(
            ids, logits.clone()
        )[0]
        one = request(params, (0, 0), (1,) * length, stop_ids=frozenset({4, 40}))
        assert torch.equal(process(logits, one), wanted)


def test_frequency_and_presence_look_at_the_reply_only() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    got = process(torch.zeros(8), request(params, (1, 1, 2), (2, 3, 3, 3)))
    assert got.tolist() == [0, 0, -0.75, -1.75, 0, 0, 0, 0]


def test_logit_processing_order() -> None:
    """Bias, ban, then penalties: a bias counts before a penalty multiplies it."""
    params = SamplingParams(
        logit_bias={1: 3.0}, banned_token_ids=(0,), repetition_penalty=2.0, presence_penalty=1.0
    )
    got = process(torch.tensor([9.0, 1.0, -1.0, 0.5]), request(params, (1, 0), (2,)))
    assert got.tolist() == [-torch.inf, 2.0, -3.0, 0.5]


class Grammar:
    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask

    def allowed_tokens(self) -> Tensor | None:
        return self.mask

    def accept_token(self, token: int) -> None:
        raise AssertionError("the sampler accepts nothing")


@pytest.mark.parametrize("is_packed", [False, True])
def test_masks_are_combined(is_packed: bool) -> None:
    """The grammar's mask, allowed tokens, bans and min_tokens: a token needs all of them."""
    mask = torch.tensor([True] * 6 + [False] * 30 + [True] * 4)
    packed = torch.tensor([0b111111, 0b11110000], dtype=torch.int32)
    params = SamplingParams(
        allowed_token_ids=(1, 2, 3, 4, 20, 39), banned_token_ids=(2,), min_tokens=1
    )
    for length, wanted in ((0, [1, 4, 39]), (1, [1, 3, 4, 39])):
        constraint = Grammar(packed if is_packed else mask)
        one = request(params, (0,), (1,) * length, constraint=constraint, stop_ids=frozenset({3}))
        got = process(torch.zeros(40), one)
        assert got.isfinite().nonzero().flatten().tolist() == wanted


def test_short_masks_ban_the_rest_and_wrong_ones_are_errors_of_their_request() -> None:
    short = process(
        torch.zeros(70), request(SamplingParams(), constraint=Grammar(torch.ones(9) > 0))
    )
    assert short.isfinite().sum() == 9
    words = torch.full((1,), -1, dtype=torch.int32)
    packed = process(torch.zeros(70), request(SamplingParams(), constraint=Grammar(words)))
    assert packed.isfinite().sum() == 32
    for mask in (torch.ones(71) > 0, torch.zeros(4, dtype=torch.int32), torch.ones(70)):
        one = request(SamplingParams(), constraint=Grammar(mask))
        assert not process(torch.zeros(70), one).isfinite().any()
        assert one.constraint_error is not None
        assert re.search(r"(?s)constraint of r .*bool \[70\], or int32 \[3\]", one.constraint_error)


def test_greedy_and_sampled_requests_in_one_batch() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    greedy, warm = SamplingParams(), SamplingParams(temperature=5.0, seed=3)
    banned = SamplingParams(banned_token_ids=(int(logits[2].argmax()),))
    rows = [request(greedy), request(warm), request(banned)]
    before = logits.clone()
    tokens = sample(make_sampler(40, rows), logits, rows)
    assert torch.equal(logits, before)  # log-probabilities are taken from it afterwards
    assert tokens[0] == logits[0].argmax() and tokens[2] == logits[2].topk(2).indices[1]
    alone = [request(warm)]
    assert [tokens[1]] == sample(make_sampler(40, alone), logits[1:2], alone)


def test_greedy_tie_breaks_to_the_smallest_id() -> None:
    rows = [request(SamplingParams())]
    assert sample(make_sampler(3, rows), torch.tensor([[1.0, 2.0, 2.0]]), rows) == [1]


def test_counts_of_sampled_tokens_equal_rewritten_rows() -> None:
    """Also if requests change rows, return to one that another used, or a step was interrupted."""
    params = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    rows = [request(params, (number, 3)) for number in range(3)]
    sampler = make_sampler(12, rows)
    for step in range(25):
        logits = torch.randn(3, 12, generator=torch.Generator().manual_seed(step))
        if step % 7 == 3:
            rows[0].block_table_row, rows[1].block_table_row = (
                rows[1].block_table_row,
                rows[0].block_table_row,
            )
        if step % 5 == 2:
            sampler.run_eagerly(logits, sampler.prepare(rows))  # interrupted: nobody reads it
        fresh = [request(params, (number, 3)) for number in range(3)]
        for one, other in zip(fresh, rows, strict=True):
            for token in other.output_ids:
                one.append(token)
        wanted = sample(make_sampler(12, fresh), logits, fresh)
        assert sample(sampler, logits, rows) == wanted


def test_requests_without_processing_allocate_no_table() -> None:
    rows = [request(SamplingParams(temperature=1.0, top_k=5))]
    sampler = make_sampler(12, rows)
    sample(sampler, torch.zeros(1, 12), rows)
    assert sampler.rows.table is None


def test_a_step_ahead_waits_where_it_needs_the_token() -> None:
    plain, penalized = SamplingParams(), SamplingParams(presence_penalty=1.0)
    rows = [request(plain), request(penalized), request(plain, constraint=Grammar(None))]
    sampler = make_sampler(12, rows)
    assert sampler.can_sample_ahead(rows)  # all tokens are known
    inputs = sampler.prepare(rows[:2])
    sampler.finish(inputs)
    for one in rows:
        one.num_pending = 1
    assert sampler.can_sample_ahead(rows[:2])
    assert not sampler.can_sample_ahead(rows), "the grammar needs the token"
    sampler.prepare(rows[:2])  # interrupted: the device has counted a token that nobody saw
    assert not sampler.can_sample_ahead(rows[:1])


def test_precomputed_random_numbers_match_each_step():
    """Over the edge of what is made at once; requests go, come, and stand at other positions."""
    hot = SamplingParams(temperature=0.7, top_k=500, top_p=0.9, seed=4)
    cold = SamplingParams(temperature=1e-40, min_p=0.1, seed=2**64 - 1)
    rows = [request(hot), request(cold, reply=(1, 2, 3)), request(SamplingParams(temperature=2.0))]
    sampler, all_settings = Sampler(3, 100, torch.device("cpu")), []
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
        all_settings.append((sampler.prepare(list(rows)).settings_R5, wanted))
        for one in rows:
            one.append(1)
    for step, (found, wanted) in enumerate(all_settings):  # earlier ones must not change
        assert found.tolist() == wanted, f"step {step}"


def test_top_logprobs_are_ordered_by_value_then_id() -> None:
    logits = torch.zeros(3, 9)
    logits[:, 4] = logits[:, 7] = 1.0
    rows = [request(SamplingParams(logprobs=count)) for count in (3, 0)]
    rows.insert(1, request(SamplingParams()))
    pending = logprobs.compute_logprobs(logits, torch.tensor([4, 4, 8]), rows)
    assert pending is not None
    first, none, last = pending.read([4, 4, 8])
    values = logits[0].log_softmax(0).tolist()
    assert none is None and first is not None and last is not None
    assert first.top == ((4, values[4]), (7, values[7]), (0, values[0]))
    assert (last.token_id, last.logprob, last.top) == (8, values[8], ())


def test_logprobs_do_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "ROWS_AT_ONCE", 2)
    logits = torch.randn(5, 61, generator=torch.Generator().manual_seed(0)).round(decimals=1)
    rows = [request(SamplingParams(logprobs=count)) for count in (61, 4, 100, 1, 7)]
    tokens = torch.arange(5)
    together = logprobs.compute_logprobs(logits, tokens, rows)
    assert together is not None
    for index, found in enumerate(together.read(tokens.tolist())):
        part = slice(index, index + 1)
        alone = logprobs.compute_logprobs(logits[part], tokens[part], rows[part])
        assert alone is not None and alone.read([index]) == [found]
        wanted = logits[index].log_softmax(0)
        order = sorted(range(61), key=lambda i, wanted=wanted: (-wanted[i], i))
        count = min(rows[index].params.logprobs or 0, 61)
        assert found is not None and [id for id, _ in found.top] == order[:count]
