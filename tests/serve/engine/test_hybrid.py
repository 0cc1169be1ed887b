"""Models with states (linear attention) in the engine: the same bits however they run."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is what these compare with")

from fulgurite.models import CausalLM, load_model
from fulgurite.quantize import quantize
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.engine.scheduler import Scheduler
from tests.models.reference_models import build_reference, greedy_reference, make_prompt
from tests.serve.engines import check_idle, make_engine

LENGTHS = (20, 9, 14, 18)
NEW = 20
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def reference():
    return build_reference("qwen3_next")


@pytest.fixture(scope="module")
def model(reference, tmp_path_factory) -> CausalLM:
    path = tmp_path_factory.mktemp("qwen3_next")
    reference.save_pretrained(path)
    return load_model(path)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [make_prompt(length, seed).tolist() for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Each prompt alone, in one chunk."""
    engine = make_engine(model, max_sequences=1)
    return [engine.generate([ids], PARAMS)[0] for ids in prompts]


def assert_same(results, expected) -> None:
    """The same tokens, and the same log-probabilities to the bit."""
    for result, alone in zip(results, expected, strict=True):
        assert result.token_ids == alone.token_ids
        assert result.logprobs == alone.logprobs


def test_tokens_match_transformers(reference, prompts, expected) -> None:
    for ids, result in zip(prompts, expected, strict=True):
        assert result.token_ids == greedy_reference(reference, torch.tensor(ids), NEW)


@pytest.mark.parametrize("max_batched_tokens", [4, 5, 11, 64])
def test_companions_and_chunks_change_nothing(model, prompts, expected, max_batched_tokens) -> None:
    engine = make_engine(model, max_sequences=4, max_batched_tokens=max_batched_tokens)
    assert_same(engine.generate(prompts, PARAMS), expected)
    check_idle(engine)


def test_preemption_changes_nothing(model, prompts, expected) -> None:
    engine = make_engine(model, max_sequences=4, cache_tokens=72, context=64)
    assert_same(engine.generate(prompts, PARAMS), expected)
    assert engine.scheduler.num_preemptions
    check_idle(engine)


def test_a_slot_is_clean_after_a_cancelled_request(model, prompts, expected) -> None:
    engine = make_engine(model, max_sequences=1)
    cancelled = engine.add_request(prompts[1], PARAMS)
    for _ in range(5):
        engine.step()
    engine.cancel(cancelled.id)
    assert_same(engine.generate(prompts[:1], PARAMS), expected[:1])
    check_idle(engine)


def test_an_interrupted_step_is_not_applied_twice(model, prompts, expected, monkeypatch) -> None:
    """The step ran the model, so the states have its tokens; keys may be written twice, they not."""
    engine = make_engine(model, max_sequences=2, max_batched_tokens=8)
    run, calls = Scheduler.mark_computed, []

    def interrupt(scheduler, chunks) -> None:
        calls.append(chunks)
        if len(calls) in (2, 9, 10):
            raise KeyboardInterrupt
        run(scheduler, chunks)

    monkeypatch.setattr(Scheduler, "mark_computed", interrupt)
    requests = [engine.add_request(ids, PARAMS) for ids in prompts[:2]]
    interrupts = 0
    while engine.has_unfinished_requests:
        try:
            engine.step()
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 3
    assert [r.output_ids.tolist() for r in requests] == [e.token_ids for e in expected[:2]]
    check_idle(engine)


def test_prefix_caching_is_off_and_says_why(model, prompts, expected) -> None:
    engine = make_engine(model, prefix_caching=True)
    for _ in range(2):
        results = engine.generate(prompts[:1], PARAMS)
        assert results[0].cached_tokens == 0
        assert_same(results, expected[:1])
    assert "one state a request" in (model.no_prefix_cache_reason or "")


def test_the_plan_counts_the_states(model) -> None:
    engine = make_engine(model, max_sequences=3)
    states = [state for states in engine.kv_cache.states.values() for state in states]
    assert engine.plan.states == sum(state.nbytes for state in states) > 0
    assert engine.plan.states + engine.plan.kv_cache == engine.kv_cache.num_bytes
    assert "states" in engine.plan.format_table()
    layers = set(engine.kv_cache.states) | set(engine.kv_cache.key_caches)
    assert layers == set(range(4)) and len(engine.kv_cache.key_caches) == 1


def build_quantized(path) -> CausalLM:
    """Without experts, whose CPU kernels can't be recorded; sizes that q8_0 takes."""
    build_reference(
        "qwen3_next", num_experts=0, linear_key_head_dim=16, linear_value_head_dim=16, head_dim=32
    ).save_pretrained(path)
    model = load_model(path)
    quantize(model, "q8_0", progress=False)
    return model


def test_captured_decode_steps_give_the_same_tokens(tmp_path, prompts) -> None:
    model = build_quantized(tmp_path)
    captured, eager = make_engine(model), make_engine(model)
    eager.runner.no_capture_reason = "this test compares with eager steps"
    results = [engine.generate(prompts, PARAMS) for engine in (captured, eager)]
    assert captured.runner.no_capture_reason is None and captured.runner.captured_sizes
    assert_same(*results)


def test_prompts_are_cut_at_aligned_positions(model, prompts, expected) -> None:
    """On GPUs the kernels' blocks are aligned; a step too small for a block cuts anywhere."""
    engine: Engine = make_engine(model, max_sequences=4, max_batched_tokens=12)
    engine.scheduler.prefill_alignment = 8
    cuts, mark = [], engine.scheduler.mark_computed

    def record(chunks) -> None:
        cuts.extend(c.end for c in chunks if c.end < c.request.prompt_length)
        mark(chunks)

    engine.scheduler.mark_computed = record  # type: ignore[method-assign]
    assert_same(engine.generate(prompts, PARAMS), expected)
    assert cuts and all(cut % 8 == 0 for cut in cuts)
    engine.scheduler.prefill_alignment = 64
    assert_same(engine.generate(prompts, PARAMS), expected)


@pytest.mark.gpu
def test_gpu_gives_the_tokens_of_the_cpu(model) -> None:
    """Prompts of whole blocks and of none, cut between blocks; decode steps are captured."""
    prompts = [make_prompt(length, seed).tolist() for seed, length in enumerate((150, 9, 64, 70))]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    sizes = {"context": 192, "max_sequences": 4, "max_batched_tokens": 96}
    expected = make_engine(model, **sizes).generate(prompts, params)
    engine = make_engine(copy.deepcopy(model).to("cuda"), **sizes)
    assert engine.scheduler.prefill_alignment == 64
    results = engine.generate(prompts, params)
    assert [r.token_ids for r in results] == [e.token_ids for e in expected]
    check_idle(engine)


def test_a_model_of_linear_attention_alone_has_no_blocks(tmp_path, prompts) -> None:
    reference = build_reference("qwen3_next", layer_types=["linear_attention"] * 4)
    reference.save_pretrained(tmp_path)
    engine = make_engine(load_model(tmp_path), max_sequences=2)
    for ids, result in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
        sequence = list(ids)
        with torch.no_grad():  # transformers' cache needs a layer of attention
            for _ in range(NEW):
                logits = reference(torch.tensor([sequence]), use_cache=False).logits
                sequence.append(int(logits[0, -1].argmax()))
        assert result.token_ids == sequence[len(ids) :]
