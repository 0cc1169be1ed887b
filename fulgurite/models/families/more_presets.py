"""More presets: config.json fields of well-known models of other families than `presets.py` lists.

In: a model's short name. Out: the fields that define its shapes, for `presets.MODEL_PRESETS`.
"""

from __future__ import annotations

from collections.abc import Mapping

ConfigValues = Mapping[str, object]

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
OLMO3_ROPE = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


def dense(
    architecture: str,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    **fields: object,
) -> ConfigValues:
    """The fields that every model has."""
    return {
        "architectures": [architecture],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "intermediate_size": intermediate_size,
        "torch_dtype": "bfloat16",
        **fields,
    }


def _mistral(architecture: str, *sizes: int, context: int, **fields: object) -> ConfigValues:
    return {**dense(architecture, *sizes, head_dim=128, vocab_size=131_072,
                    max_position_embeddings=context), **fields}  # fmt: skip


def _olmo2(*sizes: int) -> ConfigValues:
    return dense("Olmo2ForCausalLM", *sizes, vocab_size=100_352, max_position_embeddings=4096,
                 rope_theta=500_000.0)  # fmt: skip


def _olmo3(*sizes: int) -> ConfigValues:
    return dense("Olmo3ForCausalLM", *sizes, vocab_size=100_278, max_position_embeddings=65_536,
                 rope_theta=500_000.0, rope_scaling=OLMO3_ROPE, sliding_window=4096)  # fmt: skip


def _granite(
    architecture: str, *sizes: int, attention: float, logits: float, **fields: object
) -> ConfigValues:
    defaults: dict[str, object] = {
        "vocab_size": 49_155,
        "max_position_embeddings": 131_072,
        "rope_theta": 10_000_000.0,
        "attention_multiplier": attention,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": logits,
        "tie_word_embeddings": True,
    }
    return {**dense(architecture, *sizes), **defaults, **fields}


def _glm(architecture: str, *sizes: int, **fields: object) -> ConfigValues:
    return {**dense(architecture, *sizes, head_dim=128, vocab_size=151_552,
                    max_position_embeddings=32_768), **fields}  # fmt: skip


def _glm4_moe(
    *sizes: int, num_experts: int, expert_size: int, dense_layers: int, **fields: object
) -> ConfigValues:
    return _glm(
        "Glm4MoeForCausalLM", *sizes, max_position_embeddings=131_072, rope_theta=1_000_000.0,
        attention_bias=True, n_routed_experts=num_experts, num_experts_per_tok=8,
        moe_intermediate_size=expert_size, n_shared_experts=1, first_k_dense_replace=dense_layers,
        **fields,
    )  # fmt: skip


def _ernie_moe(*sizes: int, **fields: object) -> ConfigValues:
    return {**dense("Ernie4_5_MoeForCausalLM", *sizes, vocab_size=103_424, moe_num_experts=64,
                    max_position_embeddings=131_072), **fields}  # fmt: skip


def _cohere(architecture: str, *sizes: int, logit_scale: float, **fields: object) -> ConfigValues:
    return {**dense(architecture, *sizes, vocab_size=256_000, max_position_embeddings=131_072,
                    logit_scale=logit_scale), **fields}  # fmt: skip


def _starcoder2(*sizes: int, tied: bool = True) -> ConfigValues:
    return dense("Starcoder2ForCausalLM", *sizes, vocab_size=49_152, sliding_window=4096,
                 max_position_embeddings=16_384, tie_word_embeddings=tied)  # fmt: skip


def _hunyuan(architecture: str, *sizes: int, **fields: object) -> ConfigValues:
    return {**dense(architecture, *sizes, head_dim=128, vocab_size=128_167,
                    max_position_embeddings=32_768, tie_word_embeddings=True), **fields}  # fmt: skip


