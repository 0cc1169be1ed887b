"""The config.json fields of a model of a size: an architecture and a `Size` in, fields out.

Architectures name the same things differently (`n_routed_experts`, `num_experts`, `num_local_experts`).
`FIELDS` has what an architecture needs beside the fields that all share. One that is not in it is dense
and needs no more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """One position of the dial.

    Attributes:
        hidden_size, num_layers, num_heads, num_kv_heads, head_dim: of every layer.
        intermediate_size: of dense layers.
        num_experts, top_k, expert_size: of MoE layers; a shared expert has the same size.
        vocab_size: of a tokenizer that is trained.
        sequence_length, batch_size, steps: of training.
        learning_rate: the peak for AdamW.
        device_tokens: of a microbatch on a GPU.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    num_experts: int
    top_k: int
    expert_size: int
    vocab_size: int
    sequence_length: int
    batch_size: int
    steps: int
    learning_rate: float
    device_tokens: int = 65_536


def build_fields(architecture: str, size: Size, sequence_length: int) -> Fields:
    """The fields of config.json, without the vocabulary."""
    fields: Fields = {
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "head_dim": size.head_dim,
        "max_position_embeddings": max(2 * sequence_length, 1024),
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
    }
    more = FIELDS.get(architecture)
    return fields if more is None else {**fields, **more(size)}


def _grouped(size: Size) -> Fields:
    """DeepSeek-V3's experts: a dense layer first, a shared expert, a correction bias."""
    return {
        "n_routed_experts": size.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": size.top_k,
        "moe_intermediate_size": size.expert_size,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }


