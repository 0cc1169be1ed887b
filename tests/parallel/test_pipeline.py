"""Pipeline parallelism of the engine: the tokens of one rank's, and each stage only its layers."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fulgurite.errors import ArgumentError, RankError
from fulgurite.parallel import MeshShape, RankPool
from fulgurite.parallel.pipeline import split_stages
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.engine.scheduler import ScheduledChunk
from fulgurite.serve.engine.stage_runner import split_micro_batches
from fulgurite.serve.llm import LLM
from tests.parallel import engine_cases
from tests.parallel import pipeline_cases as cases
from tests.parallel.checkpoints import save, save_tokenizer
from tests.parallel.test_engine import alone, greedy, prompts, slow
from tests.parallel.test_engine import folder as folder  # a fixture
from tests.parallel.test_load_shard import fields_of


def check(pool, path, shape, params=None, min_tokens=1, **options) -> list[cases.Found]:
    params = greedy() if params is None else params
    found = pool.run(cases.generate, path, shape, prompts(), params, min_tokens, options)
    assert found[0].replies == alone(path, params, **options)
    for one in found:
        assert one.unfinished == 0 and one.used_blocks == 0
        assert one.no_capture_reason is not None and "through the host" in one.no_capture_reason
    return found


# ---- stages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "stages", "first", "expected"),
    [
        ([1, 1, 1, 1], 2, 0, [(0, 2), (2, 4)]),
        ([1, 1, 1, 1], 2, 2, [(0, 1), (1, 4)]),  # embedding and head count
        ([1, 1, 8, 1], 2, 0, [(0, 2), (2, 4)]),  # by bytes, not by number
        ([5, 1, 1, 1, 1, 1], 2, 0, [(0, 1), (1, 6)]),
        ([3], 1, 7, [(0, 1)]),
        ([1, 1, 1], 3, 100, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_stages_are_balanced_by_bytes(layers, stages, first, expected):
    assert split_stages(layers, stages, first) == expected


def test_no_split_has_a_smaller_largest_stage():
    chance = random.Random(3)
    for _ in range(50):
        layers = [chance.randrange(0, 9) for _ in range(chance.randrange(1, 8))]
        stages, first = chance.randrange(1, len(layers) + 1), chance.randrange(12)

        def largest(ends, layers=layers, first=first):
            bounds = itertools.pairwise((0, *ends))
            return max(sum(layers[a:b]) + (first if a == 0 else 0) for a, b in bounds)

        found = split_stages(layers, stages, first)
        assert all(start < stop for start, stop in found)
        cuts = itertools.combinations(range(1, len(layers)), stages - 1)
        best = min(largest((*cut, len(layers))) for cut in cuts)
        assert largest([stop for _, stop in found]) == best


def test_more_stages_than_layers():
    with pytest.raises(ArgumentError, match="pipeline=3 stages, but the model has 2 layers"):
        split_stages([1, 1], 3)


def test_axes_of_stages():
    shape = MeshShape(data=2, tensor=2, expert=4, pipeline=2)
    assert shape.world_size == 8 and shape.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.groups("expert") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shape.groups("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert str(shape) == "pipeline 2 x data 2 x tensor 2 = 8 ranks, experts over 4"
    with pytest.raises(
        ArgumentError, match="expert 8 must divide data 2 x tensor 2 = 4 ranks of a"
    ):
        MeshShape(data=2, tensor=2, expert=8, pipeline=2)
    with pytest.raises(ArgumentError, match="pipeline=0"):
        MeshShape(pipeline=0)
    with pytest.raises(ArgumentError, match="pipeline 3 x data 1 x tensor 1 = 3 ranks, but 4 were"):
        MeshShape.for_world(4, None, 1, 1, pipeline=3)


# ---- micro-batches --------------------------------------------------------------------------------------


def make_chunks(sizes: list[tuple[int, int]]) -> list[ScheduledChunk]:
    requests = [SimpleNamespace(id=number) for number in range(len(sizes))]
    return [
        ScheduledChunk(request, start, count, count % 3 != 0)  # type: ignore[arg-type]
        for request, (start, count) in zip(requests, sizes, strict=True)
    ]


@pytest.mark.parametrize("alignment", [1, 8])
def test_micro_batches_have_every_token_once_and_in_order(alignment):
    chance = random.Random(1)
    for _ in range(200):
        sizes = [
            (chance.randrange(30), chance.choice([1, 1, 1, 2, 13, 90]))
            for _ in range(chance.randrange(1, 9))
        ]
        chunks, count = make_chunks(sizes), chance.randrange(1, 6)
        parts = split_micro_batches(chunks, count, alignment)
        assert 1 <= len(parts) <= count and all(parts)
        pieces = [piece for part in parts for piece in part]
        tokens = [(p.request.id, p.start + n) for p in pieces for n in range(p.num_tokens)]
        assert tokens == [(c.request.id, c.start + n) for c in chunks for n in range(c.num_tokens)]
        sampled = [(p.request.id, p.end) for p in pieces if p.needs_sampling]
        assert sampled == [(c.request.id, c.end) for c in chunks if c.needs_sampling]
        for piece, chunk in itertools.product(pieces, chunks):
            if piece.request is chunk.request and piece.start != chunk.start:
                assert piece.start % alignment == 0


def test_micro_batches_are_equal():
    parts = split_micro_batches(make_chunks([(0, 100)]), 4)
    assert [sum(piece.num_tokens for piece in part) for part in parts] == [25] * 4
    parts = split_micro_batches(make_chunks([(9, 1)] * 8), 4)
    assert [len(part) for part in parts] == [2] * 4


# ---- one engine over stages -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["llama", "qwen3_next", "gemma3", slow("deepseek_v3"), slow("gpt_oss"), slow("lfm2")]
)
def test_two_stages(ranks, folder, name):
    """Micro-batches of any size: prompts are cut, and states and windows follow."""
    found = check(ranks(2), folder(name), (2, 1, 1, 1))
    alone_llm = LLM(folder(name), **engine_cases.PLAIN)
    first, last = found
    assert first.layers + last.layers == tuple(range(len(alone_llm.model.layers)))
    names = {name for name, _ in alone_llm.model.named_parameters()}
    assert set(first.parameters) | set(last.parameters) == names
    assert set(first.parameters) & set(last.parameters) <= {"norm.weight"}
    assert {n for n in last.parameters if not n.startswith("layers.")} == {"norm.weight"}
    whole = alone_llm.engine.kv_cache.num_bytes
    assert first.cache_bytes + last.cache_bytes == whole and first.cache_bytes and last.cache_bytes
    assert first.weight_bytes < sum(p.nbytes for p in alone_llm.model.parameters())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("qwen3_moe", (2, 2, 1, 2)),  # replicas share experts: empty micro-batches
        ("deepseek_v3", (2, 1, 2, 2)),  # sequence parallelism between stages
        slow("llama", (2, 1, 2, 1)),
        slow("llama", (2, 2, 1, 1)),
        slow("qwen3_next", (2, 1, 2, 2)),
        slow("qwen3_moe", (2, 1, 2, 1)),
    ],
    ids=str,
)
def test_stages_with_other_axes(ranks, folder, name, shape):
    check(ranks(4), folder(name), shape)


def test_four_stages(ranks, tmp_path):
    path = save(tmp_path, fields_of("llama", num_hidden_layers=5))
    save_tokenizer(path, int(str(fields_of("llama")["vocab_size"])))
    found = check(ranks(4), path, (4, 1, 1, 1))
    assert sum((one.layers for one in found), ()) == (0, 1, 2, 3, 4)


def test_a_small_step_is_one_micro_batch(ranks, folder):
    """As the engine runs it: a micro-batch has at least 32 tokens on a CPU."""
    check(ranks(2), folder("llama"), (2, 1, 1, 1), min_tokens=32)


def test_sampling_and_preemption(ranks, folder):
    """Rank 0 samples, with seeds, penalties and log-probabilities; blocks run out on all stages."""
    params = [
        SamplingParams(max_tokens=7, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True),
        SamplingParams(max_tokens=7, temperature=1.2, top_k=11, seed=6, ignore_eos=True),
        SamplingParams(max_tokens=7, repetition_penalty=1.3, ignore_eos=True, logprobs=2),
        SamplingParams(max_tokens=7, logit_bias={4: 3.0}, banned_token_ids=(9,), ignore_eos=True),
        SamplingParams(max_tokens=2),
        SamplingParams(max_tokens=5, stop="a", temperature=2.0, seed=1),
    ]
    check(ranks(2), folder("llama"), (2, 1, 1, 1), params)
    found = check(ranks(2), folder("llama"), (2, 1, 1, 1), context=48, cache_tokens=64)
    assert len({one.preemptions for one in found}) == 1 and found[0].preemptions


# ---- captured steps -------------------------------------------------------------------------------------


def check_captured(pool, path, axes, min_tokens=32, **options) -> list:
    """Batches of 1, 2 and 4; the last requests are longer than the others."""
    params = [replace(one, max_tokens=5 + 2 * n) for n, one in enumerate(greedy()[:4])]
    params[1] = replace(params[1], temperature=0.9, seed=3)
    arguments = (path, axes, prompts()[:4], params, min_tokens, options)
    found = pool.run(cases.generate_with_graphs, *arguments)
    results = LLM(path, **engine_cases.PLAIN).generate(prompts()[:4], params)
    assert found[0][0] == [one.token_ids for one in results]
    assert all(one[1] == found[0][1] and len(one[2]) == len(found[0][2]) for one in found)
    return found


@pytest.mark.parametrize("is_ahead", [False, True])
def test_captured_stages(ranks, folder, is_ahead):
    """Graphs that call the function: the messages between stages are outside of them."""
    axes = {"pipeline": 2}
    _, sizes, replayed = check_captured(ranks(2), folder("llama"), axes, async_scheduling=is_ahead)[
        0
    ]
    assert {1, 4} <= set(sizes) and len(replayed) > 8


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("qwen3_moe", {"pipeline": 2, "data": 2, "expert": 2}),  # replicas share experts
        slow("deepseek_v3", {"pipeline": 2, "tensor": 2, "expert": 2}),  # sequence parallel
        slow("llama", {"pipeline": 2, "context_parallel": 2}),
        slow("llama", {"pipeline": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_captured_stages_with_other_axes(ranks, folder, name, axes):
    assert check_captured(ranks(4), folder(name), axes, async_scheduling=True)[0][2]


def test_a_step_of_several_micro_batches_is_not_captured(ranks, folder):
    """Its stages work at the same time instead."""
    found = check_captured(ranks(2), folder("llama"), {"pipeline": 2}, min_tokens=1)
    assert set(found[0][2]) == {1} and set(found[0][1]) == {1}


@pytest.mark.slow
def test_quantized_stages(ranks, folder):
    check(ranks(2), folder("fp8"), (2, 1, 1, 1))


@pytest.mark.parametrize("victim", [1, slow(0)])
def test_a_lost_stage_is_named(folder, victim):
    with RankPool(2, failure_grace=40) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.die, folder("llama"), victim, [1, 2, 3])
    text = str(caught.value)
    assert f"rank {victim} of 2 failed: its process ended, killed by SIGKILL" in text
    assert f"rank {victim} is gone" in text


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stalled_stage_is_named(folder, victim):
    """Stages make different numbers of calls: the one that works while others wait is late."""
    with RankPool(2, failure_grace=40) as pool, pytest.raises(RankError) as caught:
        pool.run(cases.stall, folder("llama"), victim, [1, 2, 3])
    assert f"rank {victim} did not reach 'pipeline " in str(caught.value)


def test_single_process_starts_its_stages(folder):
    path = folder("qwen3_moe")
    with LLM(path, pipeline=2, timeout=60.0, **engine_cases.PLAIN) as llm:
        assert llm.model.stage is not None and llm.model.stage.is_first
        found = [one.token_ids for one in llm.generate(prompts(), greedy())]
    assert found == alone(path, greedy())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_two_stages_on_a_gpu(ranks, folder, name):
    """Both ranks share the GPU, and gloo copies through the host."""
    options = {"device": "cuda", "dtype": torch.float32}
    found = ranks(2).run(
        cases.generate, folder(name), (2, 1, 1, 1), prompts(), greedy(), 8, options
    )
    assert found[0].replies == alone(folder(name), greedy(), **options)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_captured_stages_on_a_gpu(ranks, folder, name):
    """Two ranks that share a GPU: CUDA graphs between messages of gloo, launched ahead."""
    arguments = folder(name), {"pipeline": 2}, prompts(), greedy()
    found = ranks(2).run(cases.generate_captured_on_gpu, *arguments)
    options = {"device": "cuda", "dtype": torch.float32}
    assert found[0][0] == alone(folder(name), greedy(), **options)
    for _, reason, sizes, in_flight in found:
        assert reason is None and len(sizes) > 1 and sizes == found[0][2] and in_flight == 2
