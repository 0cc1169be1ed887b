"""Every family against transformers: logits, greedy text, caches, ragged batches, capture."""

from __future__ import annotations

import pytest
import torch

from fulgurite.models import ContiguousCache, WholeSequence, load_model
from tests.models.model_oracle import (
    CASES,
    Pair,
    greedy_cached,
    greedy_theirs,
    greedy_uncached,
    logits_theirs,
    prompt,
)

NEW = 64
LENGTHS = (20, 3, 13)
# What is allowed between two float32 programs with the same weights, of the largest logit.
RELATIVE = 1e-4


def relative_error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


@pytest.mark.parametrize("length", [1, 40, 70])
def test_logits_equal_transformers(pair: Pair, length: int) -> None:
    ids = prompt(length)
    ours = pair.ours(ids[None], torch.arange(length)[None])[0]
    assert relative_error(ours, logits_theirs(pair.theirs, ids)) < RELATIVE


def test_greedy_text_equals_transformers_with_and_without_cache(pair: Pair) -> None:
    ids = prompt(20)
    theirs = greedy_theirs(pair.theirs, ids, NEW)
    assert greedy_cached(pair.ours, [ids], NEW)[0] == theirs
    if pair.name == "llama_dynamic":
        # Past the trained length a key depends on when it was made, so running all again differs.
        theirs = greedy_theirs(pair.theirs, ids, NEW, use_cache=False)
    assert greedy_uncached(pair.ours, ids, NEW) == theirs
    assert len(set(theirs)) > 5, "the text is too dull to tell anything"


def test_a_ragged_batch_writes_what_each_prompt_writes_alone(pair: Pair) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    together = greedy_cached(pair.ours, prompts, NEW)
    assert together == [greedy_cached(pair.ours, [ids], NEW)[0] for ids in prompts]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_leaves_no_trace(pair: Pair, side: str) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    results = []
    for filler in (0, 7):
        ids_BT = torch.full((len(prompts), 22), filler)
        positions_BT = torch.full((len(prompts), 22), -1)
        where = []
        for row, ids in enumerate(prompts):
            start = 22 - len(ids) if side == "left" else 0
            where.append(slice(start, start + len(ids)))
            ids_BT[row, where[-1]] = ids
            positions_BT[row, where[-1]] = torch.arange(len(ids))
        for cache in (None, ContiguousCache(pair.ours.attention_specs, len(prompts), 30)):
            logits = pair.ours(ids_BT, positions_BT, cache)
            results.append([logits[row, part] for row, part in enumerate(where)])
    plain, cached, plain_again, cached_again = results
    for row, ids in enumerate(prompts):
        assert torch.equal(plain[row], plain_again[row])
        assert torch.equal(cached[row], cached_again[row])
        alone = pair.ours(ids[None], torch.arange(len(ids))[None])[0]
        assert relative_error(plain[row], alone) < 1e-5
        assert relative_error(cached[row], alone) < 1e-5


def test_sixteen_bits_lose_at_most_twice_what_transformers_loses(pair: Pair) -> None:
    """Both against float32; medians, since one expert chosen differently moves a whole row."""
    ids, positions = prompt(40), torch.arange(40)[None]
    exact = logits_theirs(pair.theirs, ids)
    half = type(pair.theirs).from_pretrained(
        pair.path, dtype=torch.float16, attn_implementation="eager"
    )
    allowed = 2 * (logits_theirs(half, ids).float() - exact).abs().median()
    model = load_model(pair.path, dtype=torch.float16)
    cache = ContiguousCache(model.attention_specs, 1, 40, dtype=torch.float16)
    for context in (None, cache):
        ours = model(ids[None], positions, context)[0].float()
        assert (ours - exact).abs().median() < allowed


def test_gradients_equal_transformers(pair: Pair) -> None:
    """Of the embedding, which all of the model lies between."""
    ids = prompt(12)
    with torch.enable_grad():
        theirs = pair.theirs(ids[None]).logits.pow(2).mean()
        ours = pair.ours(ids[None], torch.arange(12)[None]).pow(2).mean()
        (wanted,) = torch.autograd.grad(theirs, [pair.theirs.get_input_embeddings().weight])
        (got,) = torch.autograd.grad(ours, [pair.ours.embedding.weight])
    assert relative_error(got, wanted) < RELATIVE


def test_flat_and_packed_layouts_are_the_batched_one(pair: Pair) -> None:
    first, second = prompt(20), prompt(13, 1)
    positions = torch.cat((torch.arange(20), torch.arange(13)))
    segments = torch.tensor([0] * 20 + [1] * 13)
    packed = pair.ours(torch.cat((first, second)), positions, WholeSequence(segments))
    assert relative_error(pair.ours(first, torch.arange(20)), packed[:20]) < 1e-5
    alone = pair.ours(second[None], torch.arange(13)[None])[0]
    assert relative_error(packed[20:], alone) < 1e-5


def test_a_prompt_in_pieces_is_the_prompt_at_once(pair: Pair) -> None:
    if pair.ours.needs_extent:
        pytest.skip("these turn a key by how long the sequence was when it was made")
    ids, positions = prompt(40)[None], torch.arange(40)[None]
    cache = ContiguousCache(pair.ours.attention_specs, 1, 40)
    pieces = [
        pair.ours(ids[:, start:stop], positions[:, start:stop], cache)
        for start, stop in ((0, 11), (11, 12), (12, 40))
    ]
    assert relative_error(torch.cat(pieces, dim=1), pair.ours(ids, positions)) < 1e-5


def same_but_for_rounding(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Without capture, norms and rotations are kernels of ours, which round elsewhere."""
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["phi3", "deepseek_v3", "llama4", "gpt_oss"])
def test_a_model_is_captured_whole(name: str, get_pair) -> None:
    model = get_pair(name).ours
    torch._dynamo.reset()
    captured = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    ids, positions = prompt(9)[None], torch.arange(9)[None]
    same_but_for_rounding(captured(ids, positions), model(ids, positions))
    caches = [ContiguousCache(model.attention_specs, 1, 12) for _ in range(2)]
    step = torch.tensor([[3]]), torch.tensor([[9]])
    results = []
    for cache, run in zip(caches, (captured, model), strict=True):
        model(ids, positions, cache)
        results.append(run(*step, cache))
    same_but_for_rounding(*results)
    for ours, theirs in zip(caches[0].keys, caches[1].keys, strict=True):
        same_but_for_rounding(ours, theirs)


def test_hidden_then_logits_of_some_rows(get_pair) -> None:
    model = get_pair("gemma2").ours
    ids, positions = prompt(9), torch.arange(9)
    last = model.logits(model.hidden(ids, positions)[-1])
    torch.testing.assert_close(last, model(ids, positions)[-1])


def test_latents_are_what_is_cached(get_pair) -> None:
    specs = get_pair("deepseek_v3").ours.attention_specs
    assert all(spec.latent and spec.kv_heads == 1 for spec in specs)
    cache = ContiguousCache(specs, batch=1, capacity=7)
    assert [tuple(keys.shape) for keys in cache.keys] == [(1, 8, 1, 24 + 8)] * len(specs)
    assert cache.values == []


def test_every_architecture_has_a_case() -> None:
    from fulgurite.models import ARCHITECTURES

    tested = {prefix + "ForCausalLM" for prefix, _ in CASES.values()}
    multimodal = {"Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"}
    assert set(ARCHITECTURES) == tested | multimodal
