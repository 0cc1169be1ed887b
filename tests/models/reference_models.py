"""One small random model per family, in transformers (the reference) and here, from the same files.

Weights have a standard deviation of 0.3, so that every part matters. Parameters that transformers
initializes to zeros or ones (norms, biases, router corrections) are random, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from fulgurite.models import CausalLM, ContiguousKVCache
from tests.models.more_cases import MORE_CASES

VOCAB_SIZE = 97
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
MLA_FIELDS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 160,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 5.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16.0,
        "beta_slow": 1.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
    },
}


def rope_fields(kind: str, theta: float = 10_000.0, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


TEXT_CONFIGS = ("Gemma3", "Llama4", "Qwen3_5", "Qwen3_5Moe")  # the text part of a larger model
# name -> class prefix in transformers, fields in addition to COMMON
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": (
        "Llama",
        {
            "tie_word_embeddings": True,
            **rope_fields(
                "llama3",
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
    ),
    "llama_linear": ("Llama", rope_fields("linear", factor=3.0)),
    "llama_dynamic": (
        "Llama",
        {"max_position_embeddings": 24, **rope_fields("dynamic", factor=2.0)},
    ),
    "llama_yarn": ("Llama", rope_fields("yarn", theta=5000.0, **YARN)),
    "mistral": ("Mistral", {"sliding_window": 7, "head_dim": 20}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 24, "attention_bias": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 20,
            "sliding_window": 6,
            "query_pre_attn_scalar": 11,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 20,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 11,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            "original_max_position_embeddings": 48,
            "sliding_window": 50,
            **rope_fields(
                "longrope",
                short_factor=[1.0, 1.1, 1.3, 1.7],
                long_factor=[1.0, 2.0, 4.0, 8.0],
                partial_rotary_factor=0.5,
            ),
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 10,
            **rope_fields("default", partial_rotary_factor=0.25),
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 20,
            **rope_fields(
                "default",
                partial_rotary_factor=0.5,
                mrope_section=[2, 2, 2],
                mrope_interleaved=True,
            ),
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            "head_dim": 24,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 10,
            "linear_value_head_dim": 8,
            **rope_fields("default", partial_rotary_factor=0.25, mrope_section=[1, 1, 1]),
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "conv_bias": True,
            "conv_L_cache": 3,
            "block_multiple_of": 8,
            "pad_token_id": 0,
        },
    ),
    "qwen3_moe_unnormed": (
        "Qwen3Moe",
        {
            "head_dim": 24,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {**MLA_FIELDS, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "deepseek_v2_lite": (
        "DeepseekV2",
        {**MLA_FIELDS, "q_lora_rank": None, "topk_method": "greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {**MLA_FIELDS, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    ),
    "llama4": (
        "Llama4",
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 8,
            "floor_scale": 5,
            "attn_scale": 0.3,
            **rope_fields("default", theta=20_000.0),
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "head_dim": 16,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 7,
            "swiglu_limit": 3.0,
            **rope_fields("yarn", theta=150_000.0, truncate=False, **YARN),
        },
    ),
}


@dataclass(frozen=True)
class ModelPair:
    """A reference model and our model with the same weights."""

    name: str
    reference: nn.Module
    model: CausalLM
    path: Path


def randomize(model: nn.Module, generator: torch.Generator) -> None:
    """Randomize parameters that are initialized to zero or one."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in state.items():
        is_norm = "norm" in name and name.endswith("weight")
        if is_norm or "bias" in name or name.endswith("sinks"):
            noise = 0.3 * torch.randn(tensor.shape, generator=generator)
            tensor.data.copy_(tensor.data + noise if is_norm else noise * 3)
        if name.endswith("A_log"):
            # Rates near 1: float32 sums of large rates make transformers' chunked form inexact.
            tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=generator))


