"""Asynchronous scheduling over ranks: the tokens of one rank, whatever the layout."""

from __future__ import annotations

import pytest
import torch

from fulgurite.parallel import RankPool
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel import async_cases as cases
from tests.parallel import engine_cases
from tests.parallel.test_engine import alone, greedy, prompts, slow
from tests.parallel.test_engine import folder as folder  # a fixture

MIXED = [
    SamplingParams(max_tokens=9, ignore_eos=True, logprobs=2),
    SamplingParams(max_tokens=7, temperature=1.2, top_k=11, seed=6, ignore_eos=True),
    SamplingParams(max_tokens=12, repetition_penalty=1.3, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=7, logit_bias={4: 3.0}, min_tokens=3),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=8, stop="a", temperature=2.0, seed=1),
]
GRAMMARS = [
    SamplingParams(max_tokens=6, logprobs=2, ignore_eos=True),
    SamplingParams(max_tokens=9, regex="[ab]{3}x[cd]+"),
    SamplingParams(max_tokens=9, choices=["north", "south", "east"], temperature=1.0, seed=2),
    SamplingParams(max_tokens=9, regex="[0-9]{4}", logprobs=3),
    SamplingParams(max_tokens=11, ignore_eos=True),
    SamplingParams(max_tokens=6, ignore_eos=True),
]


def check(pool, path, axes, params=None, with_graphs=False, max_tokens=None, **options):
    """Tokens and log-probabilities of one rank; every rank launched the same steps ahead."""
    params = MIXED if params is None else params
    found = pool.run(
        cases.generate, path, axes, prompts(), params, options, with_graphs, max_tokens
    )
    results = LLM(path, **engine_cases.PLAIN | options).generate(prompts(), params)
    assert found[0].replies == [one.token_ids for one in results]
    for left, right in zip(found[0].logprobs, [one.logprobs for one in results], strict=True):
        assert [one.token_id for one in left or ()] == [one.token_id for one in right or ()]
        for one, wanted in zip(left or (), right or (), strict=True):
            assert one.logprob == pytest.approx(wanted.logprob, abs=1e-4)
            assert [id for id, _ in one.top] == [id for id, _ in wanted.top]
    for one in found:
        assert one.unfinished == 0 and one.used_blocks == 0
        assert (one.num_ahead, one.num_steps) == (found[0].num_ahead, found[0].num_steps)
    assert found[0].messages < 8  # the others have been deleted
    return found


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("llama", {"tensor": 2}),
        ("qwen3_moe", {"data": 2, "expert": 2}),
        ("llama", {"pipeline": 2}),
        ("llama", {"context_parallel": 2}),
        slow("qwen3_moe", {"tensor": 2, "expert": 2}),
        slow("deepseek_v3", {"tensor": 2, "expert": 2}),
        slow("qwen3_next", {"tensor": 2, "expert": 2}),
        slow("gemma3", {"pipeline": 2}),
    ],
    ids=str,
)
def test_two_ranks(ranks, folder, name, axes):
    for one in check(ranks(2), folder(name), axes):
        assert one.most_in_flight == 2 and one.num_ahead > one.num_steps // 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3_moe", {"data": 2, "tensor": 2, "expert": 4}),
        ("llama", {"pipeline": 2, "tensor": 2}),
        ("qwen3_moe", {"pipeline": 2, "data": 2, "expert": 2}),
        ("llama", {"context_parallel": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_four_ranks(ranks, folder, name, axes):
    for one in check(ranks(4), folder(name), axes):
        assert one.most_in_flight == 2


@pytest.mark.parametrize("axes", [{"tensor": 2}, {"data": 2, "expert": 2}], ids=str)
def test_grammars_wait_for_their_tokens(ranks, folder, axes):
    """On any replica: then no rank launches ahead. Requests without a grammar go on ahead after them."""
    found = check(ranks(2), folder("qwen3_moe"), axes, GRAMMARS)
    assert 0 < found[0].num_ahead < found[0].num_steps


@pytest.mark.parametrize(("axes", "tokens"), [({"tensor": 2}, 64), slow({"data": 2}, 48)], ids=str)
def test_blocks_run_out(ranks, folder, axes, tokens):
    """All ranks wait for the tokens in flight, and preempt the same requests."""
    found = check(ranks(2), folder("llama"), axes, greedy(), context=48, cache_tokens=tokens)
    assert sum(one.preemptions for one in found) > 0 and found[0].num_ahead > 0


@pytest.mark.parametrize(
    ("name", "axes"), [("llama", {"tensor": 2}), slow("qwen3_moe", {"data": 2, "expert": 2})]
)
def test_captured_steps(ranks, folder, name, axes):
    """Graphs that call the function: the tokens of the step before come from this rank's memory."""
    for one in check(ranks(2), folder(name), axes, with_graphs=True):
        assert one.captured and one.no_capture_reason is None and one.num_ahead > 5


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 2, "expert": 2}, {}),
        slow({"data": 2, "expert": 2}, {"nodes": 2, "transport": "hierarchical"}),
    ],
    ids=str,
)
def test_steps_that_are_too_large_for_equal_splits_run_eagerly(ranks, folder, axes, options):
    """The host would read counts inside of a capture. Smaller steps are captured, before and after."""
    path, params = folder("qwen3_moe"), greedy()
    arguments = (path, axes, prompts(), params, options, True, None, 2)
    found = ranks(2).run(cases.generate, *arguments)
    assert found[0].replies == alone(path, params)
    for one in found:
        assert set(one.captured) == {1}
        assert "too large for equal splits" in str(one.no_capture_reason)


