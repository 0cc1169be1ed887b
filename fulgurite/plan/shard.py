"""One rank's shard of a model: a model's configuration and a mesh in, a smaller meta model out.

A shard is itself a model: it has fewer heads, narrower MLPs, fewer experts and a slice of the
vocabulary. It is built on the meta device with one layer of each kind, so that the functions of
memory.py plan it like any other model.

    data      every rank has all dense weights and requests of its own
    tensor    heads, intermediate sizes and vocabulary are sharded; key heads too if there are enough
    expert    whole experts are distributed; with expert=1 each expert is sharded over the tensor axis

The rules are those of `parallel.tensor.parallelize`, which shards the real model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError, FormatError
from fulgurite.models.config import ModelConfig, MoEConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.kv_cache import AttentionSpec
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.loader import build_model
from fulgurite.models.moe import MoE
from fulgurite.models.state_spec import StateSpec
from fulgurite.parallel.collectives import shard_range
from fulgurite.parallel.mesh import MeshShape
from fulgurite.parallel.tensor import shard_heads
from fulgurite.plan.memory import QuantizedWeight
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape, data_shape, scale_shape

FormatLookup = Callable[[str], Format | None]  # parameter name → its format; None: not quantized
# Components of a model, and a substring of their parameters' names. The first match counts.
COMPONENTS = (
    ("experts", ".feed_forward.experts."),
    ("attention", ".attention."),
    ("dense MLP", ".feed_forward."),
    ("embedding", "embed_tokens."),
    ("embedding", "lm_head."),
)
OTHER_COMPONENT = "norms, routers"
# KVUpProjection of DeepSeek is read by rows and by columns; a SharedExpertGate has one row.
NEVER_QUANTIZED = (".kv_b_proj.", ".output_gate.")


@dataclass(frozen=True)
class ShardSpec:
    """How a model is sharded.

    expert_slots   slots for the experts of a layer over all ranks, redundant ones included
    alignment      quantized weights are sharded at multiples of this
    """

    mesh_shape: MeshShape
    expert_slots: int = 0
    alignment: int = 1


def find_sharding_error(config: ModelConfig, spec: ShardSpec) -> str:
    """Why a model can't be sharded like this; empty if it can."""
    tensor, expert, moe = spec.mesh_shape.tensor, spec.mesh_shape.expert, config.moe
    sizes = {"vocabulary": config.vocab_size}
    if moe is None or not all(layer.is_moe for layer in config.layers):
        sizes["MLP"] = config.intermediate_size
    if moe is None:
        if expert > 1:
            return f"there are no experts to distribute over {expert} ranks"
    elif expert == 1:
        sizes["expert"] = moe.intermediate_size
    elif spec.expert_slots < expert:
        return f"{moe.num_experts} experts are too few for {expert} ranks"
    for name, size in sizes.items():
        if (tensor - 1) * _largest_shard(size, tensor, spec.alignment) >= size:
            return f"{name} of size {size} can't be sharded over {tensor} ranks"
    return ""


def shard_config(config: ModelConfig, spec: ShardSpec) -> ModelConfig:
    """The configuration of the first rank's shard, which is the largest."""
    error = find_sharding_error(config, spec)
    if error:
        raise ArgumentError(error, where=str(spec.mesh_shape))
    tensor, alignment, moe = spec.mesh_shape.tensor, spec.alignment, config.moe
    num_heads, num_kv_heads = local_heads(config, tensor)
    if moe is not None:
        # Distributed experts are whole, and so is the shared expert.
        expert_shards = tensor if spec.mesh_shape.expert == 1 else 1
        shared_size = moe.shared_intermediate_size
        moe = MoEConfig(
            num_experts=spec.expert_slots // spec.mesh_shape.expert,
            top_k=1,  # this model is never routed
            intermediate_size=_largest_shard(moe.intermediate_size, expert_shards, alignment),
            shared_intermediate_size=_largest_shard(shared_size, expert_shards, alignment),
            shared_expert_gate=moe.shared_expert_gate,
        )
    return replace(
        config,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=_largest_shard(config.intermediate_size, tensor, alignment),
        vocab_size=_largest_shard(config.vocab_size, tensor, 1),
        moe=moe,
    )


