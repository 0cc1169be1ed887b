"""Every family through the engine, paged and in pieces, writes what the plain model with its plain cache writes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is what these compare with")

from models.model_oracle import CASES, greedy_cached, make_theirs, prompt

from fulgurite.models import Decoder, load_model
from fulgurite.serve.engine.request import SamplingParams
from tests.serve.engines import idle, make_engine

LENGTHS = (3, 17, 30)
NEW = 24


@pytest.fixture(params=list(CASES))
def model(request: pytest.FixtureRequest, tmp_path) -> Decoder:
    make_theirs(request.param).save_pretrained(tmp_path)
    return load_model(tmp_path)


def test_engine_equals_the_model_with_a_plain_cache(model: Decoder) -> None:
    """Prompts in pieces beside steps of others; past windows, chunks and LongRoPE's switch (48)."""
    engine = make_engine(model, step_tokens=11, context=100)
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    results = engine.generate([ids.tolist() for ids in prompts], params)
    for ids, result in zip(prompts, results, strict=True):
        assert result.token_ids == greedy_cached(model, [ids], NEW)[0]
        assert result.finish_reason == "length"
    idle(engine)


@pytest.mark.parametrize("name", ["gemma3", "llama4", "mistral"])
def test_blocks_behind_a_window_come_back_while_it_writes(name: str, tmp_path) -> None:
    make_theirs(name).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    engine = make_engine(model, step_tokens=8, max_sequences=1, context=100)
    ids = prompt(40)
    request = engine.add(ids.tolist(), SamplingParams(max_tokens=30, ignore_eos=True))
    while request.length < 65:
        engine.step()
    for group, pool in zip(engine.tables.groups, engine.tables.pools, strict=True):
        used = pool.count - len(pool.free)
        narrow = group.window is not None or group.chunk is not None
        assert used <= 4 if narrow else used >= 16
    while engine.busy:
        engine.step()
    assert request.generated.tolist() == greedy_cached(model, [ids], 30)[0]


def test_dynamic_rope_survives_preemption(tmp_path) -> None:
    """A key made again is turned as it was when it was first made."""
    make_theirs("llama_dynamic").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    alone = make_engine(model, max_sequences=4)
    tight = make_engine(model, max_sequences=4, cache_tokens=96, context=64)
    prompts = [prompt(length, seed).tolist() for seed, length in enumerate((20, 9, 14, 18))]
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    got = tight.generate(prompts, params)
    assert tight.scheduler.preemptions
    assert [one.token_ids for one in got] == [
        alone.generate([ids], params)[0].token_ids for ids in prompts
    ]


@pytest.mark.parametrize(("name", "trained"), [("llama_dynamic", 24), ("phi3", 48)])
def test_texts_past_the_trained_length_equal_transformers(
    name: str, trained: int, tmp_path
) -> None:
    """Prompts that end before, at and behind the length where the rotary embedding changes."""
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    engine = make_engine(load_model(tmp_path), step_tokens=11, context=100)
    params = SamplingParams(max_tokens=16, ignore_eos=True)
    for length in (trained - 9, trained - 1, trained, trained + 1, trained + 20):
        ids = prompt(length)
        theirs(prompt(3)[None])  # theirs keeps the longest text there was, until a short one comes
        wanted = theirs.generate(ids[None], max_new_tokens=16, do_sample=False)[0, length:]
        beside = [1, 2, 3]
        assert engine.generate([ids.tolist(), beside], params)[0].token_ids == wanted.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_narrow_storage_is_near(name: str, dtype: torch.dtype, tmp_path) -> None:
    """Logits of the last token of a prompt; the error is that of rounding keys and values."""
    make_theirs(name, initializer_range=0.05).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    ids = prompt(40)
    exact = model(ids, torch.arange(40))[-1]
    engine = make_engine(model, kv_dtype=dtype)
    seen = []
    run = engine.runner.run
    engine.runner.run = lambda pieces: seen.append(run(pieces)) or seen[-1]  # type: ignore
    engine.generate([ids.tolist()], SamplingParams(max_tokens=1))
    bits = {torch.bfloat16: 8, torch.float16: 11, torch.float8_e4m3fn: 4}[dtype]
    error = (seen[-1][0] - exact).abs().max() / exact.abs().max()
    assert 0 < error.item() < 4 * 2.0**-bits
