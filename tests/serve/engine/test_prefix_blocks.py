"""KV-cache blocks handed from one engine to another: the same bits, no leaks, no wrong hits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM, load_model
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.prefix_blocks import (
    PrefixBlocks,
    describe_layout,
    export_prefix,
    import_prefix,
)
from fulgurite.serve.engine.request import RequestOptions, Result, SamplingParams
from tests.models.reference_models import build_reference, make_prompt
from tests.serve.engines import check_idle, make_engine, quantized_model, tiny_model

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
PROMPT = make_prompt(41).remainder(97).tolist()  # 10 blocks of 4 and a token


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


def compute(engine: Engine, prompt: list[int], salt: str = "") -> Result:
    results: list[Result] = []
    engine.add_request(
        prompt,
        PARAMS,
        listener=lambda update: results.append(update.result) if update.result else None,
        options=RequestOptions(cache_salt=salt, detokenize=False),
    )
    while not results:
        engine.step()
    return results[0]


def hand_over(
    source: Engine, target: Engine, prompt: list[int], salt: str = "", max_bytes: int = 1 << 20
) -> int:
    """Hand a prompt over in chunks; the blocks that `target` then has."""
    start, reach = 0, 0
    hashes = export_prefix(source, prompt, salt, max_bytes=0).hashes
    while hashes:
        chunk = export_prefix(source, [], hashes=hashes, start=start, max_bytes=max_bytes)
        if chunk.end == start:
            return reach
        reach = import_prefix(target, chunk)
        assert not any(target.audit().values()), "a chunk must leave nothing behind"
        if reach < chunk.end:
            return reach
        start = chunk.end
    return reach


def assert_same(result: Result, expected: Result) -> None:
    assert result.token_ids == expected.token_ids
    assert result.logprobs == expected.logprobs  # floats compare exactly


def hold_blocks(engine: Engine, tokens: int, seed: int) -> None:
    """Start a request that keeps the blocks of so many tokens, and stays unfinished."""
    prompt = make_prompt(tokens, seed).remainder(97).tolist()
    params = SamplingParams(max_tokens=engine.context - tokens - 1, ignore_eos=True)
    engine.add_request(prompt, params)
    while engine.scheduler.waiting or engine.scheduler.running[0].num_computed_tokens < tokens:
        engine.step()


# ---- the same bits ------------------------------------------------------------------------------

FAMILIES = {  # name: kind of cache
    "llama": "full attention",
    "mistral": "sliding window in every layer",
    "gemma3": "full attention and sliding windows: two groups",
    "deepseek_v3": "MLA",
    "llama4": "full attention and chunks",
    "gpt_oss": "sinks and sliding windows",
}


@pytest.mark.covering
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_handed_over_prompt_gives_the_same_bits(name: str, max_bytes: int, tmp_path) -> None:
    build_reference(name).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    prompts = [make_prompt(length, length).tolist() for length in (3, 4, 5, 33, 40)]
    alone, source, target = (make_engine(model, cache_tokens=256) for _ in range(3))
    for prompt in prompts:
        compute(source, prompt)
        reach = hand_over(source, target, prompt, max_bytes=max_bytes)
        assert reach == (len(prompt) - 1) // 4
        result = compute(target, prompt)
        assert result.cached_tokens == reach * 4
        assert_same(result, compute(alone, prompt))
    check_idle(target)
    check_idle(source)


@pytest.mark.parametrize(
    ("make", "kv_dtype"),
    [
        (tiny_model, torch.bfloat16),
        (tiny_model, torch.float8_e4m3fn),
        pytest.param(quantized_model, torch.float8_e4m3fn, marks=pytest.mark.slow),
    ],
)
def test_low_precision_caches(make, kv_dtype: torch.dtype) -> None:
    model = make()
    alone, source, target = (make_engine(model, kv_dtype=kv_dtype) for _ in range(3))
    compute(source, PROMPT)
    assert hand_over(source, target, PROMPT, max_bytes=1) == 10
    result = compute(target, PROMPT)
    assert result.cached_tokens == 40
    assert_same(result, compute(alone, PROMPT))


def test_an_fp8_cache_of_mla(tmp_path) -> None:
    build_reference("deepseek_v3").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    options = {"kv_dtype": torch.float8_e4m3fn}
    alone, source, target = (make_engine(model, **options) for _ in range(3))
    compute(source, PROMPT)
    assert hand_over(source, target, PROMPT) == 10
    assert_same(compute(target, PROMPT), compute(alone, PROMPT))


def test_a_longer_prompt_continues_a_handed_over_prefix(model) -> None:
    """A second turn: only what is new is handed over and computed."""
    source, target = make_engine(model), make_engine(model)
    compute(source, PROMPT)
    assert hand_over(source, target, PROMPT) == 10
    longer = [*PROMPT, *range(1, 30)]
    have = len(export_prefix(target, longer, max_bytes=0).hashes)
    assert have == 10
    compute(source, longer)
    chunk = export_prefix(source, longer, start=have)
    assert (chunk.start, chunk.end, len(chunk.hashes)) == (10, 17, 17)
    assert import_prefix(target, chunk) == 17
    assert compute(target, longer).cached_tokens == 68


# ---- hashes -------------------------------------------------------------------------------------


def test_salts_keep_prefixes_apart(model) -> None:
    source, target = make_engine(model), make_engine(model)
    compute(source, PROMPT, "a")
    assert export_prefix(source, PROMPT, "b").hashes == []
    assert hand_over(source, target, PROMPT, "b") == 0
    assert hand_over(source, target, PROMPT, "a") == 10
    assert compute(target, PROMPT, "b").cached_tokens == 0
    target.reset_prefix_cache()
    assert hand_over(source, target, PROMPT, "a") == 10
    assert compute(target, PROMPT).cached_tokens == 0
    target.reset_prefix_cache()
    assert hand_over(source, target, PROMPT, "a") == 10
    assert compute(target, PROMPT, "a").cached_tokens == 40


def test_a_prompt_that_is_not_cached_exports_nothing(model) -> None:
    chunk = export_prefix(make_engine(model), PROMPT)
    assert chunk.hashes == [] and chunk.contents == [b""] and chunk.end == 0


def test_chunks_are_limited_in_bytes(model) -> None:
    engine = make_engine(model)
    compute(engine, PROMPT)
    block = 4 * 2 * 2 * 2 * 8 * 4  # tokens, layers, keys and values, heads, head size, bytes
    chunk = export_prefix(engine, PROMPT, max_bytes=3 * block + 1)
    assert chunk.end == 3 and [len(one) for one in chunk.contents] == [3 * block]
    assert export_prefix(engine, PROMPT, start=9, max_bytes=3 * block).end == 10
    empty = export_prefix(engine, PROMPT, max_bytes=0)
    assert len(empty.hashes) == 10 and empty.contents == [b""]
    assert export_prefix(engine, PROMPT, start=99).contents == [b""]


# ---- little room --------------------------------------------------------------------------------


def small_engine(model: CausalLM, blocks: int) -> Engine:
    return make_engine(model, context=64, cache_tokens=blocks * 4, max_batched_tokens=16)


@pytest.mark.covering
@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
@pytest.mark.parametrize("held", [1, 20, 24, 29, 30, 31, 32])
def test_import_into_a_nearly_full_pool(model, held: int, max_bytes: int) -> None:
    """As many leading blocks as are free; the running request keeps its blocks and its bits."""
    source = make_engine(model)
    compute(source, PROMPT)
    target, other = small_engine(model, 32), small_engine(model, 32)
    pool = target.block_manager.pools[0]
    blocks = [pool.allocate() for _ in range(held)]
    before = {block: target.kv_cache.key_caches[0][block].clone() for block in blocks}
    start = reach = 0
    while start < 10:
        chunk = export_prefix(source, PROMPT, start=start, max_bytes=max_bytes)
        reach = import_prefix(target, chunk)
        if reach < chunk.end:
            break
        start = chunk.end
    assert reach == min(10, 32 - held)
    assert all(pool.ref_counts[block] == 1 for block in blocks)
    assert all(torch.equal(target.kv_cache.key_caches[0][b], old) for b, old in before.items())
    for block in blocks:
        pool.release(block)
    result = compute(target, PROMPT)
    assert result.cached_tokens == 4 * reach
    assert_same(result, compute(other, PROMPT))
    check_idle(target)


def test_a_running_request_is_not_disturbed(model) -> None:
    source, target, alone = make_engine(model), small_engine(model, 16), small_engine(model, 16)
    compute(source, PROMPT)
    for engine in (target, alone):
        hold_blocks(engine, 30, seed=3)
    hand_over(source, target, PROMPT)
    replies = []
    for engine in (target, alone):
        (request,) = engine.requests.values()
        while engine.has_unfinished_requests:
            engine.step()
        replies.append(request.output_ids.tolist())
    assert replies[0] == replies[1]
    check_idle(target)


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_an_import_does_not_evict_its_own_prefix(model, max_bytes: int) -> None:
    """The oldest free blocks are the prefix's first ones: they must stay."""
    source, target = make_engine(model), small_engine(model, 16)
    compute(source, PROMPT)
    compute(target, PROMPT[:17])  # the first 4 blocks, then other prompts
    for seed in range(2):
        compute(target, make_prompt(17, seed + 50).remainder(97).tolist())
    assert len(export_prefix(target, PROMPT, max_bytes=0).hashes) == 4
    assert hand_over(source, target, PROMPT, max_bytes=max_bytes) == 10
    assert compute(target, PROMPT).cached_tokens == 40
    check_idle(target)


