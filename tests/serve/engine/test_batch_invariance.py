"""A request's tokens and log-probabilities are the same bits alone and in any batch (on a CPU).

Alone: one request, its whole prompt in one step, nothing cached. Then the same request among random
companions, with small steps (chunked prefill), cached prefixes, and so few cache blocks that
requests are preempted.
"""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("transformers", reason="transformers builds the families' small models")

from fulgurite.models import CausalLM, load_model
from fulgurite.quant import FORMATS, resolve_format
from fulgurite.quantize import quantize
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import Result, SamplingParams, TokenLogprob
from tests.models.more_cases import MORE_CASES
from tests.models.reference_models import CASES, build_reference, make_prompt
from tests.serve.engines import make_engine, tiny_model

NEW = 6
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=2)
LENGTHS = (1, 5, 19, 30)
# attention has splits of 256 keys: prompts on both sides of a boundary
LONG = (250, 300)


def bits_of(result: Result) -> list[TokenLogprob]:
    """Tokens, their log-probabilities and those of the alternatives; floats compare exactly."""
    assert result.finish_reason == "length", result
    return list(result.logprobs)


def generate_alone(model: CausalLM, prompts: list[list[int]], **options: object) -> list[object]:
    """The result of each prompt by itself in a fresh cache."""
    engine = make_engine(model, max_batched_tokens=512, prefix_caching=False, **options)  # type: ignore[arg-type]
    return [bits_of(engine.generate([prompt], PARAMS)[0]) for prompt in prompts]


def generate_crowded(engine: Engine, prompts: list[list[int]], seed: int) -> list[object]:
    """The results of the prompts, in random order, some started while others run."""
    order = list(range(len(prompts)))
    generator = random.Random(seed)
    generator.shuffle(order)
    waiting, requests = list(order), {}
    while waiting or engine.has_unfinished_requests:
        for _ in range(generator.randint(0, 2)):
            if waiting:
                index = waiting.pop()
                requests[index] = engine.add_request(prompts[index], PARAMS)
        engine.step()
    return [list(requests[index].logprobs) for index in range(len(prompts))]


def make_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    prompts = [make_prompt(length, seed).tolist() for seed, length in enumerate(lengths)]
    return [*prompts, prompts[2][:11] + prompts[1]]  # the last one shares a prefix


def check_invariance(
    model: CausalLM, lengths: tuple[int, ...] = LENGTHS, **options: object
) -> None:
    prompts = make_prompts(lengths)
    expected = generate_alone(model, prompts, **options)
    assert len({str(one) for one in expected}) == len(prompts)  # not trivially equal
    crowded = make_engine(model, max_batched_tokens=13, max_sequences=4, **options)  # type: ignore[arg-type]
    for seed in range(2):  # the second time prefixes are cached
        assert generate_crowded(crowded, prompts, seed) == expected, f"seed {seed}"


@pytest.mark.parametrize("name", [*CASES, *MORE_CASES])
def test_families(name: str, tmp_path) -> None:
    build_reference(name).save_pretrained(tmp_path)
    check_invariance(load_model(tmp_path))


PACKED = [name for name, entry in FORMATS.items() if entry.family != "cast"]


@pytest.mark.parametrize("format", PACKED)
def test_packed_formats(format: str) -> None:
    model = tiny_model(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    quantize(model, format, progress=False)
    check_invariance(model, (1, 7, 33))


@pytest.mark.parametrize("format", ["q4_0", "fp8_e4m3_row", "mxfp4", "int8"])
def test_packed_experts(format: str, tmp_path) -> None:
    build_reference("mixtral").save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert resolve_format(format).name
    quantize(model, format, progress=False)
    check_invariance(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_dtype", [None, torch.float16, torch.float8_e4m3fn])
def test_dtypes_and_splits_of_attention(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    model = tiny_model(max_position_embeddings=512).to(dtype)
    check_invariance(model, (*LONG, 30), kv_dtype=kv_dtype, context=400)


def test_splits_of_mla(tmp_path) -> None:
    build_reference("deepseek_v3", max_position_embeddings=512).save_pretrained(tmp_path)
    check_invariance(load_model(tmp_path), (*LONG, 30), context=400)


@pytest.mark.parametrize("format", [None, "q4_1"])
def test_preempted_requests(format: str | None) -> None:
    model = tiny_model(hidden_size=64)
    if format is not None:
        quantize(model, format, progress=False)
    prompts = make_prompts((20, 9, 14, 18))
    expected = generate_alone(model, prompts, context=64)
    tight = make_engine(model, max_sequences=4, cache_tokens=64, context=64, max_batched_tokens=17)
    assert generate_crowded(tight, prompts, 0) == expected
    assert tight.scheduler.num_preemptions


def test_sampled_tokens_of_a_seed() -> None:
    """The tokens drawn with a seed are those of the request alone."""
    model = tiny_model()
    prompts = make_prompts(LENGTHS)
    params = [SamplingParams(max_tokens=8, temperature=1.0, seed=seed) for seed in range(5)]
    alone = make_engine(model, prefix_caching=False)
    expected = [
        alone.generate([prompt], one)[0].token_ids
        for prompt, one in zip(prompts, params, strict=True)
    ]
    together = make_engine(model, max_batched_tokens=11).generate(prompts, params)
    assert [one.token_ids for one in together] == expected
