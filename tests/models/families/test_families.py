"""Every family against transformers: logits, greedy text, caches, ragged batches, torch.compile."""

from __future__ import annotations

import pytest
import torch

from fulgurite.models import ARCHITECTURES, ContiguousKVCache, NoKVCache, load_model
from tests.models.more_cases import MORE_CASES
from tests.models.reference_models import (
    CASES,
    ModelPair,
    greedy_cached,
    greedy_reference,
    greedy_uncached,
    logits_reference,
    make_prompt,
)

NUM_TOKENS = 64
LENGTHS = (20, 3, 13)
# Tolerance between two float32 implementations, relative to the largest logit.
TOLERANCE = 1e-4


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.covering
@pytest.mark.parametrize("length", [1, 40, 70])
def test_logits_match_transformers(pair: ModelPair, length: int) -> None:
    ids = make_prompt(length)
    actual = pair.model(ids[None], torch.arange(length)[None])[0]
    assert relative_error(actual, logits_reference(pair.reference, ids)) < TOLERANCE


def check_no_tokens(pair: ModelPair) -> None:
    """What a rank without requests runs in a step, and a call with an empty batch row."""
    nothing = torch.arange(0)
    assert pair.model(nothing, nothing, NoKVCache()).shape == (0, pair.model.config.vocab_size)
    rows = nothing[None].expand(2, 0)
    for cache in (NoKVCache(), ContiguousKVCache(pair.model.attention_specs, 2, 4)):
        assert pair.model(rows, rows, cache).shape == (2, 0, pair.model.config.vocab_size)


def test_no_tokens(pair: ModelPair) -> None:
    check_no_tokens(pair)


def test_greedy_text_matches_transformers(pair: ModelPair) -> None:
    ids = make_prompt(20)
    expected = greedy_reference(pair.reference, ids, NUM_TOKENS)
    assert greedy_cached(pair.model, [ids], NUM_TOKENS)[0] == expected
    if pair.name == "llama_dynamic":
        # Beyond the trained length a cached key depends on the sequence length when it was
        # computed.
        expected = greedy_reference(pair.reference, ids, NUM_TOKENS, use_cache=False)
    assert greedy_uncached(pair.model, ids, NUM_TOKENS) == expected
    assert len(set(expected)) > 5, "the text is too repetitive to test anything"