@pytest.mark.parametrize("max_bytes", [1, 1 << 20])
def test_the_last_imported_blocks_are_evicted_first(model, max_bytes: int) -> None:
    """What is left is a shorter prefix, not a tail that nobody finds."""
    source, target = make_engine(model), small_engine(model, 16)
    compute(source, PROMPT)
    assert hand_over(source, target, PROMPT, max_bytes=max_bytes) == 10
    pool = target.block_manager.pools[0]
    blocks = [pool.allocate() for _ in range(9)]
    assert len(export_prefix(target, PROMPT, max_bytes=0).hashes) == 7
    for block in blocks:
        pool.release(block)


def test_duplicates_are_kept_once(model) -> None:
    source, target = make_engine(model), make_engine(model)
    compute(source, PROMPT)
    for _ in range(3):
        assert hand_over(source, target, PROMPT) == 10
    assert len(target.block_manager.pools[0].hash_by_block) == 10
    compute(source, PROMPT)
    assert hand_over(target, source, PROMPT) == 10  # and back


def test_a_window_without_room_is_not_imported_in_part(tmp_path) -> None:
    """A shorter prefix would need blocks that were not exported: nothing is evicted for it."""
    build_reference("gemma3").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    source, target = make_engine(model), make_engine(model, context=64, cache_tokens=64)
    prompt = make_prompt(41).tolist()
    compute(source, prompt)
    manager = target.block_manager
    groups = zip(manager.groups, manager.pools, strict=True)
    full = next(pool for group, pool in groups if group.sliding_window is None)
    blocks = [full.allocate() for _ in range(full.num_blocks - 5)]
    assert import_prefix(target, export_prefix(source, prompt)) == 0
    assert all(not pool.hash_by_block for pool in target.block_manager.pools)
    for block in blocks:
        full.release(block)
    assert hand_over(source, target, prompt) == 10
    assert compute(target, prompt).cached_tokens == 40


