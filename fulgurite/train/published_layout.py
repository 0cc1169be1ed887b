"""The published layout: parameters of our modules in, tensors of the published checkpoint out.

A family's `WeightMapping`s say how a checkpoint tensor fills parameters: `target_view(parameter)` gets
`convert(tensor)`. Here `convert` is undone. A tensor that fills one parameter has an entry in
`INVERSES`. A tensor that fills several, one slice each, has one in `JOINS`.

    plan_tensors(...)     every published tensor, with the parts that it is made of
    build_tensor(...)     one of them, from whole parameters

Shapes: E experts; D hidden size; I intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.loading.weight_assignment import map_expected_names
from fulgurite.models.weight_mapping import Convert, WeightAssignment

Inverse = Callable[[Tensor, ModelConfig], Tensor]
Join = Callable[[Sequence[Tensor], ModelConfig], Tensor]

# ---- inverses of conversions ---------------------------------------------------------------------


def keep(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor


def swap_last(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[E, out, in] -> [E, in, out]."""
    return tensor.transpose(-1, -2)


def interleave_gate_up(tensor: Tensor, config: ModelConfig) -> Tensor:
    """All gate rows, then all up rows of dimension 1 -> gate, up, gate, up, …"""
    return tensor.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def interleave_swap_gate_up(tensor: Tensor, config: ModelConfig) -> Tensor:
    return interleave_gate_up(tensor, config).transpose(-1, -2)


