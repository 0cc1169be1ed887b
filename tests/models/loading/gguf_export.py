"""Exports transformers models to GGUF files, with the names and the writer of the gguf package."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.models.loading.gguf_more_families import (
    PERMUTED,
    add_metadata,
    split_granite_experts,
)

gguf = pytest.importorskip("gguf", reason="the gguf package writes the files")


def permute_rope(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from the half layout to the interleaved layout of GGUF Llama
    files.
    """
    shape = weight.shape
    return weight.view(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def stack_experts(state: dict[str, Tensor], prefix: str, name: str, num_experts: int) -> Tensor:
    return torch.stack([state[f"{prefix}.{expert}.{name}.weight"] for expert in range(num_experts)])


def export_tensors(
    model: nn.Module, architecture: str, path: Path, split_kv_b: bool = True
) -> dict[str, Tensor]:
    """The tensors by GGUF name, as llama.cpp's converter writes them.

    `split_kv_b`: store the keys (transposed) and values of DeepSeek's kv_b apart, as files since
    2025 do.
    """
    model.save_pretrained(path)  # type: ignore[operator]
    state, config = load_file(path / "model.safetensors"), model.config
    num_layers = config.num_hidden_layers
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, num_layers)
    result = {}
    for name, tensor in state.items():
        if ".experts." in name or "_linear." in name:
            continue
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        if architecture in PERMUTED and (".q_proj." in name or ".k_proj." in name):
            heads = config.num_attention_heads if ".q_" in name else config.num_key_value_heads
            tensor = permute_rope(tensor, heads)
        if architecture.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        result[gguf_name + ".weight" if name.endswith("sinks") else gguf_name] = tensor
    for layer in range(num_layers):
        result |= export_experts(state, layer, config) | split_granite_experts(state, layer)
        if split_kv_b and f"blk.{layer}.attn_kv_b.weight" in result:
            kv_b = result.pop(f"blk.{layer}.attn_kv_b.weight")
            heads = kv_b.unflatten(0, (config.num_attention_heads, -1))
            keys, values = heads.split((config.qk_nope_head_dim, config.v_head_dim), dim=1)
            result[f"blk.{layer}.attn_k_b.weight"] = keys.transpose(1, 2)
            result[f"blk.{layer}.attn_v_b.weight"] = values
    return result


def export_experts(state: dict[str, Tensor], layer: int, config: object) -> dict[str, Tensor]:
    """The stacked experts of one layer, by GGUF name."""
    prefix, layer_prefix = f"blk.{layer}.ffn_", f"model.layers.{layer}."
    if f"{layer_prefix}block_sparse_moe.gate.weight" in state:
        experts_prefix = layer_prefix + "block_sparse_moe.experts"
        parts = {"gate": "w1", "up": "w3", "down": "w2"}
        num_experts = config.num_local_experts  # type: ignore[attr-defined]
        return {
            f"{prefix}{k}_exps.weight": stack_experts(state, experts_prefix, v, num_experts)
            for k, v in parts.items()
        }
    if f"{layer_prefix}mlp.experts.0.up_proj.weight" in state:
        num_experts = getattr(config, "num_experts", None) or config.n_routed_experts  # type: ignore[attr-defined]
        return {
            f"{prefix}{part}_exps.weight": stack_experts(
                state, layer_prefix + "mlp.experts", f"{part}_proj", num_experts
            )
            for part in ("gate", "up", "down")
        }
    if f"{layer_prefix}feed_forward.experts.gate_up_proj" in state:
        gate_up = state[layer_prefix + "feed_forward.experts.gate_up_proj"].transpose(1, 2)
        gate, up = gate_up.chunk(2, dim=1)
        down = state[layer_prefix + "feed_forward.experts.down_proj"].transpose(1, 2)
        return {
            prefix + "gate_exps.weight": gate,
            prefix + "up_exps.weight": up,
            prefix + "down_exps.weight": down,
        }
    if f"{layer_prefix}mlp.experts.gate_up_proj" in state:
        gate_up = state[layer_prefix + "mlp.experts.gate_up_proj"].transpose(1, 2)
        bias = state[layer_prefix + "mlp.experts.gate_up_proj_bias"]
        return {
            prefix + "gate_exps.weight": gate_up[:, 0::2],
            prefix + "up_exps.weight": gate_up[:, 1::2],
            prefix + "gate_exps.bias": bias[:, 0::2],
            prefix + "up_exps.bias": bias[:, 1::2],
            prefix + "down_exps.weight": state[layer_prefix + "mlp.experts.down_proj"].transpose(
                1, 2
            ),
            prefix + "down_exps.bias": state[layer_prefix + "mlp.experts.down_proj_bias"],
        }
    return {}