def test_a_missing_chunk_is_no_hit(model) -> None:
    source, target = make_engine(model), make_engine(model)
    compute(source, PROMPT)
    assert import_prefix(target, export_prefix(source, PROMPT, start=4)) == 0
    assert compute(target, PROMPT).cached_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_over_two_engines(model, seed: int) -> None:
    """Imports between running requests of a small pool: every reply has the bits of an empty engine."""
    generator = random.Random(seed)
    source, target = small_engine(model, 24), small_engine(model, 24)
    shared = [make_prompt(40, 70 + seed + i).remainder(97).tolist() for i in range(3)]
    running = {}
    for _ in range(40):
        prompt = generator.choice(shared)[: generator.randint(5, 40)]
        prompt = prompt + [generator.randrange(97) for _ in range(generator.randint(0, 6))]
        if generator.random() < 0.5:
            compute(source, prompt)
            hand_over(source, target, prompt, max_bytes=generator.choice([1, 2000, 1 << 20]))
        request = target.add_request(prompt, PARAMS)
        running[request.id] = request
        if generator.random() < 0.2:
            target.cancel(generator.choice([*running]))
        for _ in range(generator.randint(0, 4)):
            target.step()
        assert not any(target.audit().values())
    while target.has_unfinished_requests:
        target.step()
    check_idle(target)
    assert sum(request.cached_tokens for request in running.values()) > 0
    for request in running.values():
        if request.finish_reason == "length":
            alone = make_engine(model, prefix_caching=False)
            prompt = request.tokens[: request.prompt_length].tolist()
            assert compute(alone, prompt).logprobs == request.logprobs


