"""Small configurations of the families that share their mechanisms with those in `CASES`.

Each tests what is its own: multipliers, norms, biases, routing, rotary embeddings.
"""

from __future__ import annotations

Fields = dict[str, object]
MOE: Fields = {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
GROUPED_MOE: Fields = {
    **MOE,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
GRANITE: Fields = {
    "attention_multiplier": 0.31,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 6.0,
}
GRANITE_MOE: Fields = {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": 48,
}

# name -> class prefix in transformers, fields in addition to COMMON
MORE_CASES: dict[str, tuple[str, Fields]] = {
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 2.5}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
            },
        },
    ),
    "granite": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    "granite_moe": ("GraniteMoe", GRANITE_MOE),
    "granite_moe_shared": ("GraniteMoeShared", {**GRANITE_MOE, "shared_intermediate_size": 56}),
    "granite_moe_hybrid": (
        "GraniteMoeHybrid",
        {
            **GRANITE_MOE,
            "shared_intermediate_size": 56,
            "layer_types": ["full_attention"] * 4,
            "mamba_n_heads": 4,
        },
    ),
    "granite_hybrid_dense": (
        "GraniteMoeHybrid",
        {
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 56,
            "layer_types": ["full_attention"] * 4,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
        },
    ),
    "glm": ("Glm", {"head_dim": 16, "rope_parameters": HALF}),
    "glm4": ("Glm4", {"head_dim": 24, "attention_bias": False, "rope_parameters": HALF}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **GROUPED_MOE,
            "head_dim": 24,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
            "rope_parameters": HALF,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        {
            **GROUPED_MOE,
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "q_lora_rank": 20,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
        },
    ),
    "solar_open": ("SolarOpen", {**GROUPED_MOE, "head_dim": 20, "attention_bias": True}),
    "phi_moe": (
        "Phimoe",
        {
            "num_local_experts": 6,
            "attention_bias": True,
            "lm_head_bias": True,
            # So far that often one, two or three experts are near the best one.
            "router_jitter_noise": 0.3,
            "sliding_window": 50,
            "rope_parameters": LONGROPE,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            **MOE,
            "num_experts": 8,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "attention_bias": True}),
    "seed_oss": ("SeedOss", {"head_dim": 20, "attention_out_bias": True}),
    "ernie": ("Ernie4_5", {"head_dim": 20, "use_bias": True}),
    "ernie_moe": (
        "Ernie4_5_Moe",
        {
            "moe_intermediate_size": 40,
            "moe_num_experts": 8,
            "moe_k": 3,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "dynamic",
                "rope_theta": 10_000.0,
                "alpha": 20.0,
                "factor": 1.0,
            },
        },
    ),
    "hunyuan_moe": ("HunYuanMoEV1", {"head_dim": 16, "num_experts": 6, "moe_topk": 3}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.4, "attention_bias": True}),
    "cohere2": ("Cohere2", {"logit_scale": 0.4, "sliding_window": 7}),
    "starcoder2": ("Starcoder2", {"sliding_window": 9}),
    "exaone4": ("Exaone4", {"sliding_window": 7, "layer_types": SLIDING_AND_FULL}),
    "exaone_moe": (
        "ExaoneMoe",
        {
            **{name: value for name, value in GROUPED_MOE.items() if name[:2] != "n_"},
            "num_experts": 8,
            "n_group": 4,
            "num_shared_experts": 2,
            "sliding_window": 7,
            "layer_types": SLIDING_AND_FULL,
        },
    ),
    "dots1": (
        "Dots1",
        {**GROUPED_MOE, "head_dim": 24, "sliding_window": 9, "max_window_layers": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        {
            "head_dim": 24,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rope_parameters": HALF,
        },
    ),
    "ministral": (
        "Ministral",
        {"head_dim": 20, "sliding_window": 7, "layer_types": SLIDING_AND_FULL},
    ),
    "cwm": (
        "Cwm",
        {
            "bos_token_id": 1,
            "head_dim": 20,
            "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 16,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.4,
            },
        },
    ),
    "gemma": ("Gemma", {"head_dim": 20}),
}
