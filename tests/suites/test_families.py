"""Tiny random models, compiled against eager, forward and backward.

In float32, logits, parameter gradients and buffers equal eager's. In bfloat16, their error against float64
is at most twice eager's. Weights have a standard deviation of 0.3: with the usual 0.02, a wrong router or
norm would not be noticed.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch._dynamo
import transformers
from torch import Tensor, nn

import fulgurite
from tests.suites.comparison import assert_same_metadata, relative_error

TORCH, FUSER = ["torch"], ["fuser", "torch"]  # the suite runs with each
# in the normal run; all of them with -m slow
FUSED = ("llama", "convolutional")
# Each mechanism in one dtype: latent attention and routed experts, sinks, norms, encoder and decoder, no
# attention. Of families whose parts are in others (qwen3 in qwen3_moe, mixtral in both) none.
BFLOAT16 = ("deepseek_v3", "gpt_oss", "gemma3", "t5", "lstm")
FLOAT32 = (
    *("llama", "qwen3_moe", "deepseek_v2", "llama4", "bert", "gpt2", "whisper"),
    "convolutional",  # its norms' buffers are compared
)
VOCABULARY = 61
BATCH, LENGTH = 2, 9

COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "experts_implementation": "batched_mm",
}
LATENT = {
    **EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
}
# family → transformers' configuration and model class, and the fields that are its own
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 12}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**EXPERTS, "head_dim": 12, "num_experts": 6, "norm_topk_prob": True},
    ),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {"num_local_experts": 4, "sliding_window": 5, "experts_implementation": "batched_mm"},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**LATENT, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "experts_implementation": "batched_mm",
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "intermediate_size_mlp": 40,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 4,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "head_dim": 8,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "bert": ("BertConfig", "BertForMaskedLM", {}),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {}),
}


@dataclass
class Family:
    """A model in float32, and its inputs."""

    model: nn.Module
    inputs: dict[str, Any]

    def to(self, dtype: torch.dtype) -> Family:
        inputs = {key: _cast(value, dtype) for key, value in self.inputs.items()}
        return Family(copy.deepcopy(self.model).to(dtype), inputs)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if floating else value


def _tokens(length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def decoder(name: str, **more: Any) -> Family:
    config_class, model_class, fields = DECODERS[name]
    config = getattr(transformers, config_class)(**{**COMMON, **fields, **more})
    model = getattr(transformers, model_class)(config).eval()
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0  # padding on the right
    return Family(model, {"input_ids": _tokens(), "attention_mask": mask})


def t5() -> Family:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=40,
        num_layers=1,
        num_heads=4,
        feed_forward_proj="gated-gelu",
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    return Family(model, {"input_ids": _tokens(), "decoder_input_ids": _tokens(5)})


def whisper() -> Family:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=40,
        decoder_ffn_dim=40,
        max_source_positions=10,
        max_target_positions=16,
        init_std=0.3,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    inputs = {"input_features": torch.randn(BATCH, 8, 20), "decoder_input_ids": _tokens(5)}
    return Family(model, inputs)


class ConvolutionalNet(nn.Module):
    """Convolutions, batch norm in training mode, pooling, a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.second_norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        hidden = torch.relu(self.first_norm(self.first(image)))
        hidden = torch.max_pool2d(hidden, 2)
        hidden = torch.relu_(self.second_norm(self.second(hidden)) + hidden)
        return self.head(hidden.mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """A bidirectional LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.lstm = nn.LSTM(12, 10, bidirectional=True, batch_first=True)
        self.head = nn.Linear(20, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(input_ids))
        return self.head(hidden)


FAMILIES: dict[str, Callable[[], Family]] = {
    **{name: lambda name=name: decoder(name) for name in DECODERS},  # type: ignore[misc]
    "t5": t5,
    "whisper": whisper,
    "convolutional": lambda: Family(
        ConvolutionalNet().train(), {"image": torch.randn(4, 3, 17, 17)}
    ),
    "lstm": lambda: Family(Recurrent().train(), {"input_ids": _tokens(5)}),
}


def cases(names: Iterable[str], sample: Iterable[str] | None = None) -> Any:
    """Each family with the torch executor, and with the fuser before it.

    `sample` are the families that run with the torch executor in the normal run, by default all.
    """
    pairs: list[Any] = []
    for executors, normal in ((TORCH, names if sample is None else sample), (FUSER, FUSED)):
        for name in names:
            marks = () if name in normal else pytest.mark.slow
            pairs.append(pytest.param(name, executors, marks=marks))
    labels = [f"{name}-{kind}" for kind in ("torch", "fuser") for name in names]
    return pytest.mark.parametrize(("name", "executors"), pairs, ids=labels)


@dataclass
class Result:
    logits: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]

    @property
    def results(self) -> dict[str, Tensor]:
        return {"logits": self.logits}


def run(family: Family, call: Callable[..., Any] | None = None) -> Result:
    """Logits, gradients of a randomly weighted sum of them, and buffers afterwards."""
    model = family.model
    model.zero_grad()
    output = (call or model)(**family.inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7))
    (logits * weights.to(logits.dtype)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return Result(logits.detach(), gradients, {n: b.clone() for n, b in model.named_buffers()})


@pytest.fixture(autouse=True)
def _capture_lstm():
    """Let TorchDynamo trace LSTMs, which run in eager mode by default."""
    with torch._dynamo.config.patch(allow_rnn=True):
        yield


def close(ours: Result, eager: Result, exact: Callable[[], Result]) -> None:
    """Assert equality within float32 rounding, relative to each tensor's largest entry.

    If that fails, float64 decides: our error may be twice eager's. A gradient that is zero except for
    rounding (a bias before a norm or a softmax) is compared with the size of the other gradients, whose
    terms cancel in it.
    """
    for what in ("results", "gradients", "buffers"):
        values, expected = getattr(ours, what), getattr(eager, what)
        assert values.keys() == expected.keys(), set(values) ^ set(expected)
        largest = max((size(want) for want in expected.values()), default=0.0)
        for name, want in expected.items():
            value = values[name]
            assert_same_metadata(value, want, strides=False)
            atol = 1e-5 * max(size(want), 1e-3)
            if torch.allclose(value, want, rtol=1.3e-6, atol=atol, equal_nan=True):
                continue
            wide = getattr(exact(), what)[name]
            error, bound = size(value - wide), 2 * size(want - wide)
            if size(wide) < 1e-12 * largest:
                bound = 1e-6 * largest
            assert error <= bound, f"{name}: error {error:.3g}, allowed {bound:.3g}"


def size(tensor: Tensor) -> float:
    """The largest entry."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def check_float32(family: Family, executors: list[str], granularity: str) -> Any:
    ours = Family(copy.deepcopy(family.model), family.inputs)
    wide = family.to(torch.float64)
    expected = run(family)
    compiled: Any = fulgurite.compile(ours.model, executors=executors, granularity=granularity)
    result = run(ours, compiled)
    close(result, expected, functools.cache(lambda: run(wide)))
    assert compiled.graphs, "nothing was compiled"
    assert any("backward" in record.compiled_graphs for record in compiled.graphs), "no backward"
    return compiled


@cases(FAMILIES, sample=FLOAT32)
def test_float32_matches_eager(name: str, executors: list[str]) -> None:
    compiled = check_float32(FAMILIES[name](), executors, "model")
    assert not compiled.breaks, [str(found) for found in compiled.breaks]


@cases(["llama", "bert"], sample=["llama"])
def test_blocks_match_eager(name: str, executors: list[str]) -> None:
    """Four equal layers, compiled once."""
    compiled = check_float32(decoder(name, num_hidden_layers=4), executors, "blocks")
    queries = re.compile("q_proj|query")
    layers = [graph for graph in compiled.graphs if queries.search(str(graph.captured))]
    assert len(layers) == 1, "four equal layers are one graph, whatever is around them"


@pytest.mark.parametrize(
    "executors", [TORCH, pytest.param(FUSER, marks=pytest.mark.slow)], ids="-".join
)
def test_experts_routed_in_python(executors: list[str]) -> None:
    """Looping over the experts that were hit depends on data: the graph breaks, the answer is right."""
    family = decoder("mixtral", experts_implementation="eager")
    compiled = check_float32(family, executors, "model")
    assert compiled.breaks


@cases(FAMILIES, sample=BFLOAT16)
def test_bfloat16_error_is_at_most_twice_that_of_eager(name: str, executors: list[str]) -> None:
    family = FAMILIES[name]()
    exact = run(family.to(torch.float64))
    eager = run(family.to(torch.bfloat16))
    ours = family.to(torch.bfloat16)
    compiled: Any = fulgurite.compile(ours.model, executors=executors, granularity="model")
    result = run(ours, compiled)
    assert compiled.graphs, "nothing was compiled"
    assert not compiled.breaks, [str(found) for found in compiled.breaks]
    assert_same_metadata(result.logits, eager.logits)
    for what, values in {
        "logits": lambda r: [r.logits],
        "gradients": lambda r: [r.gradients[n] for n in sorted(exact.gradients)],
    }.items():
        error = relative_error(values(result), values(exact))
        bound = 2 * relative_error(values(eager), values(exact))
        assert error <= bound, f"{what}: error {error:.3g}, twice eager's is {bound:.3g}"