@pytest.mark.parametrize("axes", [{"tensor": 2}, slow({"data": 2})], ids=str)
def test_memory_for_small_steps_only(ranks, folder, axes):
    """One rank has memory for five tokens: all ranks wait for each step from then on."""
    params = greedy()
    found = ranks(2).run(
        cases.generate, folder("llama"), axes, prompts(), params, {}, False, {1: 5}
    )
    assert found[0].replies == alone(folder("llama"), params)
    assert len({(one.num_steps, one.num_ahead) for one in found}) == 1


@pytest.mark.parametrize("axes", [{"data": 2}, slow({"tensor": 2})], ids=str)
def test_steps_in_flight_are_dropped_on_all_ranks(ranks, folder, axes):
    path, prompt = folder("llama"), prompts()[2]
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    wanted = LLM(path, **engine_cases.PLAIN).generate([prompt, prompt[:3]], params)
    found = ranks(2).run(cases.stream_and_cancel, path, axes, prompt)
    assert found[0][0] == [one.token_ids for one in wanted]
    assert [one[1:] for one in found] == [(0, 0), (0, 0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"), [("llama", (1, 2, 1)), ("qwen3_moe", (2, 1, 2))], ids=str
)
def test_a_soak(ranks, folder, name, shape):
    """Requests come and are cancelled at random through a small cache."""
    path = folder(name)
    asked = [prompts()[number % 6][: 1 + number % 17] for number in range(40)]
    found = ranks(2).run(engine_cases.soak, path, shape, asked, 3, {"async_scheduling": True})
    assert all(back for _, back in found)
    llm = LLM(path, **engine_cases.PLAIN | {"context": 48})
    for number, tokens in found[0][0].items():
        params = SamplingParams(max_tokens=3 + number % 9, ignore_eos=True)
        wanted = llm.generate([asked[number]], params)[0].token_ids
        assert tokens == wanted[: len(tokens)], number


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("llama", {"tensor": 2}, {}),
        ("llama", {"context_parallel": 2}, {}),
        ("qwen3_moe", {"data": 2, "expert": 2}, {"transport": "symmetric"}),
    ],
    ids=str,
)
def test_two_ranks_on_a_gpu(monkeypatch, folder, name, axes, options):
    """Ranks that share a GPU, with CUDA graphs. Asynchronous scheduling is the default there."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    options = options | {"device": "cuda", "dtype": torch.float32, "async_scheduling": None}
    with RankPool(2) as pool:
        found = pool.run(cases.generate, folder(name), axes, prompts(), MIXED, options)
    plain = {"device": "cuda", "dtype": torch.float32}
    assert found[0].replies == alone(folder(name), MIXED, **plain)
    for one in found:
        assert one.most_in_flight == 2 and one.num_ahead > 5 and one.no_capture_reason is None
