"""Every family through the engine, paged and in chunks, writes what the plain model with its plain cache writes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is what these compare with")

from fulgurite.models import CausalLM, load_model
from fulgurite.serve.engine.request import SamplingParams
from tests.models.reference_models import CASES, build_reference, greedy_cached, make_prompt
from tests.serve.engines import check_idle, make_engine

LENGTHS = (3, 17, 30)
NEW = 24


@pytest.fixture(params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path) -> CausalLM:
    build_reference(request.param).save_pretrained(tmp_path)
    return load_model(tmp_path)


def test_engine_equals_the_model_with_a_plain_cache(model: CausalLM) -> None:
    """Chunked prefill mixed with decode steps; past windows, chunks and LongRoPE's switch (48)."""
    engine = make_engine(model, max_batched_tokens=11, context=100)
    prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    results = engine.generate([ids.tolist() for ids in prompts], params)
    for ids, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy_cached(model, [ids], NEW)[0]
        assert result.finish_reason == "length"
    check_idle(engine)


@pytest.mark.parametrize("name", ["gemma3", "llama4", "mistral"])
def test_blocks_before_the_window_are_freed_during_decode(name: str, tmp_path) -> None:
    build_reference(name).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    engine = make_engine(model, max_batched_tokens=8, max_sequences=1, context=100)
    ids = make_prompt(40)
    request = engine.add_request(ids.tolist(), SamplingParams(max_tokens=30, ignore_eos=True))
    while request.length < 65:
        engine.step()
    for group, pool in zip(engine.block_manager.groups, engine.block_manager.pools, strict=True):
        used = pool.num_blocks - len(pool.free_blocks)
        narrow = group.sliding_window is not None or group.chunk_size is not None
        assert used <= 4 if narrow else used >= 16
    while engine.has_unfinished_requests:
        engine.step()
    assert request.output_ids.tolist() == greedy_cached(model, [ids], 30)[0]


def test_dynamic_rope_survives_preemption(tmp_path) -> None:
    """A recomputed key is rotated as it was the first time."""
    build_reference("llama_dynamic").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    alone = make_engine(model, max_sequences=4)
    tight = make_engine(model, max_sequences=4, cache_tokens=96, context=64)
    prompts = [make_prompt(length, seed).tolist() for seed, length in enumerate((20, 9, 14, 18))]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    got = tight.generate(prompts, params)
    assert tight.scheduler.num_preemptions
    assert [one.token_ids for one in got] == [
        alone.generate([ids], params)[0].token_ids for ids in prompts
    ]


@pytest.mark.parametrize(("name", "trained"), [("llama_dynamic", 24), ("phi3", 48)])
def test_sequences_past_the_trained_length_match_transformers(
    name: str, trained: int, tmp_path
) -> None:
    """Prompts that end before, at and behind the length where the rotary embedding changes."""
    theirs = build_reference(name)
    theirs.save_pretrained(tmp_path)
    engine = make_engine(load_model(tmp_path), max_batched_tokens=11, context=100)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for length in (trained - 9, trained - 1, trained, trained + 1, trained + 20):
        ids = make_prompt(length)
        theirs(
            make_prompt(3)[None]
        )  # theirs keeps the longest text there was, until a short one comes
        wanted = theirs.generate(ids[None], max_new_tokens=16, do_sample=False)[0, length:]
        neighbour = [1, 2, 3]
        assert engine.generate([ids.tolist(), neighbour], params)[0].token_ids == wanted.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_low_precision_cache_is_close(name: str, dtype: torch.dtype, tmp_path) -> None:
    """Logits of the last token of a prompt; the error is that of rounding keys and values."""
    build_reference(name, initializer_range=0.05).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    ids = make_prompt(40)
    exact = model(ids, torch.arange(40))[-1]
    engine = make_engine(model, kv_dtype=dtype)
    seen = []
    run = engine.runner.execute
    engine.runner.execute = lambda *step: seen.append(run(*step)) or seen[-1]  # type: ignore
    engine.generate([ids.tolist()], SamplingParams(max_tokens=1))
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float8_e4m3fn: 4}[dtype]
    error = (seen[-1].logits_RO[0] - exact).abs().max() / exact.abs().max()
    assert 0 < error.item() < 4 * 2.0**-bits
