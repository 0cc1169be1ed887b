"""Context parallelism of the engine: the tokens of one rank's, and a part of the keys on each."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.models.loading.checkpoint import open_checkpoint
from fulgurite.models.loading.load_plan import build_model, check_context_parallel
from fulgurite.parallel import MeshShape, RankPool
from fulgurite.parallel.context import merge_shards
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.parallel import context_cases as cases
from tests.parallel import engine_cases
from tests.parallel.test_engine import alone, greedy, prompts, slow
from tests.parallel.test_engine import folder as folder  # a fixture

CONTEXT_2 = {"context_parallel": 2}
LONG = {"context": 256, "cache_tokens": 1024, "max_batched_tokens": 96}


def check(pool, path, axes, params=None, asked=None, **options) -> list[cases.Found]:
    params = greedy() if params is None else params
    asked = prompts() if asked is None else asked
    found = pool.run(cases.generate, path, axes, asked, params, options)
    llm = LLM(path, **engine_cases.PLAIN | options)
    assert found[0].replies == [one.token_ids for one in llm.generate(asked, params)]
    for one in found:
        assert one.unfinished == 0 and one.used_blocks == 0
        assert one.cache_bytes == one.planned_bytes
    return found


def long_prompts() -> list[list[int]]:
    """Several stripes of blocks over two, three and four ranks, and the same beginning."""
    generator = torch.Generator().manual_seed(7)
    start = torch.randint(0, 97, (80,), generator=generator).tolist()
    lengths = (1, 17, 40, 64, 97, 150)
    tails = [torch.randint(0, 97, (n,), generator=generator).tolist() for n in lengths]
    return [(start if number % 2 else []) + tail for number, tail in enumerate(tails)]


# ---- axes and sums --------------------------------------------------------------------------------------


def test_axes_of_a_context():
    shape = MeshShape(data=2, tensor=2, expert=4, context=2)
    assert shape.groups("context") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert shape.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shape.groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.groups("expert") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert str(shape) == "data 2 x context 2 x tensor 2 = 8 ranks, experts over 4"
    both = MeshShape(pipeline=2, context=3)
    assert both.groups("pipeline") == [[0, 3], [1, 4], [2, 5]] and both.world_size == 6
    with pytest.raises(ArgumentError, match="context=0"):
        MeshShape(context=0)


def test_merged_shards_are_the_softmax_of_all_keys():
    torch.manual_seed(0)
    scores_NS, values_SV = torch.randn(3, 7).double(), torch.randn(7, 5).double()
    exact = scores_NS.softmax(-1) @ values_SV
    parts = [slice(0, 2), slice(2, 3), slice(3, 7)]
    outs = [scores_NS[:, p].softmax(-1) @ values_SV[p] for p in parts]
    lses = [scores_NS[:, p].logsumexp(-1) for p in parts]
    # and a shard without keys
    outs.append(torch.zeros_like(outs[0]))
    lses.append(torch.full_like(lses[0], -math.inf))
    merged = merge_shards(torch.stack(outs)[:, None].float(), torch.stack(lses)[:, None].float())
    torch.testing.assert_close(merged[0].double(), exact, rtol=1e-5, atol=1e-6)


def test_merged_shards_without_keys_or_numbers():
    out, lse = torch.zeros(2, 1, 1, 4), torch.full((2, 1, 1), -math.inf)
    assert merge_shards(out, lse).eq(0).all()
    assert merge_shards(out, torch.full((2, 1, 1), math.nan)).isnan().all()
    large = torch.tensor([1e4, -1e4]).view(2, 1, 1)  # exp would overflow
    assert merge_shards(torch.ones(2, 1, 1, 4), large).eq(1).all()


@pytest.mark.parametrize("tokens", [0, 1, 5, 8])
def test_exchange_between_ranks(ranks, tokens):
    """Every rank's part of tokens and outputs comes to where it belongs."""
    for one in ranks(4).run(cases.exchange, tokens):
        assert one == ""


# ---- one engine -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_moe", "gemma3", "deepseek_v3", "gpt_oss", slow("llama4")]
)
def test_two_ranks(ranks, folder, name):
    """Full attention, experts, sliding windows, latents, sinks, attention chunks."""
    found = check(ranks(2), folder(name), CONTEXT_2)
    one_rank = LLM(folder(name), **engine_cases.PLAIN)
    # block 0, and rounding up to whole stripes
    assert all(one.cache_bytes < 0.65 * one_rank.engine.kv_cache.num_bytes for one in found)


