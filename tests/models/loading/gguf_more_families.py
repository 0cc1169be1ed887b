"""What llama.cpp's converter does for the families of `MORE_CASES`, beside `gguf_export`.

In: a transformers model's config and tensors. Out: metadata of the writer and tensors by GGUF name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Architectures whose queries and keys the converter reorders for interleaved RoPE.
PERMUTED = ("llama", "granite", "granitemoe", "smollm3")
ROTARY_DIM = ("glm4", "glm4moe", "minimax-m2")


def add_metadata(writer: Any, architecture: str, config: Any, sigmoid: Any) -> None:
    """Metadata that only these architectures have. `sigmoid` is the gating function's code."""
    for name in ("layer_norm_eps", "norm_epsilon"):
        if hasattr(config, name):
            writer.add_layer_norm_eps(getattr(config, name))
    if architecture in ROTARY_DIM:
        factor = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config.head_dim * factor))
    if architecture in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
    if architecture.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        if getattr(config, "shared_intermediate_size", 0):
            writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if architecture == "qwen2moe":
        size = config.shared_expert_intermediate_size
        writer.add_expert_shared_feed_forward_length(size)
    if architecture in ("glm4moe", "dots1"):
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    if architecture in ("glm4moe", "dots1", "minimax-m2"):
        writer.add_expert_gating_func(sigmoid)
    if architecture == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_shared_count(config.moe_num_shared_experts)


def split_granite_experts(state: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The fused experts and the shared MLP of Granite, by GGUF name."""
    source, target, result = f"model.layers.{layer}.", f"blk.{layer}.ffn_", {}
    for block, suffix in (("block_sparse_moe", "exps"), ("shared_mlp", "shexp")):
        if f"{source}{block}.input_linear.weight" in state:
            fused = state[f"{source}{block}.input_linear.weight"]
            gate, up = fused.chunk(2, dim=-2)
            result[f"{target}gate_{suffix}.weight"] = gate
            result[f"{target}up_{suffix}.weight"] = up
            result[f"{target}down_{suffix}.weight"] = state[f"{source}{block}.output_linear.weight"]
    return result