def write_mla_metadata(writer: object, config: object, split_kv_b: bool) -> None:
    """Write the metadata of DeepSeek files; with split_kv_b the lengths are those of MLA."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim  # type: ignore[attr-defined]
    key, value = config.qk_nope_head_dim + rope, config.v_head_dim  # type: ignore[attr-defined]
    writer.add_kv_lora_rank(rank)  # type: ignore[attr-defined]
    if config.q_lora_rank:  # type: ignore[attr-defined]
        writer.add_q_lora_rank(config.q_lora_rank)  # type: ignore[attr-defined]
    writer.add_key_length(rank + rope if split_kv_b else key)  # type: ignore[attr-defined]
    writer.add_value_length(rank if split_kv_b else value)  # type: ignore[attr-defined]
    if split_kv_b:
        writer.add_key_length_mla(key)  # type: ignore[attr-defined]
        writer.add_value_length_mla(value)  # type: ignore[attr-defined]
    writer.add_rope_dimension_count(rope)  # type: ignore[attr-defined]
    writer.add_leading_dense_block_count(config.first_k_dense_replace)  # type: ignore[attr-defined]
    writer.add_expert_shared_count(config.n_shared_experts)  # type: ignore[attr-defined]
    writer.add_expert_weights_scale(config.routed_scaling_factor)  # type: ignore[attr-defined]
    if getattr(config, "n_group", None) and getattr(config, "topk_method", "") != "greedy":
        writer.add_expert_group_count(config.n_group)  # type: ignore[attr-defined]
        writer.add_expert_group_used_count(config.topk_group)  # type: ignore[attr-defined]
    if config.model_type == "deepseek_v3":  # type: ignore[attr-defined]
        writer.add_expert_weights_norm(config.norm_topk_prob)  # type: ignore[attr-defined]
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)  # type: ignore[attr-defined]
    scaling = config.rope_parameters  # type: ignore[attr-defined]
    writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])  # type: ignore[attr-defined]
    writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])  # type: ignore[attr-defined]
    writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])  # type: ignore[attr-defined]


def write_gguf(
    model: nn.Module,
    architecture: str,
    folder: Path,
    split_kv_b: bool = True,
    quantized: bool = False,
) -> Path:
    """Write a transformers model to a GGUF file, in float32, or in Q8_0 where rows are whole
    blocks.
    """
    config = model.config
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    intermediate_size = getattr(config, "intermediate_size_mlp", config.intermediate_size)
    writer.add_feed_forward_length(intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    is_mla = architecture == "deepseek2"
    writer.add_head_count_kv(1 if is_mla and split_kv_b else config.num_key_value_heads)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_metadata(writer, architecture, config, gguf.ExpertGatingFuncType.SIGMOID)
    if is_mla:
        write_mla_metadata(writer, config, split_kv_b)
    elif getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "num_experts_per_tok"):
        counts = ("num_local_experts", "num_experts", "n_routed_experts")
        writer.add_expert_count(next(getattr(config, n) for n in counts if hasattr(config, n)))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "llama4":
        writer.add_expert_feed_forward_length(config.intermediate_size)
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    tensors = export_tensors(model, architecture, folder, split_kv_b)
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    writer.add_rope_freq_base(parameters["rope_theta"])
    rope_type = parameters["rope_type"]
    if rope_type in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope_type))
        writer.add_rope_scaling_factor(parameters["factor"])
    if rope_type in ("yarn", "longrope"):
        original = parameters["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
    if rope_type == "longrope":
        writer.add_rope_dimension_count(8)
        tensors["rope_factors_short.weight"] = torch.tensor(parameters["short_factor"])
        tensors["rope_factors_long.weight"] = torch.tensor(parameters["long_factor"])
    if rope_type == "llama3":
        scaled_freq = dict(model.named_buffers())["model.rotary_emb.inv_freq"]
        inv_freq = 1.0 / parameters["rope_theta"] ** (torch.arange(0, 16, 2) / 16)
        tensors["rope_freqs.weight"] = inv_freq / scaled_freq
    for name, tensor in tensors.items():
        if quantized and tensor.ndim > 1 and tensor.shape[-1] % 32 == 0:
            rope_type = gguf.GGMLQuantizationType.Q8_0
            blocks = gguf.quants.quantize(tensor.contiguous().numpy(), rope_type)
            writer.add_tensor(name, blocks, raw_dtype=rope_type)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"
