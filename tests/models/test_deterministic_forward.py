"""A forward pass in deterministic mode, eager or compiled, gives the engine's log-probabilities."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="transformers builds the families' small models")

import fulgurite
from fulgurite.errors import ArgumentError
from fulgurite.kernels.gemm.dense_linear import use_dense_kernels
from fulgurite.models import CausalLM, load_model
from fulgurite.models.kv_cache import NoKVCache
from fulgurite.quantize import quantize
from fulgurite.serve.engine.request import SamplingParams
from tests.models.reference_models import build_reference, make_prompt
from tests.serve.engines import make_engine, tiny_model

PROMPT = make_prompt(19, 0).tolist()
NEW = 5


def build(name: str, path: object) -> CausalLM:
    layers = {} if name in ("qwen3_next", "lfm2") else {"num_hidden_layers": 2}
    build_reference(name, **layers).save_pretrained(path)
    return load_model(path)  # type: ignore[arg-type]


def generate(model: CausalLM, **options: object) -> tuple[Tensor, list[float]]:
    """Tokens of prompt and reply, and the log-probabilities of the reply in a crowded engine."""
    engine = make_engine(model, max_batched_tokens=7, max_sequences=3, **options)  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True, logprobs=0)
    result = engine.generate([PROMPT, make_prompt(9, 1).tolist()], params)[0]
    tokens = torch.tensor(PROMPT + list(result.token_ids))
    return tokens, [one.logprob for one in result.logprobs]


def score(logits: Tensor, tokens: Tensor) -> list[float]:
    """The log-probabilities of the last NEW tokens."""
    logprobs = logits[-NEW - 1 : -1].float().log_softmax(dim=-1)
    return logprobs.gather(1, tokens[-NEW:, None]).squeeze(1).tolist()


LATENT_AND_LINEAR = ["deepseek_v2", "deepseek_v3", "qwen3_next", "lfm2"]


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "mixtral", "gemma2", "gpt_oss", *LATENT_AND_LINEAR]
)
def test_forward_equals_the_engine(name: str, tmp_path) -> None:
    """Also of several sequences end to end, and of a batch."""
    model = build(name, tmp_path)
    tokens, expected = generate(model)
    positions, other = torch.arange(len(tokens)), torch.arange(4)
    segments = torch.tensor([0] * 4 + [1] * len(tokens))
    with fulgurite.deterministic():
        assert score(model(tokens, positions), tokens) == expected
        batch = model(tokens.expand(2, -1), positions.expand(2, -1))
        assert score(batch[1], tokens) == expected
        flat = model(torch.cat((other, tokens)), torch.cat((other, positions)), NoKVCache(segments))
        assert score(flat, tokens) == expected


@pytest.mark.parametrize("name", ["llama", "mixtral", "deepseek_v3", "qwen3_next"])
def test_compiled_forward_equals_the_engine(name: str, tmp_path) -> None:
    model = build(name, tmp_path)
    tokens, expected = generate(model)
    compiled = fulgurite.compile(model)
    with fulgurite.deterministic(), torch.no_grad():
        assert score(compiled(tokens, torch.arange(len(tokens))), tokens) == expected


@pytest.mark.parametrize("name", ["llama", *LATENT_AND_LINEAR[1:]])
def test_gradients_are_those_of_the_plain_forward(name: str, tmp_path) -> None:
    model = build(name, tmp_path).requires_grad_()
    use_dense_kernels(model)
    tokens = torch.tensor(PROMPT)
    gradients = []
    for enabled in (False, True):
        with fulgurite.deterministic(enabled), torch.enable_grad():
            loss = model(tokens, torch.arange(len(tokens))).log_softmax(dim=-1)[:, 3].sum()
        parameters = list(model.parameters())
        gradients.append(torch.autograd.grad(loss, parameters, materialize_grads=True))
    for plain, ours in zip(*gradients, strict=True):
        assert (plain - ours).abs().max() <= 2e-4 * (1 + plain.abs().max())


def test_quantized_weights_and_a_cache_of_another_dtype() -> None:
    model = tiny_model(hidden_size=64)
    quantize(model, "q4_1", progress=False)
    tokens, expected = generate(model, kv_dtype=torch.float16)
    cache = NoKVCache(kv_dtype=torch.float16)
    with fulgurite.deterministic(), torch.no_grad():
        assert score(model(tokens, torch.arange(len(tokens)), cache), tokens) == expected


def test_padding_is_refused() -> None:
    model = tiny_model()
    with fulgurite.deterministic(), pytest.raises(ArgumentError, match="positions 0, 1"):
        model(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 1]))