def local_heads(config: ModelConfig, tensor: int) -> tuple[int, int]:
    """The first rank's query and key heads; all of them if they can't be sharded evenly."""
    num_kv_heads = config.num_heads if config.mla is not None else config.num_kv_heads
    ranges = shard_heads(config.num_heads, num_kv_heads, 0, tensor)
    if ranges is None:
        return config.num_heads, config.num_kv_heads
    (_, num_heads), _ = ranges
    return num_heads, max(1, config.num_kv_heads // tensor)


def _largest_shard(size: int, ranks: int, alignment: int) -> int:
    return shard_range(size, 0, ranks, alignment)[1] if ranks > 1 else size


@dataclass(frozen=True)
class ModelShard:
    """One rank's shard on the meta device; layer i is like `model.layers[layer_kinds[i]]`."""

    model: CausalLM
    layer_kinds: tuple[int, ...]

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention of every layer that has it."""
        return tuple(spec for spec in self._specs() if isinstance(spec, AttentionSpec))

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The states of every other layer."""
        return tuple(spec for spec in self._specs() if isinstance(spec, StateSpec))

    def _specs(self) -> Iterator[AttentionSpec | StateSpec]:
        specs = [layer.attention.spec for layer in self.model.layers]
        for index, kind in enumerate(self.layer_kinds):
            yield replace(specs[kind], layer_index=index)

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Every parameter of every layer by its full name; layers of a kind share the tensors."""
        result = []
        layers = [list(layer.named_parameters()) for layer in self.model.layers]
        for name, parameter in self.model.named_parameters():
            if not name.startswith("layers."):
                result.append((name, parameter))
        for index, kind in enumerate(self.layer_kinds):
            result += [(f"layers.{index}.{name}", tensor) for name, tensor in layers[kind]]
        return result

    def component_bytes(self, format_of: FormatLookup) -> dict[str, int]:
        """Bytes of each component, quantized where `format_of` says so and the shape allows it."""
        bytes = {component: 0 for component, _ in COMPONENTS} | {OTHER_COMPONENT: 0}
        for name, parameter in self.parameters():
            bytes[component_of(name)] += quantized_bytes(parameter, format_of(name))
        # Rotary tables belong to no layer.
        bytes[OTHER_COMPONENT] += sum(tensor.nbytes for tensor in self.model.buffers())
        return bytes

    def quantized_weights(self, format_of: FormatLookup) -> list[QuantizedWeight]:
        parameters = ((name, tensor, format_of(name)) for name, tensor in self.parameters())
        return [
            QuantizedWeight(name, tensor.numel(), format)
            for name, tensor, format in parameters
            if format is not None and can_quantize(format, tensor)
        ]


def component_of(name: str) -> str:
    """The component of a parameter."""
    if ".router." in name or "norm" in name.split(".")[-2]:
        return OTHER_COMPONENT
    return next((component for component, text in COMPONENTS if text in name), OTHER_COMPONENT)


def quantized_bytes(tensor: Tensor, format: Format | None) -> int:
    """Bytes of a weight in a format with its scales; unquantized if its shape does not allow it."""
    if format is None or not can_quantize(format, tensor):
        return tensor.nbytes
    total = math.prod(data_shape(format, tensor.shape)) * format.data_dtype.itemsize
    for scale in format.separate_scales:
        total += math.prod(scale_shape(scale, tensor.shape)) * scale.dtype.itemsize
    return total


def can_quantize(format: Format, tensor: Tensor) -> bool:
    """Whether the format supports the shape of the tensor."""
    try:
        check_shape(format, tensor.shape)
    except FormatError:
        return False
    return True


def build_model_shard(
    config: ModelConfig, family: ModelFamily, spec: ShardSpec, expert_rows: int = 0
) -> ModelShard:
    """The first rank's shard; its experts compute `expert_rows` rows in the largest step."""
    local_config = shard_config(config, spec)
    kinds = list(dict.fromkeys(local_config.layers))
    model = build_model(replace(local_config, layers=tuple(kinds)), family, config.dtype)
    if config.moe is not None:
        for layer in model.layers:
            if isinstance(layer.feed_forward, MoE):
                layer.feed_forward = MetaMoE(layer.feed_forward, config.moe, expert_rows)
    return ModelShard(model.to("meta"), tuple(kinds.index(layer) for layer in local_config.layers))


class MetaMoE(nn.Module):
    """A mixture of experts that allocates the buffers of a real one and computes nothing.

    The router has all experts of the model, `experts` only those of this rank.
    """

    def __init__(self, local: MoE, config: MoEConfig, num_rows: int) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.num_rows = config.num_experts, config.top_k, num_rows
        self.router = nn.Module()
        for name, parameter in local.router.named_parameters():
            full = parameter.new_empty(config.num_experts, *parameter.shape[1:])
            self.router.register_parameter(name, nn.Parameter(full))
        self.experts, self.shared_expert = local.experts, local.shared_expert

    def forward(self, x_TD: Tensor) -> Tensor:
        tokens, hidden = x_TD.shape
        logits_TE = x_TD.new_empty(tokens, self.num_experts, dtype=torch.float32)
        routes = [
            logits_TE.new_empty(tokens, self.top_k, dtype=dtype)
            for dtype in (torch.float32, torch.int64)
        ]
        del logits_TE
        gate_up_R2I = x_TD.new_empty(self.num_rows, self.experts.gate_up_proj.shape[1])
        act_RI = x_TD.new_empty(self.num_rows, self.experts.down_proj.shape[2])
        del gate_up_R2I
        y_RD = x_TD.new_empty(self.num_rows, hidden)
        del act_RI
        out_TD = x_TD.new_empty(tokens, hidden)
        del y_RD, routes
        return out_TD if self.shared_expert is None else out_TD + self.shared_expert(x_TD)


def uniform_format(format: Format | None, experts_only: bool = False) -> FormatLookup:
    """One format for every linear of the layers, or for experts only; the rest is not quantized."""

    def format_of(name: str) -> Format | None:
        if ".experts." in name:
            return None if name.endswith("bias") else format
        is_linear = name.startswith("layers.") and name.endswith(".weight")
        is_dense = component_of(name) == OTHER_COMPONENT or any(
            text in name for text in NEVER_QUANTIZED
        )
        return format if is_linear and not is_dense and not experts_only else None

    return format_of