@pytest.mark.parametrize("name", ["llama", slow("gemma3"), slow("deepseek_v3")])
def test_long_prompts_and_cached_prefixes(ranks, folder, name):
    """Prompts in several steps; the last one starts with cached blocks of another."""
    found = check(ranks(4), folder(name), {"context_parallel": 4}, asked=long_prompts(), **LONG)
    assert found[0].cached_tokens == [192]  # of 230, in blocks of 4 x 16


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3_moe", {"context_parallel": 2, "tensor": 2, "expert": 4}),
        ("llama", {"context_parallel": 2, "pipeline": 2}),
        slow("qwen3_moe", {"context_parallel": 2, "data": 2, "expert": 4}),
        slow("deepseek_v3", {"context_parallel": 4, "expert": 4}),
        slow("llama", {"context_parallel": 2, "tensor": 2}),
        slow("qwen3_moe", {"context_parallel": 2, "data": 2}),
    ],
    ids=str,
)
def test_context_with_other_axes(ranks, folder, name, axes):
    check(ranks(4), folder(name), axes)


@pytest.mark.slow
def test_three_ranks(ranks, folder):
    check(ranks(3), folder("llama"), {"context_parallel": 3}, asked=long_prompts(), **LONG)


def test_sampling_and_preemption(ranks, folder):
    params = [
        SamplingParams(max_tokens=7, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=7, repetition_penalty=1.3, ignore_eos=True, logprobs=2),
        *[SamplingParams(max_tokens=5 + n, ignore_eos=True) for n in range(4)],
    ]
    check(ranks(2), folder("llama"), CONTEXT_2, params)
    found = check(ranks(2), folder("llama"), CONTEXT_2, context=48, cache_tokens=64)
    assert len({one.preemptions for one in found}) == 1 and found[0].preemptions


def test_a_cache_in_16_bits(ranks, folder):
    check(ranks(2), folder("llama"), CONTEXT_2, kv_dtype="float16")


@pytest.mark.slow  # starts two processes; test_pipeline.py does the same with stages
def test_single_process_starts_its_ranks(folder):
    path = folder("llama")
    with LLM(path, context_parallel=2, timeout=60.0, **engine_cases.PLAIN) as llm:
        found = [one.token_ids for one in llm.generate(prompts(), greedy())]
        assert llm.engine.kv_cache.block_size == 16 and llm.plan.limits.block_size == 32
    assert found == alone(path, greedy())


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_layers_with_states_are_refused(folder, name):
    with open_checkpoint(folder(name)) as checkpoint:
        model = build_model(checkpoint.config, checkpoint.family, torch.float32)
    with pytest.raises(ArgumentError, match=f"context_parallel does not support {name}"):
        check_context_parallel(model)


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("gemma3", CONTEXT_2),
        ("deepseek_v3", CONTEXT_2),
        slow("qwen3_moe", CONTEXT_2 | {"expert": 2}),
        slow("llama", CONTEXT_2),
    ],
    ids=str,
)
def test_captured_steps_give_the_tokens_of_one_rank(ranks, folder, name, axes):
    """Batches of 1, 2 and 4: a rank has a part of the tokens, or none."""
    path, asked = folder(name), prompts()[:4]
    params = [replace(one, max_tokens=5 + 2 * n) for n, one in enumerate(greedy()[:4])]
    found = ranks(2).run(cases.generate_with_graphs, path, axes, asked, params)
    llm = LLM(path, **engine_cases.PLAIN)
    assert found[0][0] == [one.token_ids for one in llm.generate(asked, params)]
    assert found[0][1] == found[1][1] and {1, 4} <= set(found[0][1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_captured_steps_on_a_gpu(monkeypatch, folder, name):
    """Two ranks that share a GPU exchange tokens and outputs in symmetric memory, inside CUDA graphs."""
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    options = {"dtype": torch.float32}
    with RankPool(2) as pool:
        found = pool.run(cases.generate_captured_on_gpu, folder(name), prompts(), greedy(), options)
    assert found[0][0] == alone(folder(name), greedy(), device="cuda", **options)
    for _, reason, sizes in found:
        assert reason is None and sizes == found[0][2] and len(sizes) > 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3"])
def test_two_ranks_on_a_gpu(ranks, folder, name):
    """Both ranks share the GPU, and gloo copies through the host."""
    options = LONG | {"device": "cuda", "dtype": torch.float32}
    found = ranks(2).run(cases.generate, folder(name), CONTEXT_2, long_prompts(), greedy(), options)
    llm = LLM(folder(name), **engine_cases.PLAIN | options)
    assert found[0].replies == [one.token_ids for one in llm.generate(long_prompts(), greedy())]
