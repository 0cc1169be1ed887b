"""deterministic=True on a GPU: a request's tokens and log-probabilities are the same bits in any batch.

Each request alone, its whole prompt in one step, in captured decode steps. Then the same requests in
random order, with small steps of several sizes (chunked prefill), cached prefixes, preemptions, and
with CUDA graphs and without. And the forward pass of the same model, without a cache.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.models import CausalLM
from fulgurite.models.config import ConfigFields
from fulgurite.models.families.deepseek import DEEPSEEK_V3
from fulgurite.models.families.llama import LLAMA
from fulgurite.models.families.qwen3_next import QWEN3_NEXT
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.models.loading.loader import build_random_model
from fulgurite.serve.engine.engine import Engine
from fulgurite.serve.engine.request import SamplingParams, TokenLogprob
from tests.serve.engines import make_engine

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
VOCAB, NEW = 97, 5
PARAMS = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=2)
LENGTHS = (
    1,
    5,
    70,
    131,
)  # MLA expands keys from 32 new tokens on, linear attention in blocks of 64

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
# the first layer is dense, the second has experts, routed and shared
DEEPSEEK = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 48,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
HYBRID = {
    **SIZES,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}
# family, fields, dtype, options of the engine
MODELS: dict[str, tuple[Any, dict[str, Any], torch.dtype, dict[str, Any]]] = {
    "mla": (DEEPSEEK_V3, DEEPSEEK, torch.bfloat16, {}),
    "mla_fp8_cache": (DEEPSEEK_V3, DEEPSEEK, torch.bfloat16, {"kv_dtype": torch.float8_e4m3fn}),
    "hybrid": (QWEN3_NEXT, HYBRID, torch.bfloat16, {}),
    "float32": (LLAMA, SIZES, torch.float32, {}),
}


def build(name: str) -> tuple[CausalLM, dict[str, Any]]:
    family, fields, dtype, options = MODELS[name]
    config = family.read_config(ConfigFields(dict(fields), "a test"))
    model = build_random_model(config, family, dtype=dtype, std=0.2)
    return model.to(DEVICE), {"context": 192, "block_size": 16, "deterministic": True, **options}


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    prompts = [rng.choices(range(VOCAB), k=length) for length in LENGTHS]
    return [*prompts, prompts[3][:50] + prompts[1]]  # the last one shares a prefix


def generate_alone(model: CausalLM, options: dict[str, Any]) -> list[list[TokenLogprob]]:
    """The result of each prompt by itself in a fresh cache."""
    engine = make_engine(model, max_batched_tokens=192, prefix_caching=False, **options)
    results = [list(engine.generate([one], PARAMS)[0].logprobs) for one in make_prompts()]
    assert engine.runner.no_capture_reason is None and engine.runner.captured_steps
    assert len({str(one) for one in results}) == len(results)  # not trivially equal
    return results


def generate_crowded(engine: Engine, seed: int) -> list[list[TokenLogprob]]:
    """The results of the prompts in random order, some started while others run."""
    rng, prompts = random.Random(seed), make_prompts()
    waiting, requests = rng.sample(range(len(prompts)), len(prompts)), {}
    while waiting or engine.has_unfinished_requests:
        for _ in range(rng.randint(0, 2)):
            if waiting:
                index = waiting.pop()
                requests[index] = engine.add_request(prompts[index], PARAMS)
        engine.step()
    return [list(requests[index].logprobs) for index in range(len(prompts))]


@pytest.mark.parametrize("name", list(MODELS))
def test_requests_in_any_batch(name: str) -> None:
    model, options = build(name)
    expected = generate_alone(model, options)
    for tokens, captured in ((13, True), (75, False)):
        engine = make_engine(model, max_batched_tokens=tokens, max_sequences=4, **options)
        if not captured:
            engine.runner.no_capture_reason = "a test"
        for seed in range(2):  # the second time prefixes are cached
            assert generate_crowded(engine, seed) == expected, (tokens, captured, seed)
    few_blocks = {"context": 144, "cache_tokens": 144, "block_size": 4}  # for prompts, not replies
    tight = make_engine(model, max_batched_tokens=90, max_sequences=4, **{**options, **few_blocks})
    order = (2, 4, 1, 0)
    results = tight.generate([make_prompts()[index] for index in order], PARAMS)
    assert [list(one.logprobs) for one in results] == [expected[index] for index in order]
    assert tight.scheduler.num_preemptions


def score(logits: Tensor, tokens: Tensor) -> list[float]:
    """The log-probabilities of the last NEW tokens; every row at an address of its own."""
    rows = [row.float().clone().log_softmax(dim=-1) for row in logits[-NEW - 1 : -1]]
    return torch.stack(rows).gather(1, tokens[-NEW:, None])[:, 0].tolist()


@pytest.mark.parametrize("name", ["mla", "mla_fp8_cache", "hybrid", "float32"])
def test_forward_equals_the_engine(name: str) -> None:
    """With a gradient and without, alone and behind another sequence."""
    model, options = build(name)
    logprobs = generate_alone(model, options)[3]
    model.requires_grad_()
    tokens = torch.tensor(make_prompts()[3] + [one.token_id for one in logprobs], device=DEVICE)
    positions, other = (torch.arange(n, device=DEVICE) for n in (len(tokens), 9))
    segments = torch.tensor([0] * len(other) + [1] * len(tokens), device=DEVICE)
    expected = [one.logprob for one in logprobs]
    kv_dtype = options.get("kv_dtype")
    for enabled in (False, True):
        with fulgurite.deterministic(), torch.set_grad_enabled(enabled):
            alone = model(tokens, positions, NoKVCache(kv_dtype=kv_dtype))
            assert score(alone.detach(), tokens) == expected
            ids, places = torch.cat((other, tokens)), torch.cat((other, positions))
            both = model(ids, places, NoKVCache(segments, kv_dtype))
            assert score(both.detach(), tokens) == expected
    with torch.enable_grad():
        loss = both.float().square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("name", ["mla", "hybrid"])
def test_compiled_forward_equals_the_engine(name: str) -> None:
    model, options = build(name)
    logprobs = generate_alone(model, options)[3]
    tokens = torch.tensor(make_prompts()[3] + [one.token_id for one in logprobs], device=DEVICE)
    compiled = fulgurite.compile(model)
    with fulgurite.deterministic(), torch.no_grad():
        logits = compiled(tokens, torch.arange(len(tokens), device=DEVICE))
    assert score(logits, tokens) == [one.logprob for one in logprobs]


# ---- modules of transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gpt_neox", "gpt2"])
def test_modules_of_transformers(case: str, tmp_path) -> None:
    pytest.importorskip("transformers", reason="its modules are tested")
    from tests.models.transformers_backend.checkpoints import build_module, write_checkpoint

    folder = write_checkpoint(build_module(case).to(torch.bfloat16), tmp_path)
    rng = random.Random(1)
    prompts = [rng.choices(range(VOCAB), k=length) for length in (1, 7, 40, 66)]
    options: dict[str, Any] = {
        "implementation": "transformers", "deterministic": True, "device": DEVICE, "context": 80,
    }  # fmt: skip
    with fulgurite.LLM(folder, max_batched_tokens=96, **options) as llm:
        expected = [llm.generate([prompt], PARAMS)[0].logprobs for prompt in prompts]
        assert llm.stats().no_capture_reason is None and llm.stats().captured_steps
    with fulgurite.LLM(folder, max_batched_tokens=11, max_sequences=3, **options) as llm:
        for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
            results = llm.generate([prompts[index] for index in order], PARAMS)
            assert [one.logprobs for one in results] == [expected[index] for index in order]


def test_a_module_without_an_invariant_kernel_is_named() -> None:
    pytest.importorskip("transformers", reason="its modules are tested")
    from fulgurite.models.transformers_backend.invariant_ops import InvariantOps

    class Scan(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(0)

    with InvariantOps(), pytest.raises(ArgumentError, match=r"Scan calls aten\.cumsum"):
        Scan()(torch.ones(3, device=DEVICE))