def test_ragged_batch_matches_single_prompts(pair: ModelPair) -> None:
    prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    batched = greedy_cached(pair.model, prompts, NUM_TOKENS)
    assert batched == [greedy_cached(pair.model, [ids], NUM_TOKENS)[0] for ids in prompts]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_affect_logits(pair: ModelPair, side: str) -> None:
    prompts = [make_prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    results = []
    for padding_id in (0, 7):
        ids_BT = torch.full((len(prompts), 22), padding_id)
        positions_BT = torch.full((len(prompts), 22), -1)
        slices = []
        for row, ids in enumerate(prompts):
            start = 22 - len(ids) if side == "left" else 0
            slices.append(slice(start, start + len(ids)))
            ids_BT[row, slices[-1]] = ids
            positions_BT[row, slices[-1]] = torch.arange(len(ids))
        for cache in (None, ContiguousKVCache(pair.model.attention_specs, len(prompts), 30)):
            logits = pair.model(ids_BT, positions_BT, cache)
            results.append([logits[row, part] for row, part in enumerate(slices)])
    uncached, cached, uncached_again, cached_again = results
    for row, ids in enumerate(prompts):
        assert torch.equal(uncached[row], uncached_again[row])
        assert torch.equal(cached[row], cached_again[row])
        single = pair.model(ids[None], torch.arange(len(ids))[None])[0]
        assert relative_error(uncached[row], single) < 1e-5
        assert relative_error(cached[row], single) < 1e-5


def test_float16_error_is_at_most_twice_that_of_transformers(pair: ModelPair) -> None:
    """Errors relative to float32. Medians, since another expert choice changes a whole row."""
    ids, positions = make_prompt(40), torch.arange(40)[None]
    exact = logits_reference(pair.reference, ids)
    half = type(pair.reference).from_pretrained(
        pair.path, dtype=torch.float16, attn_implementation="eager"
    )
    allowed = 2 * (logits_reference(half, ids).float() - exact).abs().median()
    model = load_model(pair.path, dtype=torch.float16)
    cache = ContiguousKVCache(model.attention_specs, 1, 40, dtype=torch.float16)
    for kv_cache in (None, cache):
        actual = model(ids[None], positions, kv_cache)[0].float()
        assert (actual - exact).abs().median() < allowed


def test_gradients_match_transformers(pair: ModelPair) -> None:
    """Gradients of the embedding, which depend on the whole model."""
    ids = make_prompt(12)
    with torch.enable_grad():
        expected = pair.reference(ids[None]).logits.pow(2).mean()
        actual = pair.model(ids[None], torch.arange(12)[None]).pow(2).mean()
        (expected_grad,) = torch.autograd.grad(
            expected, [pair.reference.get_input_embeddings().weight]
        )
        (actual_grad,) = torch.autograd.grad(actual, [pair.model.embed_tokens.weight])
    assert relative_error(actual_grad, expected_grad) < TOLERANCE


def test_flat_and_packed_layouts_match_the_batch_layout(pair: ModelPair) -> None:
    first, second = make_prompt(20), make_prompt(13, 1)
    positions = torch.cat((torch.arange(20), torch.arange(13)))
    segments = torch.tensor([0] * 20 + [1] * 13)
    packed = pair.model(torch.cat((first, second)), positions, NoKVCache(segments))
    assert relative_error(pair.model(first, torch.arange(20)), packed[:20]) < 1e-5
    single = pair.model(second[None], torch.arange(13)[None])[0]
    assert relative_error(packed[20:], single) < 1e-5


def test_chunked_prefill_matches_one_prefill(pair: ModelPair) -> None:
    if pair.model.needs_sequence_lengths:
        pytest.skip("cached keys depend on the sequence length when they were computed")
    ids, positions = make_prompt(40)[None], torch.arange(40)[None]
    cache = ContiguousKVCache(pair.model.attention_specs, 1, 40)
    chunks = [
        pair.model(ids[:, start:stop], positions[:, start:stop], cache)
        for start, stop in ((0, 11), (11, 12), (12, 40))
    ]
    assert relative_error(torch.cat(chunks, dim=1), pair.model(ids, positions)) < 1e-5


def assert_close_logits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Eager norms and RoPE use our kernels, which round differently."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "gpt_oss"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "llama4", "phi_moe")),
    ],
)
def test_torch_compile_fullgraph(name: str, get_pair) -> None:
    model = get_pair(name).model
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    ids, positions = make_prompt(9)[None], torch.arange(9)[None]
    assert_close_logits(compiled(ids, positions), model(ids, positions))
    caches = [ContiguousKVCache(model.attention_specs, 1, 12) for _ in range(2)]
    step = torch.tensor([[3]]), torch.tensor([[9]])
    results = []
    for cache, run in zip(caches, (compiled, model), strict=True):
        model(ids, positions, cache)
        results.append(run(*step, cache))
    assert_close_logits(*results)
    for actual, expected in zip(caches[0].keys, caches[1].keys, strict=True):
        assert_close_logits(actual, expected)


def test_logits_of_some_rows(get_pair) -> None:
    model = get_pair("gemma2").model
    ids, positions = make_prompt(9), torch.arange(9)
    last = model.compute_logits(model.compute_hidden_states(ids, positions)[-1])
    torch.testing.assert_close(last, model(ids, positions)[-1])


def test_mla_caches_compressed_keys(get_pair) -> None:
    specs = get_pair("deepseek_v3").model.attention_specs
    assert all(spec.is_mla and spec.num_kv_heads == 1 for spec in specs)
    cache = ContiguousKVCache(specs, batch=1, capacity=7)
    assert [tuple(keys.shape) for keys in cache.keys] == [(1, 8, 1, 24 + 8)] * len(specs)
    assert cache.values == []


def test_every_architecture_has_a_case() -> None:
    covered = {prefix + "ForCausalLM" for prefix, _ in (CASES | MORE_CASES).values()}
    others = {architecture for architecture in ARCHITECTURES if "Conditional" in architecture}
    assert set(ARCHITECTURES) - others - {"PhiMoEForCausalLM"} == covered  # two names of one