# ---- what is refused ----------------------------------------------------------------------------


def test_other_layouts_and_weights_are_refused(model) -> None:
    source = make_engine(model)
    compute(source, PROMPT)
    chunk = export_prefix(source, PROMPT)
    for target in (
        make_engine(model, block_size=8),
        make_engine(model, kv_dtype=torch.bfloat16),
        make_engine(tiny_model(num_hidden_layers=1)),
        make_engine(tiny_model(num_key_value_heads=4)),
    ):
        with pytest.raises(ArgumentError, match="another layout"):
            import_prefix(target, chunk)
        check_idle(target)
    changed = tiny_model()
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "norm" in name:
                parameter[-1] += 1
    with pytest.raises(ArgumentError, match="weights"):
        import_prefix(make_engine(changed), chunk)


def test_layouts_are_equal_for_equal_models() -> None:
    first, second = make_engine(tiny_model()), make_engine(tiny_model(), cache_tokens=64)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        b.data.copy_(a.data)
    assert describe_layout(first) == describe_layout(second)
    assert "2 layers, blocks of 4" in describe_layout(first)


def test_damaged_chunks_are_refused_before_anything_is_written(model) -> None:
    source, target = make_engine(model), make_engine(model)
    compute(source, PROMPT)
    chunk = export_prefix(source, PROMPT)
    whole = chunk.contents[0]
    for damaged in (
        replace(chunk, contents=[whole[:-1]]),
        replace(chunk, contents=[whole + b"x"]),
        replace(chunk, contents=[b""]),
        replace(chunk, contents=[]),
        replace(chunk, contents=[whole, whole]),
        replace(chunk, hashes=chunk.hashes[:-1]),
        replace(chunk, hashes=[chunk.hashes[0]] * 10),
        replace(chunk, start=-1),
        replace(chunk, start=11),
        replace(chunk, end=11),
    ):
        with pytest.raises(ArgumentError):
            import_prefix(target, damaged)
        check_idle(target)
        assert not target.block_manager.pools[0].hash_by_block


def test_a_write_that_fails_leaks_nothing(model, monkeypatch) -> None:
    source, target = make_engine(model), make_engine(model)
    compute(source, PROMPT)
    chunk = export_prefix(source, PROMPT)

    def fail(*arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr("fulgurite.serve.engine.prefix_blocks._write_blocks", fail)
    with pytest.raises(RuntimeError):
        import_prefix(target, chunk)
    check_idle(target)
    assert compute(target, PROMPT).cached_tokens == 0


@pytest.mark.parametrize("name", ["qwen3_next", "llama_dynamic"])
def test_models_without_a_prefix_cache_are_refused(name: str, tmp_path) -> None:
    build_reference(name).save_pretrained(tmp_path)
    engine = make_engine(load_model(tmp_path))
    with pytest.raises(
        ArgumentError, match="no prefix cache to hand blocks over: .*(state|length)"
    ):
        export_prefix(engine, [1, 2, 3])
    with pytest.raises(ArgumentError, match="no prefix cache"):
        import_prefix(engine, PrefixBlocks([], 0, 0, [b""], ""))


def test_prompts_that_cannot_run_are_refused(model) -> None:
    engine = make_engine(model, prefix_caching=True)
    for prompt in ([], [1] * 500):
        with pytest.raises(ArgumentError, match="context of 128"):
            export_prefix(engine, prompt)
    with pytest.raises(ArgumentError, match="prefix_caching=False"):
        export_prefix(make_engine(model, prefix_caching=False), [1, 2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_blocks_on_a_gpu(kv_dtype: torch.dtype | None) -> None:
    """Steps in flight and captured steps: the blocks arrive as they are."""
    model = tiny_model().to("cuda", torch.bfloat16)
    options = {"kv_dtype": kv_dtype, "block_size": 16}
    source, target = make_engine(model, **options), make_engine(model, **options)
    hold_blocks(target, 20, seed=1)
    compute(source, PROMPT)
    assert hand_over(source, target, PROMPT, max_bytes=1) == 2
    assert export_prefix(target, PROMPT).contents == export_prefix(source, PROMPT).contents
    result, again = compute(target, PROMPT), compute(source, PROMPT)
    assert result.cached_tokens == again.cached_tokens == 32
    assert result.token_ids == again.token_ids
