"""Weight mappings: which checkpoint tensor fills which parameter, and how it is converted.

In: a checkpoint tensor and a parameter. Out: two tensors of the same shape, one to copy into the
other.

A `WeightMapping` names one tensor of a checkpoint and the parameter that it fills.

    convert(tensor, config)                     the checkpoint tensor in the layout of the parameter
    target_view(parameter, config, expert)      the part of the parameter that the tensor fills

Both are plain functions of tensors that also work on the meta device. So the functions that load a
checkpoint also check its shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.models.config import LinearAttentionConfig, ModelConfig

Convert = Callable[[Tensor, ModelConfig], Tensor]
TargetView = Callable[[Tensor, ModelConfig, int], Tensor]


def identity(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Return the tensor unchanged."""
    return tensor


def whole_parameter(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """Return the whole parameter."""
    return parameter


@dataclass(frozen=True)
class WeightMapping:
    """Maps the checkpoint tensor `source` to (a part of) the parameter `target`.

    `source` may contain the placeholders {layer} and {expert}, `target` the placeholder {layer}.
    """

    source: str
    target: str
    convert: Convert = identity
    target_view: TargetView = whole_parameter


@dataclass(frozen=True)
class WeightAssignment:
    """A mapping applied to one parameter of a model and, where experts are stored apart, one
    expert.
    """

    mapping: WeightMapping
    parameter: str
    expert: int


# ---- conversions ---------------------------------------------------------------------------------


def transpose(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[E, in, out] -> [E, out, in]."""
    return tensor.transpose(-1, -2)


def orient_gate_up(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[E, D, 2I] -> [E, 2I, D], where it is not stored so already. Square ones are the former."""
    assert config.moe is not None, f"{config.family} has no experts"
    rows, columns = 2 * config.moe.intermediate_size, config.hidden_size
    is_oriented = tensor.shape[-2:] == (rows, columns) and rows != columns
    return tensor if is_oriented else tensor.transpose(-1, -2)


def orient_down(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[E, I, D] -> [E, D, I], where it is not stored so already. Square ones are the former."""
    assert config.moe is not None, f"{config.family} has no experts"
    rows, columns = config.hidden_size, config.moe.intermediate_size
    is_oriented = tensor.shape[-2:] == (rows, columns) and rows != columns
    return tensor if is_oriented else tensor.transpose(-1, -2)


def subtract_one(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Undo the 1 that GGUF files add to Gemma's norm weights."""
    return tensor - 1


def as_row(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[D] or [1, D] -> [1, D]."""
    return tensor.reshape(1, -1)


def flatten(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[1, E] or [E] -> [E]."""
    return tensor.flatten()


def deinterleave_gate_up(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows gate, up, gate, up, … of dimension 1 -> all gate rows, then all up rows."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def transpose_deinterleave_gate_up(tensor: Tensor, config: ModelConfig) -> Tensor:
    return deinterleave_gate_up(tensor.transpose(-1, -2), config)


def slice_q(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The query rows of a fused qkv_proj weight."""
    return tensor[: config.num_heads * config.head_dim]


def slice_k(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The key rows of a fused qkv_proj weight."""
    start = config.num_heads * config.head_dim
    return tensor[start : start + config.num_kv_heads * config.head_dim]


def slice_v(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The value rows of a fused qkv_proj weight."""
    return tensor[(config.num_heads + config.num_kv_heads) * config.head_dim :]


def slice_first_half(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The gate rows of a fused gate_up_proj weight."""
    return tensor.chunk(2)[0]


def slice_second_half(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The up rows of a fused gate_up_proj weight."""
    return tensor.chunk(2)[1]


def unpermute_rope(tensor: Tensor, config: ModelConfig) -> Tensor:
    """GGUF Llama rows pair dimensions (2i, 2i + 1) of a head for RoPE; ours pair (i, i + H / 2)."""
    heads = tensor.unflatten(0, (-1, config.head_dim // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)


def group_qkvz(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows of q, k, v, z of each key head -> all q rows, all k rows, all v rows, all z rows."""
    linear = _get_linear_attention(config)
    values = linear.num_value_heads // linear.num_key_heads * linear.value_dim
    heads = tensor.unflatten(0, (linear.num_key_heads, -1))
    parts = heads.split([linear.key_dim, linear.key_dim, values, values], dim=1)
    return torch.cat([part.flatten(0, 1) for part in parts])


def group_ba(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows of b and a of each key head -> all a rows, all b rows."""
    heads = tensor.unflatten(0, (_get_linear_attention(config).num_key_heads, 2, -1))
    return torch.cat((heads[:, 1].flatten(0, 1), heads[:, 0].flatten(0, 1)))


def transpose_conv(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[C, 1, W] -> [W, C]."""
    return tensor[:, 0].T


def slice_query(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The query rows of q_proj, which holds query and gate of each head."""
    return _query_and_gate(tensor, config)[:, 0].flatten(0, 1)


def slice_gate(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The gate rows of q_proj."""
    return _query_and_gate(tensor, config)[:, 1].flatten(0, 1)


def _query_and_gate(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.unflatten(0, (config.num_heads, 2, config.head_dim))


def _get_linear_attention(config: ModelConfig) -> LinearAttentionConfig:
    assert config.linear_attention is not None, f"{config.family} has no linear attention"
    return config.linear_attention


# ---- target views: parts of stacked experts and of kv_b_proj -------------------------------------


def view_expert(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter[expert]


def view_expert_gate(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The gate rows of one expert's gate_up_proj."""
    return parameter[expert].chunk(2)[0]


def view_expert_up(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The up rows of one expert's gate_up_proj."""
    return parameter[expert].chunk(2)[1]


def view_all_gates(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The gate rows of every expert's gate_up_proj."""
    return parameter.chunk(2, dim=1)[0]


def view_all_ups(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The up rows of every expert's gate_up_proj."""
    return parameter.chunk(2, dim=1)[1]


def view_qkv_rows(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The rows of a GatedDeltaNet's in_proj that give queries, keys and values."""
    return parameter[: len(parameter) - _value_rows(config)]


def view_z_rows(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The rows of a GatedDeltaNet's in_proj that give the output gate."""
    return parameter[len(parameter) - _value_rows(config) :]


def view_first_half(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter.chunk(2)[0]


def view_second_half(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter.chunk(2)[1]


def _value_rows(config: ModelConfig) -> int:
    linear = _get_linear_attention(config)
    return linear.num_value_heads * linear.value_dim


def view_kv_b_keys(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The rows of kv_b_proj (MLA) that produce keys, [heads, qk_nope_head_dim, kv_lora_rank]."""
    assert config.mla is not None, f"{config.family} does not use MLA"
    return _unflatten_heads(parameter, config)[:, : config.mla.qk_nope_head_dim]


def view_kv_b_values(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The rows of kv_b_proj (MLA) that produce values, [heads, v_head_dim, kv_lora_rank]."""
    assert config.mla is not None, f"{config.family} does not use MLA"
    return _unflatten_heads(parameter, config)[:, config.mla.qk_nope_head_dim :]


def _unflatten_heads(parameter: Tensor, config: ModelConfig) -> Tensor:
    return parameter.unflatten(0, (config.num_heads, -1))