MORE_PRESETS: dict[str, ConfigValues] = {
    "falcon3-7b": dense("LlamaForCausalLM", 3072, 28, 12, 4, 23_040, head_dim=256,
                        vocab_size=131_072, max_position_embeddings=32_768),
    "mistral-nemo": _mistral("MistralForCausalLM", 5120, 40, 32, 8, 14_336, context=131_072),
    "mistral-small-24b": _mistral("MistralForCausalLM", 5120, 40, 32, 8, 32_768, context=32_768),
    "ministral-8b": _mistral("MinistralForCausalLM", 4096, 36, 32, 8, 12_288, context=131_072,
                             sliding_window=32_768),
    "ministral-3-8b": _mistral("Ministral3ForCausalLM", 4096, 34, 32, 8, 14_336, context=262_144),
    "gemma-2b": dense("GemmaForCausalLM", 2048, 18, 8, 1, 16_384, head_dim=256, vocab_size=256_000,
                      max_position_embeddings=8192),
    "gemma-7b": dense("GemmaForCausalLM", 3072, 28, 16, 16, 24_576, head_dim=256,
                      vocab_size=256_000, max_position_embeddings=8192),
    "olmoe-1b-7b": dense("OlmoeForCausalLM", 2048, 16, 16, 16, 1024, vocab_size=50_304,
                         max_position_embeddings=4096, num_experts=64, num_experts_per_tok=8),
    "olmo-2-1124-7b": _olmo2(4096, 32, 32, 32, 11_008),
    "olmo-2-1124-13b": _olmo2(5120, 40, 40, 40, 13_824),
    "olmo-2-0325-32b": _olmo2(5120, 64, 40, 8, 27_648),
    "olmo-3-7b": _olmo3(4096, 32, 32, 32, 11_008),
    "olmo-3-32b": _olmo3(5120, 64, 40, 8, 27_648),
    "granite-3.3-2b": _granite("GraniteForCausalLM", 2048, 40, 32, 8, 8192, attention=0.015625,
                               logits=8.0),
    "granite-3.3-8b": _granite("GraniteForCausalLM", 4096, 40, 32, 8, 12_800, attention=0.0078125,
                               logits=16.0),
    "granite-3.1-1b-a400m": _granite("GraniteMoeForCausalLM", 1024, 24, 16, 8, 512,
                                     attention=0.015625, logits=6.0, num_local_experts=32,
                                     num_experts_per_tok=8),
    "granite-3.1-3b-a800m": _granite("GraniteMoeForCausalLM", 1536, 32, 24, 8, 512,
                                     attention=0.015625, logits=6.0, num_local_experts=40,
                                     num_experts_per_tok=8),
    "granite-4.0-micro": _granite("GraniteMoeHybridForCausalLM", 2560, 40, 40, 8, 8192,
                                  attention=0.015625, logits=10.0, vocab_size=100_352,
                                  num_local_experts=0, shared_intermediate_size=8192,
                                  position_embedding_type="rope", layer_types=["attention"] * 40),
    "glm-4-9b": _glm("GlmForCausalLM", 4096, 40, 32, 2, 13_696, max_position_embeddings=131_072),
    "glm-4-9b-0414": _glm("Glm4ForCausalLM", 4096, 40, 32, 2, 13_696),
    "glm-4-32b-0414": _glm("Glm4ForCausalLM", 6144, 61, 48, 2, 23_040, attention_bias=False),
    "glm-4.5": _glm4_moe(5120, 92, 96, 8, 12_288, num_experts=160, expert_size=1536,
                         dense_layers=3, use_qk_norm=True, routed_scaling_factor=2.5),
    "glm-4.5-air": _glm4_moe(4096, 46, 96, 8, 10_944, num_experts=128, expert_size=1408,
                             dense_layers=1),
    "phi-3.5-moe": dense("PhimoeForCausalLM", 4096, 32, 32, 8, 6400, vocab_size=32_064,
                         max_position_embeddings=131_072, num_local_experts=16,
                         attention_bias=True, lm_head_bias=True),
    "qwen1.5-moe-a2.7b": dense("Qwen2MoeForCausalLM", 2048, 24, 16, 16, 5632, vocab_size=151_936,
                               max_position_embeddings=8192, num_experts=60, num_experts_per_tok=4,
                               moe_intermediate_size=1408, shared_expert_intermediate_size=5632),
    "qwen2-57b-a14b": dense("Qwen2MoeForCausalLM", 3584, 28, 28, 4, 18_944, vocab_size=151_936,
                            max_position_embeddings=32_768, num_experts=64, num_experts_per_tok=8,
                            moe_intermediate_size=2560, shared_expert_intermediate_size=20_480),
    "smollm3-3b": dense("SmolLM3ForCausalLM", 2048, 36, 16, 4, 11_008, vocab_size=128_256,
                        max_position_embeddings=65_536, rope_theta=5_000_000.0),
    "seed-oss-36b": dense("SeedOssForCausalLM", 5120, 64, 80, 8, 27_648, vocab_size=155_136,
                          max_position_embeddings=524_288, rope_theta=10_000_000.0),
    "ernie-4.5-0.3b": dense("Ernie4_5ForCausalLM", 1024, 18, 16, 2, 3072, vocab_size=103_424,
                            max_position_embeddings=131_072),
    "ernie-4.5-21b-a3b": _ernie_moe(2560, 28, 20, 4, 12_288, moe_intermediate_size=1536, moe_k=6,
                                    moe_num_shared_experts=2),
    "ernie-4.5-300b-a47b": _ernie_moe(8192, 54, 64, 8, 28_672, moe_intermediate_size=3584, moe_k=8,
                                      moe_num_shared_experts=0, moe_layer_start_index=3,
                                      tie_word_embeddings=False),
    "hunyuan-7b": _hunyuan("HunYuanDenseV1ForCausalLM", 4096, 32, 32, 8, 14_336),
    "hunyuan-a13b": _hunyuan("HunYuanMoEV1ForCausalLM", 4096, 32, 32, 8, 3072, num_experts=64,
                             moe_topk=8),
    "c4ai-command-r-v01": _cohere("CohereForCausalLM", 8192, 40, 64, 64, 22_528,
                                  logit_scale=0.0625, rope_theta=8_000_000.0),
    "c4ai-command-r7b-12-2024": _cohere("Cohere2ForCausalLM", 4096, 32, 32, 8, 14_336,
                                        logit_scale=0.25, rope_theta=50_000.0),
    "c4ai-command-a-03-2025": _cohere("Cohere2ForCausalLM", 12_288, 64, 96, 8, 36_864,
                                      logit_scale=0.25, rope_theta=50_000.0),
    "starcoder2-3b": _starcoder2(3072, 30, 24, 2, 12_288),
    "starcoder2-7b": _starcoder2(4608, 32, 36, 4, 18_432),
    "starcoder2-15b": _starcoder2(6144, 40, 48, 4, 24_576, tied=False),
    "exaone-4.0-1.2b": dense("Exaone4ForCausalLM", 2048, 30, 32, 8, 4096, vocab_size=102_400,
                             max_position_embeddings=65_536, tie_word_embeddings=True),
    "exaone-4.0-32b": dense("Exaone4ForCausalLM", 5120, 64, 40, 8, 27_392, vocab_size=102_400,
                            max_position_embeddings=131_072, sliding_window=4096,
                            sliding_window_pattern="LLLG"),
    "dots.llm1": dense("Dots1ForCausalLM", 4096, 62, 32, 32, 10_944, vocab_size=152_064,
                       max_position_embeddings=32_768, n_routed_experts=128, num_experts_per_tok=6,
                       moe_intermediate_size=1408, n_shared_experts=2, first_k_dense_replace=1,
                       norm_topk_prob=True, routed_scaling_factor=2.5),
    "minimax-m2": dense("MiniMaxM2ForCausalLM", 3072, 62, 48, 8, 1536, head_dim=128, rotary_dim=64,
                        vocab_size=200_064, max_position_embeddings=196_608, num_local_experts=256,
                        num_experts_per_tok=8, quantization_config=FP8),
}  # fmt: skip
