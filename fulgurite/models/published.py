"""Well-known models by name: the fields of their published config.json, as far as shapes go.

In: a name (`deepseek-v3`, or as on the hub, `deepseek-ai/DeepSeek-V3`). Out: its family and `ModelConfig`,
without any file. For plans of memory and for random weights of a real shape.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from fulgurite.errors import ArgumentError
from fulgurite.models.config import Fields, ModelConfig
from fulgurite.models.family import Family
from fulgurite.models.registry import family_of

Values = Mapping[str, object]

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
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


def _dense(
    architecture: str,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    **others: object,
) -> Values:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "torch_dtype": "bfloat16",
        **others,
    }


def _llama3(hidden: int, layers: int, heads: int, inner: int, **others: object) -> Values:
    fields: dict[str, object] = {
        "vocab_size": 128_256,
        "max_position_embeddings": 131_072,
        "rope_theta": 500_000.0,
        "rope_scaling": LLAMA_3_ROPE,
    }
    return _dense("LlamaForCausalLM", hidden, layers, heads, 8, inner, **(fields | others))


def _qwen3(hidden: int, layers: int, heads: int, inner: int, **others: object) -> Values:
    fields: dict[str, object] = {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
    }
    return _dense("Qwen3ForCausalLM", hidden, layers, heads, 8, inner, **(fields | others))


def _qwen3_moe(hidden: int, layers: int, heads: int, kv_heads: int, inner: int) -> Values:
    return {
        **_qwen3(hidden, layers, heads, 0),
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_key_value_heads": kv_heads,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": inner,
        "norm_topk_prob": True,
    }


def _gemma3(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **others: object
) -> Values:
    fields: dict[str, object] = {
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "tie_word_embeddings": True,
    }
    return _dense("Gemma3ForCausalLM", hidden, layers, heads, kv_heads, inner, **(fields | others))


def _mixtral(
    hidden: int, layers: int, heads: int, inner: int, vocabulary: int, context: int
) -> Values:
    return _dense(
        "MixtralForCausalLM", hidden, layers, heads, 8, inner, vocab_size=vocabulary,
        max_position_embeddings=context, num_local_experts=8, num_experts_per_tok=2,
    )  # fmt: skip


def _deepseek(
    version: int,
    hidden: int,
    layers: int,
    heads: int,
    inner: int,
    experts: Values,
    **others: object,
) -> Values:
    fields: dict[str, object] = {
        "vocab_size": 102_400,
        "max_position_embeddings": 163_840,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "rope_scaling": DEEPSEEK_ROPE,
        **experts,
    }
    architecture = f"DeepseekV{version}ForCausalLM"
    return _dense(architecture, hidden, layers, heads, heads, inner, **(fields | others))


def _experts(
    count: int, per_token: int, inner: int, shared: int, groups: int = 1, kept: int = 1
) -> Values:
    return {
        "n_routed_experts": count,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": inner,
        "n_shared_experts": shared,
        "n_group": groups,
        "topk_group": kept,
    }


def _llama4(experts: int, step: int, context: int) -> Values:
    return _dense(
        "Llama4ForCausalLM", 5120, 48, 40, 8, 8192, head_dim=128, vocab_size=202_048,
        max_position_embeddings=context, intermediate_size_mlp=16_384, num_local_experts=experts,
        num_experts_per_tok=1, interleave_moe_layer_step=step, attention_chunk_size=8192,
    )  # fmt: skip


def _gpt_oss(layers: int, experts: int) -> Values:
    return _dense(
        "GptOssForCausalLM", 2880, layers, 64, 8, 2880, head_dim=64, vocab_size=201_088,
        max_position_embeddings=131_072, num_local_experts=experts, num_experts_per_tok=4,
        sliding_window=128, quantization_config=MXFP4,
    )  # fmt: skip


PUBLISHED: dict[str, Values] = {
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
    "deepseek-v2-lite": _deepseek(2, 2048, 27, 16, 10_944, _experts(64, 6, 1408, 2)),
    "deepseek-v2": _deepseek(2, 5120, 60, 128, 12_288, _experts(160, 6, 1536, 2, 8, 3),
                             q_lora_rank=1536, topk_method="group_limited_greedy"),
    "deepseek-v3": _deepseek(3, 7168, 61, 128, 18_432, _experts(256, 8, 2048, 1, 8, 4),
                             q_lora_rank=1536, vocab_size=129_280, first_k_dense_replace=3,
                             quantization_config=FP8),
    "deepseek-r1": _deepseek(3, 7168, 61, 128, 18_432, _experts(256, 8, 2048, 1, 8, 4),
                             q_lora_rank=1536, vocab_size=129_280, first_k_dense_replace=3,
                             quantization_config=FP8),
    "kimi-k2": _deepseek(3, 7168, 61, 64, 18_432, _experts(384, 8, 2048, 1), q_lora_rank=1536,
                         vocab_size=163_840, max_position_embeddings=131_072,
                         quantization_config=FP8),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}  # fmt: skip
ENDINGS = ("-instruct", "-it", "-base", "-chat", "-0324", "-0528", "-17b-16e", "-17b-128e")


def published_fields(name: str) -> Fields | None:
    """The fields of a well-known model, or None; owners and endings such as -Instruct are left out."""
    short = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for _ in ENDINGS:
        if short in PUBLISHED:
            return Fields(PUBLISHED[short], f"the published {short}")
        for ending in ENDINGS:
            short = short.removesuffix(ending)
    return None


def published(name: str) -> tuple[Family, ModelConfig]:
    """A well-known model's family and configuration."""
    fields = published_fields(name)
    if fields is None:
        near = difflib.get_close_matches(name.lower(), PUBLISHED, n=4, cutoff=0.4)
        raise ArgumentError(
            f"{name!r} is no well-known model", next=f"one of {', '.join(near or PUBLISHED)}"
        )
    family = family_of(fields)
    return family, family.read_config(fields)
