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

from torch import Tensor

from fulgurite.models.config import ModelConfig

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


def subtract_one(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Undo the 1 that GGUF files add to Gemma's norm weights."""
    return tensor - 1


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