def _mla(size: Size) -> Fields:
    rotated = max(16, size.head_dim // 2)
    return {
        **_grouped(size),
        "num_key_value_heads": size.num_heads,
        "kv_lora_rank": max(16, size.hidden_size // 4),
        "q_lora_rank": None,
        "qk_nope_head_dim": size.head_dim,
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,  # for transformers, what RoPE rotates
        "v_head_dim": size.head_dim,
    }


def _deepseek_v2(size: Size) -> Fields:
    return {**_mla(size), "norm_topk_prob": False, "topk_method": "greedy"}


def _glm_lite(size: Size) -> Fields:
    return {**_mla(size), "q_lora_rank": size.hidden_size // 2}


def _named(size: Size) -> Fields:
    """Qwen's experts."""
    return {
        "num_experts": size.num_experts,
        "num_experts_per_tok": size.top_k,
        "moe_intermediate_size": size.expert_size,
        "norm_topk_prob": True,
    }


def _named_shared(size: Size) -> Fields:
    return {**_named(size), "shared_expert_intermediate_size": size.expert_size}


def _linear(size: Size) -> Fields:
    """Gated DeltaNets: as many key as attention heads."""
    return {
        "linear_num_key_heads": size.num_kv_heads,
        "linear_num_value_heads": size.num_heads,
        "linear_key_head_dim": size.head_dim,
        "linear_value_head_dim": size.head_dim,
    }


def _qwen3_next(size: Size) -> Fields:
    return {**_named_shared(size), **_linear(size)}


def _local(size: Size) -> Fields:
    """Mixtral's experts: no other MLPs."""
    return {
        "num_local_experts": size.num_experts,
        "num_experts_per_tok": size.top_k,
        "intermediate_size": size.expert_size,
    }


def _olmoe(size: Size) -> Fields:
    return {**_named(size), "intermediate_size": size.expert_size}


def _gpt_oss(size: Size) -> Fields:
    return {**_local(size), "sliding_window": 128}


def _granite(size: Size) -> Fields:
    return {"attention_multiplier": size.head_dim**-0.5}


def _granite_moe(size: Size) -> Fields:
    return {**_local(size), **_granite(size)}


def _granite_shared(size: Size) -> Fields:
    return {**_granite_moe(size), "shared_intermediate_size": size.expert_size}


def _granite_hybrid(size: Size) -> Fields:
    layers = ["full_attention"] * size.num_layers
    return {**_granite_shared(size), "layer_types": layers, "position_embedding_type": "rope"}


def _llama4(size: Size) -> Fields:
    return {**_local(size), "intermediate_size_mlp": size.intermediate_size}


def _ernie(size: Size) -> Fields:
    return {
        "moe_num_experts": size.num_experts,
        "moe_k": size.top_k,
        "moe_intermediate_size": size.expert_size,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    }


def _hunyuan(size: Size) -> Fields:
    return {
        "num_experts": size.num_experts,
        "moe_topk": size.top_k,
        "intermediate_size": size.expert_size,
    }


def _exaone_moe(size: Size) -> Fields:
    grouped = {name: value for name, value in _grouped(size).items() if name[:2] != "n_"}
    return {**grouped, "num_experts": size.num_experts, "n_group": 1, "num_shared_experts": 1}


def _phi_moe(size: Size) -> Fields:
    pairs = size.head_dim // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * pairs,
        "long_factor": [1.0] * pairs,
        "short_mscale": 1.0,
        "long_mscale": 1.0,
        "original_max_position_embeddings": 4096,
    }
    return {**_local(size), "num_experts_per_tok": 2, "rope_parameters": rope}


def _gemma(size: Size) -> Fields:
    return {"query_pre_attn_scalar": size.head_dim, "hidden_activation": "gelu_pytorch_tanh"}


def _cohere(size: Size) -> Fields:
    return {"logit_scale": 1.0}


def _windowed(size: Size, full: int, **more: Any) -> Fields:
    """Sliding windows, and layer `full` of each four without one. Readers disagree on defaults."""
    kinds = [
        "full_attention" if i % 4 == full else "sliding_attention" for i in range(size.num_layers)
    ]
    return {"layer_types": kinds, "sliding_window": 4096, **more}


ROPE: Fields = {"rope_type": "default", "rope_theta": 10_000.0}


def _cwm(size: Size) -> Fields:
    return _windowed(size, full=0, rope_parameters=ROPE)


def _exaone4(size: Size) -> Fields:
    return _windowed(size, full=3)


def _olmo3(size: Size) -> Fields:
    ropes = {"full_attention": ROPE, "sliding_attention": ROPE}
    return _windowed(size, full=3, rope_parameters=ropes)


def _lfm2(size: Size) -> Fields:
    kinds = ["full_attention" if index % 3 == 2 else "conv" for index in range(size.num_layers)]
    return {"layer_types": kinds, "block_auto_adjust_ff_dim": False}


FIELDS: dict[str, Callable[[Size], Fields]] = {
    "Dots1ForCausalLM": _grouped,
    "DeepseekV2ForCausalLM": _deepseek_v2,
    "DeepseekV3ForCausalLM": _mla,
    "Glm4MoeForCausalLM": _grouped,
    "Glm4MoeLiteForCausalLM": _glm_lite,
    "SolarOpenForCausalLM": _grouped,
    "Qwen2MoeForCausalLM": _named_shared,
    "Qwen3MoeForCausalLM": _named,
    "Qwen3VLMoeForConditionalGeneration": _named,
    "Qwen3NextForCausalLM": _qwen3_next,
    "Qwen3_5ForCausalLM": _linear,
    "Qwen3_5ForConditionalGeneration": _linear,
    "Qwen3_5MoeForCausalLM": _qwen3_next,
    "Qwen3_5MoeForConditionalGeneration": _qwen3_next,
    "OlmoeForCausalLM": _olmoe,
    "MixtralForCausalLM": _local,
    "MiniMaxM2ForCausalLM": _local,
    "GptOssForCausalLM": _gpt_oss,
    "GraniteForCausalLM": _granite,
    "GraniteMoeForCausalLM": _granite_moe,
    "GraniteMoeSharedForCausalLM": _granite_shared,
    "GraniteMoeHybridForCausalLM": _granite_hybrid,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _llama4,
    "PhimoeForCausalLM": _phi_moe,
    "PhiMoEForCausalLM": _phi_moe,
    "Ernie4_5_MoeForCausalLM": _ernie,
    "HunYuanMoEV1ForCausalLM": _hunyuan,
    "ExaoneMoeForCausalLM": _exaone_moe,
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": _gemma,
    "Gemma3ForCausalLM": _gemma,
    "Gemma3ForConditionalGeneration": _gemma,
    "CohereForCausalLM": _cohere,
    "CwmForCausalLM": _cwm,
    "Exaone4ForCausalLM": _exaone4,
    "Olmo3ForCausalLM": _olmo3,
    "Cohere2ForCausalLM": _cohere,
    "Lfm2ForCausalLM": _lfm2,
}
