"""Prompts of many sequences in one call of MLA: random lengths against the reference in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kernels.triton_support import DEVICE, INTERPRETED  # isort: skip

from fulgurite.kernels.common.pdl import pdl_region
from fulgurite.kernels.mla import ops, reference, triton_mla, triton_prefill
from fulgurite.kernels.mla.prefill_plan import MLASizes, plan_prefill
from fulgurite.kernels.tuning.mla import should_expand
from fulgurite.kernels.tuning.sm_90 import Sm90Heuristics
from tests.kernels.mla.cases import Case, Inputs, build, exact

HALVES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
CACHES = [torch.float32, torch.uint8, *HALVES]
PRIMES = (2, 31, 37, 41, 53, 67)
DEEPSEEK = {"rank": 512, "nope_dim": 128, "rope_dim": 64, "value_dim": 128, "block_size": 64}


def with_lens(inputs: Inputs) -> Inputs:
    """The host knows the lengths."""
    starts = inputs.metadata.query_start_loc
    query_lens, seq_lens = (starts[1:] - starts[:-1]).tolist(), inputs.metadata.seq_lens_S.tolist()
    return inputs.with_metadata(
        max_query_len=max(query_lens, default=0),
        max_seq_len=max(seq_lens, default=0),
        query_lens=query_lens,
        seq_lens=seq_lens,
    )


def make_plan(case: Case, inputs: Inputs):
    return plan_prefill(inputs.metadata, MLASizes(*case.sizes), torch.device(DEVICE))


def assert_close(out, inputs, tolerance):
    """Within a fraction of the largest result, or four times the error of torch in float32."""
    expected, eager = exact(inputs), reference.mla_attention(*inputs)
    ours, theirs = ((x.double() - expected).abs().max() for x in (out, eager))
    assert ours <= max(tolerance * expected.abs().max(), 4 * theirs), f"{ours} against {theirs}"


def random_case(seed: int) -> Case:
    """Empty, single, short and prime numbers of new tokens, after prefixes of any length."""
    rng = np.random.default_rng(seed)
    sequences = []
    for queries in rng.permutation([0, 1, 1, *rng.choice(PRIMES, 3), int(rng.integers(32, 80))]):
        cached = int(rng.choice([0, 1, 16, rng.integers(1, 60)]))
        sequences.append((int(queries), int(queries) + cached))
    return Case(
        sequences,
        heads=int(rng.integers(1, 4)),
        block_size=int(rng.choice([1, 5, 16])),
        interleaved=bool(seed % 2),
        padding=int(rng.choice([0, 3])),
        rank=int(rng.choice([32, 48])),
    )


@pytest.mark.parametrize("max_keys", [4096, 100, 23])
@pytest.mark.parametrize("seed", range(3 if INTERPRETED else 12))
def test_random_lengths(seed, max_keys, monkeypatch):
    """In one chunk; in chunks of whole sequences; in chunks that cut sequences."""
    monkeypatch.setattr(Sm90Heuristics, "mla_max_expanded_keys", max_keys)
    case = random_case(seed)
    cache = CACHES[seed % len(CACHES)]
    query = torch.float32 if cache in (torch.float32, torch.uint8) else cache
    inputs = with_lens(build(case, cache, query, DEVICE))
    kinds = {should_expand(*lens, *case.sizes) for lens in case.sequences if lens[0]}
    assert kinds == {True, False}
    tolerance = 2e-6 if query == torch.float32 else 4 * torch.finfo(query).eps
    assert_close(triton_mla.mla_attention(*inputs), inputs, tolerance)


@pytest.mark.parametrize("cache", CACHES, ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_layouts_and_caches(interleaved, cache):
    case = Case([(40, 40), (1, 30), (33, 70)], heads=2, block_size=5, interleaved=interleaved)
    query = torch.float16 if INTERPRETED or cache == torch.float16 else torch.bfloat16
    query = torch.float32 if cache == torch.float32 else query
    inputs = with_lens(build(case, cache, query, DEVICE))
    tolerance = 2e-6 if query == torch.float32 else 4 * torch.finfo(query).eps
    assert_close(triton_mla.mla_attention(*inputs), inputs, tolerance)


def test_one_sequence_in_many_chunks(monkeypatch):
    """State between chunks; early tiles end before the last chunk and have no tile there."""
    monkeypatch.setattr(Sm90Heuristics, "mla_max_expanded_keys", 32)
    case = Case([(150, 150), (33, 75)], heads=2, rank=64)
    inputs = with_lens(build(case, torch.float32, torch.float32, DEVICE))
    plan = make_plan(case, inputs)
    assert len(plan.chunks) == 8 and plan.num_state_tokens == 183
    assert len(plan.chunks[0].attention_tiles) > len(plan.chunks[4].attention_tiles) == 2
    assert_close(triton_mla.mla_attention(*inputs, plan), inputs, 2e-6)


def test_sequences_add_no_launches(monkeypatch):
    """One gather, one GEMM and one attention kernel for a chunk, whatever is in it."""
    launches = []
    for name in ("gather_latents", "attend_expanded", "attend_absorbed"):
        function = getattr(triton_mla, name)

        def count(*args, name=name, function=function, **kwargs):
            launches.append(name)
            return function(*args, **kwargs)

        monkeypatch.setattr(triton_mla, name, count)
    for repeats in (1, 4):
        launches.clear()
        case = Case([(33, 40), (40, 40), (2, 9)] * repeats, heads=1)
        inputs = with_lens(build(case, torch.float32, torch.float32, DEVICE))
        assert_close(triton_mla.mla_attention(*inputs), inputs, 2e-6)
        assert launches == ["gather_latents", "attend_expanded", "attend_absorbed"]


def test_many_short_prompts_are_absorbed_in_groups(monkeypatch):
    """Their absorbed queries take no more memory than a chunk of expanded keys."""
    monkeypatch.setattr(Sm90Heuristics, "mla_max_expanded_keys", 32)
    case = Case([(5, 9), (7, 7), (0, 3), (30, 31), (1, 64)], heads=2, padding=2)
    inputs = with_lens(build(case, torch.float32, torch.float32, DEVICE))
    plan = make_plan(case, inputs)
    assert not plan.chunks and len(plan.absorbed) == 4
    assert_close(triton_mla.mla_attention(*inputs, plan), inputs, 2e-6)


@pytest.mark.parametrize("cache", CACHES, ids=str)
def test_gather_latents(cache):
    case = Case([(1, 41), (1, 7), (1, 16)], block_size=5, rank=19, rope_dim=6)
    inputs = build(case, cache, torch.float32, DEVICE)
    views = reference.split_latent_cache(inputs.cache, 19, 6)
    table = inputs.metadata.block_table_SM
    spans = [(0, 3, 16, 0), (1, 0, 7, 16), (2, 2, 14, 23)]  # sequence, first key, keys, row
    tiles = torch.tensor(spans, dtype=torch.int32, device=DEVICE)
    kv_b = torch.empty(1, 1, 19, device=DEVICE)
    keys = triton_prefill.allocate_expanded_keys(37, kv_b, 6, torch.float32)
    triton_prefill.gather_latents(views, table, tiles, keys)
    for sequence, first, count, row in spans:
        expected = reference.gather_latents(views, table[sequence], first + count, torch.float32)
        for gathered, whole in zip(keys, expected, strict=False):
            assert torch.equal(gathered[row : row + count], whole[first:])


@pytest.mark.parametrize("max_keys", [4096, 100])
def test_nothing_uninitialized_is_read(max_keys, monkeypatch):
    """Buffers that are not filled are NaN here."""
    monkeypatch.setattr(Sm90Heuristics, "mla_max_expanded_keys", max_keys)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    case = Case([(1, 30), (40, 140), (3, 20), (0, 5), (33, 33)], heads=3, padding=2)
    inputs = with_lens(build(case, torch.float32, torch.float32, DEVICE))
    decode = with_lens(build(Case([(1, 300), (2, 17)], padding=1), torch.float32, torch.float32))
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        outs = [triton_mla.mla_attention(*inputs)]
        if INTERPRETED:
            outs.append(triton_mla.mla_attention(*decode))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(outs[0], inputs, 2e-6)
    assert all(out.isfinite().all() for out in outs)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no CUDA graphs")
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8], ids=str)
def test_a_planned_step_is_captured(cache):
    """A CUDA graph takes no copy from the host and no sync: a planned layer has neither."""
    case = Case([(1, 700), (256, 256), (7, 90), (300, 1000), (64, 5000)], heads=16, **DEEPSEEK)
    inputs = with_lens(build(case, cache, torch.bfloat16, DEVICE))
    plan = make_plan(case, inputs)
    assert plan.chunks and plan.absorbed
    expected = triton_mla.mla_attention(*inputs, plan)
    assert_close(expected, inputs, 4 * torch.finfo(torch.bfloat16).eps)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_mla.mla_attention(*inputs, plan)
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.skipif(INTERPRETED, reason="PDL is of GPUs")
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("heads", [16, 128])
def test_same_results_with_pdl(heads, cache):
    """Kernels that start early read nothing before it is written, in a graph as well."""
    prompts = Case([(256, 256), (1, 130), (40, 300)] * 3, heads=heads, **DEEPSEEK)
    decode = Case([(1, 700), (1, 64), (1, 1)] * 9, heads=heads, padding=1, **DEEPSEEK)
    for case in (prompts, decode):
        inputs = with_lens(build(case, cache, torch.bfloat16, DEVICE))
        plan = make_plan(case, inputs)
        kv_a = torch.randn(len(inputs.q), 576, dtype=torch.bfloat16, device=DEVICE)
        norm = torch.ones(512, dtype=torch.bfloat16, device=DEVICE)
        slots = torch.arange(len(kv_a), device=DEVICE)

        def step(inputs=inputs, plan=plan, kv_a=kv_a, norm=norm, slots=slots):
            rope = (inputs.cos, inputs.sin)
            ops.store_mla_cache(kv_a * 2, norm, *rope, inputs.cache, slots, eps=1e-6,
                                interleaved=True)  # fmt: skip
            return triton_mla.mla_attention(*inputs._replace(q=inputs.q * 0.5), plan)

        expected = step()
        with pdl_region():
            results = [step() for _ in range(3)]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step()
        graph.replay()
        for out in (*results, captured):
            assert torch.equal(out, expected)
