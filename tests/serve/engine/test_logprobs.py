"""Log-probabilities of prompts: transformers' logits of the whole sequence are the oracle.

Bits are the same however a prompt is computed: whole, in chunks, beside others, with a full prefix cache,
or after a preemption. Over ranks: tests/parallel/test_prompt_logprobs.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fulgurite.models import CausalLM, load_model
from fulgurite.models.tokenizer import Tokenizer
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import Result, SamplingParams, TokenLogprob
from fulgurite.serve.structured.compiler import GrammarCompiler
from tests.serve.engines import check_idle, make_engine, quantized_model, tiny_model
from tests.serve.tiny_checkpoint import VOCABULARY, byte_tokenizer

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=3)
PROMPTS = [[(7 * n + 3 * i) % 97 for i in range(length)] for n, length in enumerate((1, 2, 9, 30))]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return tiny_model()


def read(result: Result) -> list[TokenLogprob]:
    """Those of all tokens after the first; the first one's must be None."""
    assert result.prompt_logprobs is not None and result.finish_reason != "error", result
    first, *rest = result.prompt_logprobs
    assert first is None and len(rest) == len(result.prompt_ids) - 1
    return [one for one in rest if one is not None]


def check(logits_TO: torch.Tensor, result: Result) -> None:
    """Compare with the logits of all tokens of a prompt."""
    values = logits_TO.detach().double().log_softmax(dim=-1)
    found = read(result)
    assert [one.token_id for one in found] == result.prompt_ids[1:]
    for row, one in zip(values, found, strict=False):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=2e-4)
        best = row.topk(len(one.top))
        assert [p for _, p in one.top] == pytest.approx(best.values.tolist(), abs=2e-4)
        assert one.rank == 1 + int((row > row[one.token_id]).sum())


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3", "gemma2"])
def test_logprobs_of_prompts_match_transformers(name: str, tmp_path) -> None:
    reference_models = pytest.importorskip("tests.models.reference_models")
    reference = reference_models.build_reference(name)
    reference.save_pretrained(tmp_path)
    engine = make_engine(load_model(tmp_path), max_batched_tokens=11)
    prompts = [reference_models.make_prompt(length, length).tolist() for length in (2, 13, 37)]
    for prompt, result in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
        with torch.no_grad():
            check(reference(torch.tensor([prompt])).logits[0], result)
    check_idle(engine)


def generate(engine: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[TokenLogprob]]:
    return [read(one) for one in engine.generate(prompts, PARAMS)]


def test_bits_do_not_depend_on_chunks_companions_and_the_prefix_cache(model: CausalLM) -> None:
    whole = make_engine(model, max_batched_tokens=512, prefix_caching=False)
    wanted = [generate(whole, [prompt])[0] for prompt in PROMPTS]
    crowded = make_engine(model, max_batched_tokens=8, max_sequences=3)
    for _ in range(2):  # the second time all prompts are cached
        assert generate(crowded) == wanted
    plain = crowded.generate(PROMPTS, SamplingParams(max_tokens=3, ignore_eos=True))
    assert plain[-1].cached_tokens > 20 and plain[-1].prompt_logprobs is None
    check_idle(crowded)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_steps_ahead_and_captured_steps_keep_them(is_ahead: bool) -> None:
    model = quantized_model()
    wanted = generate(make_engine(model, max_batched_tokens=64))
    engine = make_engine(model, max_batched_tokens=8, async_scheduling=is_ahead)
    assert generate(engine) == wanted
    check_idle(engine)


def test_a_preempted_request_keeps_what_it_has(model: CausalLM) -> None:
    """Both are cut off in the middle of their prompts, and go on where they stopped."""
    prompts = [PROMPTS[3], PROMPTS[3][::-1]]
    wanted = generate(make_engine(model, max_batched_tokens=64), prompts)
    engine = make_engine(model, max_batched_tokens=8)
    requests = [engine.add_request(prompt, PARAMS) for prompt in prompts]
    preempted = 0
    while engine.has_unfinished_requests:
        engine.step()
        for request in [*engine.scheduler.running]:
            if request.num_preemptions < 3 and request.length == request.prompt_length:
                engine.scheduler.preempt(request)
                preempted += 1
    assert preempted == 6
    assert [[*one.prompt_logprobs[1:]] for one in requests] == wanted
    check_idle(engine)


def test_counts_from_none_to_the_whole_vocabulary(model: CausalLM) -> None:
    engine = make_engine(model)
    for count, wanted in ((0, 0), (1, 1), (1000, 97)):
        result = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, prompt_logprobs=count))
        assert [len(one.top) for one in read(result[0])] == [wanted, wanted]


def test_of_a_prompt_whose_reply_a_grammar_forces() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), None, (257,), None, {})
    engine = make_engine(tiny_model(vocab_size=VOCABULARY), tokenizer)
    engine.grammars.compiler = GrammarCompiler(tokenizer, VOCABULARY)
    params = SamplingParams(choices=["yes"], prompt_logprobs=0)
    (result,) = engine.generate(["ab"], params)
    assert result.text == "yes" and len(read(result)) == len(result.prompt_ids) - 1


def test_a_step_that_runs_out_of_memory_changes_nothing(model: CausalLM, monkeypatch) -> None:
    wanted = generate(make_engine(model))
    engine = make_engine(model)
    run, failures = engine.runner.execute, iter((0, 1, 0, 1, 1))

    def fail_sometimes(*step: Any) -> Any:
        output = run(*step)
        if next(failures, 0):
            raise MemoryError("injected")
        return output

    monkeypatch.setattr(engine.runner, "execute", fail_sometimes)
    assert generate(engine) == wanted
    assert engine.stats().out_of_memory == 3