def restore_row(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[E] -> [1, E]."""
    return tensor.unsqueeze(0)


def restore_conv(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[W, C] -> [C, 1, W]."""
    return tensor.T.unsqueeze(1)


def ungroup_qkvz(tensor: Tensor, config: ModelConfig) -> Tensor:
    """All q rows, k rows, v rows, z rows -> rows of q, k, v, z of each key head."""
    linear = config.linear_attention
    assert linear is not None, f"{config.family} has no linear attention"
    values = linear.num_value_heads // linear.num_key_heads * linear.value_dim
    sizes = [linear.num_key_heads * size for size in (linear.key_dim, linear.key_dim)]
    parts = tensor.split([*sizes, *[linear.num_key_heads * values] * 2])
    heads = [part.unflatten(0, (linear.num_key_heads, -1)) for part in parts]
    return torch.cat(heads, dim=1).flatten(0, 1)


def ungroup_ba(tensor: Tensor, config: ModelConfig) -> Tensor:
    """All a rows, all b rows -> rows of b and a of each key head."""
    linear = config.linear_attention
    assert linear is not None, f"{config.family} has no linear attention"
    a, b = (half.unflatten(0, (linear.num_key_heads, -1)) for half in tensor.chunk(2))
    return torch.stack((b, a), dim=1).flatten(0, 2)


INVERSES: dict[Convert, Inverse] = {
    weight_mapping.identity: keep,
    weight_mapping.transpose: swap_last,
    weight_mapping.orient_gate_up: swap_last,
    weight_mapping.orient_down: swap_last,
    weight_mapping.deinterleave_gate_up: interleave_gate_up,
    weight_mapping.transpose_deinterleave_gate_up: interleave_swap_gate_up,
    weight_mapping.group_qkvz: ungroup_qkvz,
    weight_mapping.group_ba: ungroup_ba,
    weight_mapping.transpose_conv: restore_conv,
    weight_mapping.flatten: restore_row,
}


def join_rows(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    return torch.cat(list(parts))


def join_query_gate(parts: Sequence[Tensor], config: ModelConfig) -> Tensor:
    """Query rows and gate rows -> query and gate of each head."""
    heads = [part.unflatten(0, (config.num_heads, config.head_dim)) for part in parts]
    return torch.stack(heads, dim=1).flatten(0, 2)


_w = weight_mapping
JOINS: dict[tuple[Convert, ...], Join] = {
    (_w.slice_q, _w.slice_k, _w.slice_v): join_rows,
    (_w.slice_first_half, _w.slice_second_half): join_rows,
    (_w.slice_query, _w.slice_gate): join_query_gate,
}

# ---- the tensors of a checkpoint -----------------------------------------------------------------


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of the checkpoint: its name, and the parameters that it is made of, in order."""

    name: str
    parts: tuple[WeightAssignment, ...]
    elements: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(part.parameter for part in self.parts)


def plan_tensors(
    family: ModelFamily, config: ModelConfig, parameters: Mapping[str, Tensor]
) -> list[PublishedTensor]:
    """Every tensor of the checkpoint, in the order of the parameters. They may be on meta."""
    expected = map_expected_names(family.weights, config, dict(parameters))
    return [_plan(name, parts, config, parameters) for name, parts in expected.items()]


def _plan(
    name: str,
    assignments: Sequence[WeightAssignment],
    config: ModelConfig,
    parameters: Mapping[str, Tensor],
) -> PublishedTensor:
    parts = _order_parts(name, assignments)
    views = [
        part.mapping.target_view(parameters[part.parameter], config, part.expert) for part in parts
    ]
    dtype = parameters[parts[0].parameter].dtype
    return PublishedTensor(name, parts, sum(view.numel() for view in views), dtype)


def _order_parts(
    name: str, assignments: Sequence[WeightAssignment]
) -> tuple[WeightAssignment, ...]:
    """The parts of a tensor in the order of its `Join`."""
    by_convert = {part.mapping.convert: part for part in assignments}
    if len(assignments) == 1 and assignments[0].mapping.convert in INVERSES:
        return tuple(assignments)
    for converts in JOINS:
        if len(converts) == len(assignments) and set(converts) == by_convert.keys():
            return tuple(by_convert[convert] for convert in converts)
    names = ", ".join(part.mapping.convert.__name__ for part in assignments)
    raise ArgumentError(
        f"{name} can't be written: no inverse of {names}", next="add one to INVERSES or JOINS"
    )


def build_tensor(
    tensor: PublishedTensor, parameters: Mapping[str, Tensor], config: ModelConfig
) -> Tensor:
    """A published tensor from whole parameters: contiguous, in memory of its own."""
    views = [
        part.mapping.target_view(parameters[part.parameter], config, part.expert)
        for part in tensor.parts
    ]
    converts = tuple(part.mapping.convert for part in tensor.parts)
    if len(views) == 1:
        result = INVERSES[converts[0]](views[0], config)
    else:
        result = JOINS[converts](views, config)
    return result.to(tensor.dtype).clone(memory_format=torch.contiguous_format)


# Published names of the language model inside a multimodal model: `model.` becomes this.
MULTIMODAL_PREFIX = "model.language_model."
MULTIMODAL_SUFFIX = "ForConditionalGeneration"


def publish_name(name: str, architecture: str) -> str:
    """The name of a tensor in a checkpoint of this architecture."""
    if architecture.endswith(MULTIMODAL_SUFFIX) and name.startswith("model."):
        return MULTIMODAL_PREFIX + name.removeprefix("model.")
    return name


# `model_type` of a config.json, by architecture.
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "Phi3ForCausalLM": "phi3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
    "Qwen2VLForConditionalGeneration": "qwen2_vl",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe",
    "Lfm2ForCausalLM": "lfm2",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Llama4ForCausalLM": "llama4_text",
    "Llama4ForConditionalGeneration": "llama4",
    "GptOssForCausalLM": "gpt_oss",
    "MinistralForCausalLM": "ministral",
    "Ministral3ForCausalLM": "ministral3",
    "CwmForCausalLM": "cwm",
    "GemmaForCausalLM": "gemma",
    "OlmoeForCausalLM": "olmoe",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo3",
    "GraniteForCausalLM": "granite",
    "GraniteMoeForCausalLM": "granitemoe",
    "GraniteMoeSharedForCausalLM": "granitemoeshared",
    "GraniteMoeHybridForCausalLM": "granitemoehybrid",
    "GlmForCausalLM": "glm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "SolarOpenForCausalLM": "solar_open",
    "PhimoeForCausalLM": "phimoe",
    "PhiMoEForCausalLM": "phimoe",
    "SmolLM3ForCausalLM": "smollm3",
    "SeedOssForCausalLM": "seed_oss",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5_moe",
    "HunYuanDenseV1ForCausalLM": "hunyuan_v1_dense",
    "HunYuanMoEV1ForCausalLM": "hunyuan_v1_moe",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Starcoder2ForCausalLM": "starcoder2",
    "Exaone4ForCausalLM": "exaone4",
    "ExaoneMoeForCausalLM": "exaone_moe",
    "Dots1ForCausalLM": "dots1",
    "MiniMaxM2ForCausalLM": "minimax_m2",
}
