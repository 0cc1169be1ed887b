"""Presets: configurations of well-known models by name.

In: a name such as `deepseek-v3` or `deepseek-ai/DeepSeek-V3`. Out: its family and `ModelConfig`,
without any file. Used to plan memory and to build random weights of a real shape. Presets hold the
config.json fields that define shapes.
"""

from __future__ import annotations

import difflib

from fulgurite.errors import ArgumentError
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.more_presets import FP8, MORE_PRESETS, ConfigValues
from fulgurite.models.families.more_presets import dense as _dense
from fulgurite.models.families.registry import find_family

MXFP4 = {"quant_method": "mxfp4"}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEEPSEEK_ROPE = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}


def _llama3(
    hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int, **fields: object
) -> ConfigValues:
    defaults: dict[str, object] = {
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA_3_ROPE,
    }
    sizes = (hidden_size, num_layers, num_heads, 8, intermediate_size)
    return {**_dense("LlamaForCausalLM", *sizes), **defaults, **fields}


def _qwen3(
    hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int, **fields: object
) -> ConfigValues:
    defaults: dict[str, object] = {
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
    }
    sizes = (hidden_size, num_layers, num_heads, 8, intermediate_size)
    return {**_dense("Qwen3ForCausalLM", *sizes), **defaults, **fields}


def _qwen3_moe(
    hidden_size: int, num_layers: int, num_heads: int, num_kv_heads: int, intermediate_size: int
) -> ConfigValues:
    return {
        **_qwen3(hidden_size, num_layers, num_heads, 0),
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": num_kv_heads,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": intermediate_size,
        "norm_topk_prob": True,
    }


def _gemma3(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    **fields: object,
) -> ConfigValues:
    defaults: dict[str, object] = {
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    }
    sizes = (hidden_size, num_layers, num_heads, num_kv_heads, intermediate_size)
    return {**_dense("Gemma3ForCausalLM", *sizes), **defaults, **fields}


def _mixtral(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    vocab_size: int,
    max_positions: int,
) -> ConfigValues:
    return _dense(
        "MixtralForCausalLM", hidden_size, num_layers, num_heads, 8, intermediate_size,
        vocab_size=vocab_size, max_position_embeddings=max_positions, num_local_experts=8,
        num_experts_per_tok=2,
    )  # fmt: skip


def _deepseek(
    version: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    intermediate_size: int,
    moe: ConfigValues,
    **fields: object,
) -> ConfigValues:
    defaults: dict[str, object] = {
        "vocab_size": 102_400,
        "max_position_embeddings": 163_840,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "rope_scaling": DEEPSEEK_ROPE,
        **moe,
    }
    sizes = (hidden_size, num_layers, num_heads, num_heads, intermediate_size)
    return {**_dense(f"DeepseekV{version}ForCausalLM", *sizes), **defaults, **fields}


