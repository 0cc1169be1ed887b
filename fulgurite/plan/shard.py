"""One rank's shard of a model: a configuration and a mesh in, a `ModelShard` on the meta device out.

The modules are built, get their number formats, and are sharded by `parallelize` as an engine shards
them; no process is needed for that. Only one layer of each kind is built, so that many meshes can be
compared quickly. A mesh that `parallelize` refuses is refused here with the same message.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fulgurite.errors import FormatError
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.config import LayerConfig, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.load_plan import (
    build_model,
    check_context_parallel,
    check_has_experts,
)
from fulgurite.models.loading.quantized import install_quantized_weight
from fulgurite.models.state_spec import StateSpec
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher
from fulgurite.parallel.experts.placement import Placement
from fulgurite.parallel.mesh import Axis, MeshShape
from fulgurite.parallel.pipeline import PipelineStage, split_stages
from fulgurite.parallel.tensor import parallelize
from fulgurite.plan.memory import QuantizedWeight, RankShapes
from fulgurite.plan.meta_dispatch import MetaAllToAllDispatcher
from fulgurite.quant import QuantTensor
from fulgurite.quant.format import Format
from fulgurite.quant.shapes import check_shape

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
PLANNED_AXES = ("world", "pipeline", "data", "context", "tensor", "expert", "expert_data")


class PlannedMesh:
    """The axes of one rank of a mesh that nobody has started. Its collectives run on meta tensors.

    `nodes`: the node of each rank; empty: all are on one node.
    """

    def __init__(self, shape: MeshShape, rank: int = 0, nodes: tuple[int, ...] = ()) -> None:
        self.shape, self.rank, self.nodes = shape, rank, nodes
        self.device = torch.device("meta")
        axes = {name: self._axis(name) for name in PLANNED_AXES}
        self.world, self.pipeline, self.data = axes["world"], axes["pipeline"], axes["data"]
        self.context, self.tensor = axes["context"], axes["tensor"]
        self.expert, self.expert_data = axes["expert"], axes["expert_data"]

    def _axis(self, name: str) -> Axis:
        ranks = next(group for group in self.shape.groups(name) if self.rank in group)
        index = ranks.index(self.rank)
        group = dist.ProcessGroup(index, len(ranks)) if len(ranks) > 1 else None
        nodes = tuple(self.nodes[rank] for rank in ranks) if self.nodes else ()
        return Axis(name, tuple(ranks), index, group, nodes=nodes)


@dataclass(frozen=True)
class ShardSpec:
    """How a model is sharded. `expert_slots`: of a layer over all ranks, redundant ones included."""

    mesh_shape: MeshShape
    expert_slots: int = 0


@dataclass(frozen=True)
class ModelShard:
    """One rank's shard on the meta device; layer i is like `model.layers[layer_kinds[i]]`.

    `names` are those of the parameters in the unsharded model.
    """

    model: CausalLM
    layer_kinds: tuple[int, ...]
    names: dict[str, str] = field(repr=False)

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
        result: list[tuple[str, Tensor]] = []
        layers: list[list[tuple[str, Tensor]]] = [[] for _ in self.model.layers]
        for current, parameter in self.model.named_parameters():
            name = self.names[current]
            if name.startswith("layers."):
                _, kind, rest = name.split(".", 2)
                layers[int(kind)].append((rest, parameter))
            else:
                result.append((name, parameter))
        for index, layer_kind in enumerate(self.layer_kinds):
            result += [(f"layers.{index}.{name}", tensor) for name, tensor in layers[layer_kind]]
        return result

    def component_bytes(self, stage: PipelineStage | None = None) -> dict[str, int]:
        """Bytes of each component in its number formats; of a pipeline stage or of all layers."""
        bytes = {component: 0 for component, _ in COMPONENTS} | {OTHER_COMPONENT: 0}
        for name, parameter in self.parameters():
            if is_on_stage(name, stage):
                bytes[component_of(name)] += parameter.nbytes
        # Rotary tables belong to no layer.
        bytes[OTHER_COMPONENT] += sum(tensor.nbytes for tensor in self.model.buffers())
        return bytes

    def quantized_weights(self, stage: PipelineStage | None = None) -> list[QuantizedWeight]:
        return [
            QuantizedWeight(name, tensor.numel(), tensor.format)
            for name, tensor in self.parameters()
            if isinstance(tensor, QuantTensor) and is_on_stage(name, stage)
        ]

    def shapes(self, dispatch_buffers: int, stage: PipelineStage | None = None) -> RankShapes:
        """What `plan_fixed_memory` plans: of a pipeline stage, or of all layers."""

        def mark(spec: Any) -> Any:
            return spec if stage is None else replace(spec, is_local=spec.layer_index in stage)

        return RankShapes(
            model=self.model if stage is None else self._stage_model(stage),
            weights=sum(self.component_bytes(stage).values()),
            attention_specs=tuple(mark(spec) for spec in self.attention_specs),
            state_specs=tuple(mark(spec) for spec in self.state_specs),
            quantized=tuple(self.quantized_weights(stage)),
            dispatch_buffers=dispatch_buffers,
        )

    def _stage_model(self, stage: PipelineStage) -> CausalLM:
        """The model with the kinds of layers that a stage has."""
        kinds = sorted({kind for i, kind in enumerate(self.layer_kinds) if i in stage})
        model = copy.copy(self.model)
        model._modules = dict(self.model._modules)
        model.layers = nn.ModuleList(self.model.layers[kind] for kind in kinds)
        model.rotary_index = tuple(self.model.rotary_index[kind] for kind in kinds)
        model.stage = stage
        return model

    def split_stages(self, count: int) -> list[PipelineStage]:
        """The stages of a pipeline, as an engine chooses them; of an unsharded model."""
        layer_bytes = [0] * len(self.layer_kinds)
        first_bytes = 0
        for name, parameter in self.parameters():
            if name.startswith("layers."):
                layer_bytes[int(name.split(".", 2)[1])] += parameter.nbytes
            else:
                first_bytes += parameter.nbytes
        ranges = split_stages(layer_bytes, count, first_bytes)
        return [PipelineStage(i, count, start, stop) for i, (start, stop) in enumerate(ranges)]


def is_on_stage(name: str, stage: PipelineStage | None) -> bool:
    """The first stage has the embedding and the head; every stage has the final norm."""
    if stage is None:
        return True
    if name.startswith("layers."):
        return int(name.split(".", 2)[1]) in stage
    return stage.is_first or name.startswith("norm.")


def component_of(name: str) -> str:
    """The component of a parameter."""
    if ".router." in name or "norm" in name.split(".")[-2]:
        return OTHER_COMPONENT
    return next((component for component, text in COMPONENTS if text in name), OTHER_COMPONENT)


def build_model_shard(
    config: ModelConfig,
    family: ModelFamily,
    spec: ShardSpec,
    format_of: FormatLookup | None = None,
    dispatcher: TokenDispatcher | None = None,
) -> ModelShard:
    """The first rank's shard, which is the largest; ArgumentError if the model can't be sharded so.

    `dispatcher`: what it allocates for tokens on their way to experts; None: as all-to-all does.
    """
    check_has_experts(config, spec.mesh_shape)
    format_of = format_of or uniform_format(None)
    kinds, layer_kinds = _find_layer_kinds(config, family, format_of)
    model = _build_kinds(config, family, [config.layers[index] for index in kinds])
    for name, parameter in list(model.named_parameters()):
        format = format_of(_name_in_model(name, kinds))
        if format is not None and can_quantize(format, parameter):
            install_quantized_weight(model, name, format, None)
    if spec.mesh_shape.context > 1:
        check_context_parallel(model)
    mesh = PlannedMesh(spec.mesh_shape)
    if dispatcher is None and spec.mesh_shape.expert > 1:
        dispatcher = MetaAllToAllDispatcher(mesh.expert)
    sharding = parallelize(
        model,
        mesh,  # type: ignore[arg-type]
        family.sharding_rules,
        dispatcher=dispatcher,
        placement=_planned_placement(
            config, spec, sum(config.layers[index].is_moe for index in kinds)
        ),
    )
    names = {current: shard.name for current, shard in sharding.slices.items()}
    return ModelShard(model.to("meta"), layer_kinds, names)


def _find_layer_kinds(
    config: ModelConfig, family: ModelFamily, format_of: FormatLookup
) -> tuple[list[int], tuple[int, ...]]:
    """The first layer of each kind, and the kind of each layer: by settings and number formats."""
    settings = list(dict.fromkeys(config.layers))
    model = _build_kinds(config, family, settings)
    names = [[name for name, _ in layer.named_parameters()] for layer in model.layers]
    kinds: dict[tuple[object, ...], int] = {}
    layer_kinds, first_layers = [], []
    for index, layer in enumerate(config.layers):
        formats = [format_of(f"layers.{index}.{name}") for name in names[settings.index(layer)]]
        key = (layer, *(None if format is None else format.name for format in formats))
        if key not in kinds:
            kinds[key] = len(kinds)
            first_layers.append(index)
        layer_kinds.append(kinds[key])
    return first_layers, tuple(layer_kinds)


def _build_kinds(config: ModelConfig, family: ModelFamily, layers: list[LayerConfig]) -> CausalLM:
    return build_model(replace(config, layers=tuple(layers)), family, config.dtype)


def _name_in_model(name: str, kinds: list[int]) -> str:
    """The name of a parameter of the first layer of its kind."""
    if not name.startswith("layers."):
        return name
    _, kind, rest = name.split(".", 2)
    return f"layers.{kinds[int(kind)]}.{rest}"


def _planned_placement(config: ModelConfig, spec: ShardSpec, layers: int) -> Placement | None:
    if config.moe is None or spec.mesh_shape.expert == 1:
        return None
    slots_S = torch.arange(spec.expert_slots) % config.moe.num_experts
    return Placement(
        slots_S.expand(layers, -1).clone(), config.moe.num_experts, spec.mesh_shape.expert
    )


def can_quantize(format: Format, tensor: Tensor) -> bool:
    """Whether the format supports the shape of the tensor."""
    try:
        check_shape(format, tensor.shape)
    except FormatError:
        return False
    return True


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