def build_reference(name: str, **overrides: object) -> nn.Module:
    """The transformers model of a case, with some fields overridden."""
    prefix, fields = (CASES | MORE_CASES)[name]
    if not hasattr(transformers, prefix + "ForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} does not have {prefix}")
    suffix = "TextConfig" if prefix in TEXT_CONFIGS else "Config"
    config = getattr(transformers, prefix + suffix)(**{**COMMON, **fields, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, prefix + "ForCausalLM")(config).eval()
    randomize(model, torch.Generator().manual_seed(1))
    if prefix == "Phimoe":
        use_long_factors(model)
    assert isinstance(model, nn.Module)
    return model


def use_long_factors(model: nn.Module) -> None:
    """Give the sequence length to Phi-MoE's rotary embedding.

    transformers 5 forgets it, so long sequences would get the short factors and the long mscale.
    """
    rotary: Any = model.model.rotary_emb
    compute = rotary.rope_init_fn

    def pass_length(module: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        positions = named["position_ids"] if "position_ids" in named else arguments[1]
        length = int(positions.max()) + 1
        module.rope_init_fn = lambda config, *_, **__: compute(config, seq_len=length)

    rotary.register_forward_pre_hook(pass_length, with_kwargs=True)


def make_prompt(length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator)


def greedy_cached(model: CausalLM, prompts: list[Tensor], num_tokens: int) -> list[list[int]]:
    """Greedy continuations of prompts of different lengths in one right-padded batch, with a cache.

    If a sequence must be recomputed (LongRoPE), the whole batch is.
    """
    sequences = [ids.tolist() for ids in prompts]
    prompt_lengths = [len(sequence) for sequence in sequences]
    logits, cache = _prefill(model, sequences, max(prompt_lengths) + num_tokens)
    for _ in range(num_tokens):
        next_ids = logits.argmax(dim=-1)
        for sequence, token in zip(sequences, next_ids.tolist(), strict=True):
            sequence.append(token)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        if model.recompute_after is not None and (lengths == model.recompute_after + 1).any():
            logits, cache = _prefill(model, sequences, max(prompt_lengths) + num_tokens)
        else:
            logits = model(next_ids[:, None], lengths[:, None] - 1, cache)[:, 0]
    return [sequence[start:] for sequence, start in zip(sequences, prompt_lengths, strict=True)]


def _prefill(
    model: CausalLM, sequences: list[list[int]], capacity: int
) -> tuple[Tensor, ContiguousKVCache]:
    longest = max(len(ids) for ids in sequences)
    cache = ContiguousKVCache(model.attention_specs, len(sequences), capacity)
    ids_BT = torch.zeros(len(sequences), longest, dtype=torch.long)
    positions_BT = torch.full((len(sequences), longest), -1)
    for row, ids in enumerate(sequences):
        ids_BT[row, : len(ids)] = torch.tensor(ids)
        positions_BT[row, : len(ids)] = torch.arange(len(ids))
    logits = model(ids_BT, positions_BT, cache)
    lengths = torch.tensor([len(ids) for ids in sequences])
    return logits[torch.arange(len(sequences)), lengths - 1], cache


def greedy_uncached(model: CausalLM, ids: Tensor, num_tokens: int) -> list[int]:
    """Greedy continuation without a cache: runs the whole sequence for each token."""
    start = len(ids)
    for _ in range(num_tokens):
        logits = model.compute_hidden_states(ids[None], torch.arange(len(ids))[None])[:, -1]
        ids = torch.cat((ids, model.compute_logits(logits).argmax(dim=-1)))
    return ids[start:].tolist()


def logits_reference(model: nn.Module, ids: Tensor) -> Tensor:
    """Logits [T, O]. A short run first resets the sequence length that dynamic RoPE remembers."""
    model(ids[None, :1])
    logits: Tensor = model(ids[None]).logits[0]
    return logits


def greedy_reference(
    model: nn.Module, ids: Tensor, num_tokens: int, use_cache: bool = True
) -> list[int]:
    out = model.generate(  # type: ignore[operator]
        ids[None],
        attention_mask=torch.ones_like(ids)[None],
        do_sample=False,
        max_new_tokens=num_tokens,
        use_cache=use_cache,
    )
    return out[0, len(ids) :].tolist()