def _deepseek_moe(
    num_experts: int,
    top_k: int,
    intermediate_size: int,
    num_shared_experts: int,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> ConfigValues:
    return {
        "n_routed_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": intermediate_size,
        "n_shared_experts": num_shared_experts,
        "n_group": num_groups,
        "topk_group": topk_groups,
    }


def _llama4(num_experts: int, moe_layer_step: int, max_positions: int) -> ConfigValues:
    return _dense(
        "Llama4ForCausalLM", 5120, 48, 40, 8, 8192, head_dim=128, vocab_size=202_048,
        max_position_embeddings=max_positions, intermediate_size_mlp=16_384,
        num_local_experts=num_experts, num_experts_per_tok=1,
        interleave_moe_layer_step=moe_layer_step, attention_chunk_size=8192,
    )  # fmt: skip


def _gpt_oss(num_layers: int, num_experts: int) -> ConfigValues:
    return _dense(
        "GptOssForCausalLM", 2880, num_layers, 64, 8, 2880, head_dim=64, vocab_size=201_088,
        max_position_embeddings=131_072, num_local_experts=num_experts, num_experts_per_tok=4,
        sliding_window=128, quantization_config=MXFP4,
    )  # fmt: skip


MODEL_PRESETS: dict[str, ConfigValues] = {
    "tiny": _dense("LlamaForCausalLM", 128, 2, 4, 2, 256, vocab_size=512,
                   max_position_embeddings=2048),  # for tests
    "tiny-moe": _dense("MixtralForCausalLM", 128, 2, 4, 2, 256, vocab_size=512,
                       max_position_embeddings=2048, num_local_experts=4, num_experts_per_tok=2),
    "smollm2-135m": _dense("LlamaForCausalLM", 576, 30, 9, 3, 1536, vocab_size=49_152,
                           max_position_embeddings=8192, tie_word_embeddings=True),
    "llama-3.2-1b": _llama3(2048, 16, 32, 8192, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama3(3072, 28, 24, 8192, tie_word_embeddings=True),
    "llama-3.1-8b": _llama3(4096, 32, 32, 14_336),
    "llama-3.1-70b": _llama3(8192, 80, 64, 28_672),
    "llama-3.3-70b": _llama3(8192, 80, 64, 28_672),
    "llama-3.1-405b": _llama3(16_384, 126, 128, 53_248),
    "llama-4-scout": _llama4(16, 1, 10_485_760),
    "llama-4-maverick": _llama4(128, 2, 1_048_576),
    "mistral-7b": _dense("MistralForCausalLM", 4096, 32, 32, 8, 14_336, vocab_size=32_768,
                         max_position_embeddings=32_768),
    "mixtral-8x7b": _mixtral(4096, 32, 32, 14_336, 32_000, 32_768),
    "mixtral-8x22b": _mixtral(6144, 56, 48, 16_384, 32_000, 65_536),
    "qwen2.5-7b": _dense("Qwen2ForCausalLM", 3584, 28, 28, 4, 18_944, vocab_size=152_064,
                         max_position_embeddings=32_768),
    "qwen2.5-72b": _dense("Qwen2ForCausalLM", 8192, 80, 64, 8, 29_568, vocab_size=152_064,
                          max_position_embeddings=32_768),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tie_word_embeddings=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12_288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17_408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25_600),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 768),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 1536),
    "gemma-2-9b": _dense("Gemma2ForCausalLM", 3584, 42, 16, 8, 14_336, head_dim=256,
                         vocab_size=256_000, max_position_embeddings=8192),
    "gemma-2-27b": _dense("Gemma2ForCausalLM", 4608, 46, 32, 16, 36_864, head_dim=128,
                          vocab_size=256_000, max_position_embeddings=8192),
    "gemma-3-1b": _gemma3(1152, 26, 4, 1, 6912, vocab_size=262_144, sliding_window=512,
                          max_position_embeddings=32_768),
    "gemma-3-4b": _gemma3(2560, 34, 8, 4, 10_240),
    "gemma-3-12b": _gemma3(3840, 48, 16, 8, 15_360),
    "gemma-3-27b": _gemma3(5376, 62, 32, 16, 21_504, head_dim=128),
    "phi-3.5-mini": _dense("Phi3ForCausalLM", 3072, 32, 32, 32, 8192, vocab_size=32_064,
                           max_position_embeddings=131_072),
    "phi-4": _dense("Phi3ForCausalLM", 5120, 40, 40, 10, 17_920, vocab_size=100_352,
                    max_position_embeddings=16_384),
    "deepseek-v2-lite": _deepseek(2, 2048, 27, 16, 10_944, _deepseek_moe(64, 6, 1408, 2)),
    "deepseek-v2": _deepseek(2, 5120, 60, 128, 12_288, _deepseek_moe(160, 6, 1536, 2, 8, 3),
                             q_lora_rank=1536, topk_method="group_limited_greedy"),
    "deepseek-v3": _deepseek(3, 7168, 61, 128, 18_432, _deepseek_moe(256, 8, 2048, 1, 8, 4),
                             q_lora_rank=1536, vocab_size=129_280, first_k_dense_replace=3,
                             quantization_config=FP8),
    "deepseek-r1": _deepseek(3, 7168, 61, 128, 18_432, _deepseek_moe(256, 8, 2048, 1, 8, 4),
                             q_lora_rank=1536, vocab_size=129_280, first_k_dense_replace=3,
                             quantization_config=FP8),
    "kimi-k2": _deepseek(3, 7168, 61, 64, 18_432, _deepseek_moe(384, 8, 2048, 1), q_lora_rank=1536,
                         vocab_size=163_840, max_position_embeddings=131_072,
                         quantization_config=FP8),
    "qwen2.5-vl-3b": _dense("Qwen2_5_VLForConditionalGeneration", 2048, 36, 16, 2, 11_008,
                            vocab_size=151_936, max_position_embeddings=128_000,
                            tie_word_embeddings=True),
    "qwen2.5-vl-7b": _dense("Qwen2_5_VLForConditionalGeneration", 3584, 28, 28, 4, 18_944,
                            vocab_size=152_064, max_position_embeddings=128_000),
    "qwen3-vl-8b": _dense("Qwen3VLForConditionalGeneration", 4096, 36, 32, 8, 12_288,
                          vocab_size=151_936, max_position_embeddings=262_144, rope_theta=5e6),
    "lfm2-1.2b": _dense("Lfm2ForCausalLM", 2048, 16, 32, 8, 12_288, vocab_size=65_536,
                        max_position_embeddings=128_000, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
    "qwen3-next-80b-a3b": _dense("Qwen3NextForCausalLM", 2048, 48, 16, 2, 5120, vocab_size=151_936,
                                 head_dim=256, max_position_embeddings=262_144, rope_theta=1e7),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    **MORE_PRESETS,
}  # fmt: skip
NAME_SUFFIXES = (
    *("-instruct", "-it", "-base", "-chat", "-hf", "-pt", ".inst", ".base"),
    *("-0324", "-0528", "-17b-16e", "-17b-128e"),
    *("-0924", "-0125", "-2407", "-2410", "-2501", "-2512"),
)


def find_preset(name: str) -> ConfigFields | None:
    """The config fields of a preset, or None. Owners and suffixes such as -Instruct are ignored."""
    short = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for _ in NAME_SUFFIXES:
        if short in MODEL_PRESETS:
            return ConfigFields(MODEL_PRESETS[short], f"preset {short}")
        for suffix in NAME_SUFFIXES:
            short = short.removesuffix(suffix)
    return None


def load_preset(name: str) -> tuple[ModelFamily, ModelConfig]:
    """The family and configuration of a preset."""
    fields = find_preset(name)
    if fields is None:
        near = difflib.get_close_matches(name.lower(), MODEL_PRESETS, n=4, cutoff=0.4)
        raise ArgumentError(
            f"{name!r} is not a model preset", next=f"one of {', '.join(near or MODEL_PRESETS)}"
        )
    family = find_family(fields)
    return family, family.read_config(fields)
