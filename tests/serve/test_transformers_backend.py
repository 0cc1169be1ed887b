"""The engine over transformers' modules: the tokens of transformers' own `generate`."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="its modules are tested")

from fulgurite.errors import ArgumentError
from fulgurite.models import load_model, open_checkpoint
from fulgurite.models.loading.loader import build_meta_model
from fulgurite.plan.limits import make_engine_limits
from fulgurite.plan.memory import plan_memory, weight_bytes
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import SamplingParams
from fulgurite.serve.llm import LLM
from tests.models.transformers_backend.checkpoints import (
    CASES,
    VOCAB_SIZE,
    build_module,
    write_checkpoint,
)
from tests.serve.engines import check_idle
from tests.serve.tiny_checkpoint import VOCABULARY, byte_tokenizer

CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=3)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def make_prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in lengths]


def make_engine(folder, *, cache_tokens: int | None = None, compile: bool = False) -> Engine:
    """An engine with small steps, so that prompts are chunked; few blocks mean preemptions."""
    checkpoint = open_checkpoint(folder, "transformers")
    meta = build_meta_model(checkpoint, torch.float32, keep_quantized=True)
    limits = make_engine_limits(
        meta.config.max_positions,
        torch.float32,
        context=72,
        max_sequences=3,
        max_batched_tokens=11,
        cache_tokens=cache_tokens,
        block_size=4,
    )
    model = load_model(folder, implementation="transformers")
    if compile:
        model.compile_decoder()
    return Engine(model, None, plan_memory(meta, limits, CPU, available=1 << 30))


def generate_reference(module, prompt: list[int]) -> list[int]:
    """Greedy tokens of transformers, with its own cache."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": PARAMS.max_tokens, "do_sample": False, "eos_token_id": None}
    return module.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()


@pytest.mark.parametrize("case", list(CASES))
def test_tokens_and_logprobs_equal_transformers(case, tmp_path):
    """Five requests at once, chunked prefill, preemptions: three run at a time in few blocks."""
    module = build_module(case)
    engine = make_engine(write_checkpoint(module, tmp_path), cache_tokens=80)
    prompts = make_prompts(1, 40, 13, 25, 12)
    results = engine.generate(prompts, PARAMS)
    for prompt, result in zip(prompts, results, strict=True):
        ids = prompt + result.token_ids
        assert ids == generate_reference(module, prompt)
        logits = module(input_ids=torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        expected = logits[range(len(prompt) - 1, len(ids) - 1), result.token_ids]
        actual = torch.tensor([one.logprob for one in result.logprobs])
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)
    check_idle(engine)


def test_compiled_decoder_gives_the_same_tokens_from_one_graph(tmp_path):
    module = build_module("gpt_neox")
    engine = make_engine(write_checkpoint(module, tmp_path), compile=True)
    prompts = make_prompts(19, 5)
    for prompt, result in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
        assert prompt + result.token_ids == generate_reference(module, prompt)
    alone = engine.generate(prompts[:1], PARAMS)[0]  # decode steps of one token
    assert prompts[0] + alone.token_ids == generate_reference(module, prompts[0])
    compiled = engine.model.compiled_decoder
    assert len(compiled.graphs) == 1 and not compiled.breaks
    assert "transformers" in str(engine.runner.no_capture_reason)


def test_plan_counts_the_copies_of_a_compiled_decoder(tmp_path):
    folder = write_checkpoint(build_module("gpt_neox"), tmp_path)
    model = load_model(folder, implementation="transformers")
    plain = weight_bytes(model, CPU)
    linears = sum(
        module.weight.nbytes
        for name, module in model.decoder.named_modules()
        if isinstance(module, torch.nn.Linear)
    )
    model.compile_decoder()
    assert weight_bytes(model, CPU) == plain  # a deterministic engine runs linears in its kernels
    model.compile_decoder(packs_linears=True)
    assert weight_bytes(model, CPU) == plain + linears


def test_llm_plans_loads_and_generates_text(tmp_path):
    module = build_module("gpt2", vocab_size=VOCABULARY)
    folder = write_checkpoint(module, tmp_path)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    with LLM(folder, implementation="transformers", compile=False, device="cpu") as llm:
        result = llm.generate("a cold day", SamplingParams(max_tokens=5, ignore_eos=True))[0]
        assert llm.plan.weights == sum(one.nbytes for one in llm.model.parameters())
    assert (
        result.prompt_ids + result.token_ids == generate_reference(module, result.prompt_ids)[:-9]
    )


def test_ranks_and_quantize_are_refused(tmp_path):
    folder = write_checkpoint(build_module("gpt2"), tmp_path)
    with pytest.raises(ArgumentError, match="runs on one rank"):
        LLM(folder, implementation="transformers", tensor=2)
    with pytest.raises(ArgumentError, match="not quantized on load"):
        LLM(folder, implementation="transformers", quantize="q8_0")


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_gpu_captures_decode_steps_and_gives_the_same_tokens(compile, tmp_path):
    module = build_module("gpt_neox").cuda()
    folder = write_checkpoint(module, tmp_path)
    with LLM(folder, implementation="transformers", device="cuda", compile=compile) as llm:
        prompts = make_prompts(19, 5)
        for prompt, result in zip(prompts, llm.generate(prompts, PARAMS), strict=True):
            ids = torch.tensor([prompt], device="cuda")
            options = {"max_new_tokens": PARAMS.max_tokens, "do_sample": False}
            wanted = module.generate(
                ids, attention_mask=torch.ones_like(ids), eos_token_id=None, **options
            )
            assert prompt + result.token_ids == wanted[0].tolist()
        assert llm.stats().no_capture_reason is None and llm.stats().captured_steps
