"""Plans a load: an open checkpoint and options in, a model on the meta device out.

    modules on meta ─ formats of the file ─▶ quantized modules ─ parallelize ─▶ this rank's shard
       ─ quantize= ─▶ formats of dense linears ─▶ LoadPlan: model, sources, shards

The model of a plan has the shapes, dtypes and number formats that will be held. So its memory can be
planned before any weight is read. `loader.py` then fills it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fulgurite.errors import ArgumentError, FormatError
from fulgurite.kernels.gemm.reference import UNQUANTIZED
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading.checkpoint import Checkpoint, KVScales
from fulgurite.models.loading.parameter_formats import choose_parameter_formats
from fulgurite.models.loading.quantized import install_quantized_weight, needs_repacking
from fulgurite.models.loading.skip_init import SkipInitialization
from fulgurite.models.loading.weight_assignment import (
    ParameterSource,
    find_sources,
    find_transformers_sources,
)
from fulgurite.models.pipeline_stage import choose_stage, keep_stage
from fulgurite.models.transformers_backend.family import TransformersFamily
from fulgurite.models.transformers_backend.model import TransformersModel
from fulgurite.parallel.mesh import Mesh, MeshShape
from fulgurite.parallel.sharding import Sharding, ShardSlice
from fulgurite.parallel.tensor import parallelize
from fulgurite.quant import get_device_features, require_native, resolve_format
from fulgurite.quant.config import QuantConfig
from fulgurite.quant.shapes import check_shape
from fulgurite.quantize import DEFAULT_SKIP, resolve_quant_config, select_layers


@dataclass(frozen=True)
class LoadOptions:
    """How a checkpoint is loaded.

    dtype            of weights that are not quantized; None: the dtype of the checkpoint
    device           where the weights go
    keep_quantized   keep weights that the file stores quantized; otherwise they are dequantized
    activations      activation format of quantized weights, with scales computed on the fly. None:
                     what the checkpoint prescribes, static scales included, as far as the device
                     has kernels for it. "none": not quantized
    quantize         quantize the dense linears and experts while loading, tensor by tensor
    """

    dtype: torch.dtype | None = None
    device: torch.device | str = "cpu"
    keep_quantized: bool = False
    activations: str | None = None
    quantize: str | QuantConfig | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ArgumentError(
                f"dtype={self.dtype} is not a floating-point dtype", next="try torch.bfloat16"
            )


@dataclass
class LoadPlan:
    """A model on the meta device, and where its parameters come from.

    sources         checkpoint tensors by the parameter's name in the unsharded model
    shards          the slice that this rank holds, by the parameter's current name
    dequantized     parameters that are held dense, though stored or to be held quantized -> why
    from_dense      parameters that are quantized while loading
    """

    checkpoint: Checkpoint
    options: LoadOptions
    model: CausalLM
    sources: Mapping[str, Sequence[ParameterSource]] = field(default_factory=dict)
    shards: dict[str, ShardSlice] = field(default_factory=dict)
    dequantized: dict[str, str] = field(default_factory=dict)
    from_dense: set[str] = field(default_factory=set)
    sharding: Sharding | None = None

    @property
    def temporary_bytes(self) -> int:
        """Memory of the largest dense weight that is quantized while loading."""
        sizes = (
            parameter.numel() * parameter.dtype.itemsize
            for name, parameter in self.model.named_parameters()
            if name in self.from_dense
        )
        return max(sizes, default=0)

    @torch.inference_mode(False)
    def build_meta_model(self) -> CausalLM:
        """A copy of the model with all of it on the meta device, to plan its activations."""
        if isinstance(self.checkpoint.family, TransformersFamily):
            return self.model.to("meta")  # loading builds another one
        return copy.deepcopy(self.model).to("meta")


@torch.inference_mode(False)  # parameters must not be inference tensors
def plan_load(
    checkpoint: Checkpoint,
    options: LoadOptions,
    mesh: Mesh | None = None,
    **parallelize_options: Any,
) -> LoadPlan:
    """Build this rank's model on the meta device: shapes, dtypes and formats without memory."""
    if mesh is not None:
        _check_mesh(checkpoint, mesh)
    dtype = options.dtype or checkpoint.config.dtype
    model = build_model(checkpoint.config, checkpoint.family, dtype)
    plan = LoadPlan(checkpoint, options, model)
    if isinstance(checkpoint.family, TransformersFamily):
        if options.quantize is not None:
            raise ArgumentError(
                f"{checkpoint.family.architecture} runs through transformers' modules, which are not "
                "quantized on load",
                where=str(checkpoint.path),
                next="leave out quantize=",
            )
        return _plan_transformers(plan)
    plan.sources = find_sources(checkpoint, model)
    if options.keep_quantized:
        _install_stored_formats(plan)
    selected = _select_dense_weights(plan)
    apply_kv_scales(model, checkpoint.read_kv_scales())
    stage = None
    if mesh is not None and mesh.shape.context > 1:
        check_context_parallel(model)
    if mesh is not None and mesh.shape.pipeline > 1:
        stage = choose_stage(model, mesh.pipeline.index, mesh.pipeline.size)
    if mesh is None:
        plan.shards = {n: ShardSlice.full(n, p.shape) for n, p in model.named_parameters()}
    else:
        rules = checkpoint.family.sharding_rules
        plan.sharding = parallelize(model, mesh, rules, **parallelize_options)
        plan.shards = plan.sharding.slices
    if stage is not None:  # after all layers are sharded, so that MoE layers keep their numbers
        keep_stage(model, stage)
        current = {name for name, _ in model.named_parameters()}
        plan.shards = {name: slice for name, slice in plan.shards.items() if name in current}
        full = {shard.name for shard in plan.shards.values()}
        plan.dequantized = {n: why for n, why in plan.dequantized.items() if n in full}
    _install_dense_formats(plan, selected)
    return plan


def _plan_transformers(plan: LoadPlan) -> LoadPlan:
    """Modules of transformers: linears stay packed where the file names them as the modules do."""
    if plan.options.keep_quantized:
        plan.sources, plan.dequantized = find_transformers_sources(plan.checkpoint, plan.model)
        _install_stored_formats(plan)
        packed = plan.sources.keys() - plan.dequantized.keys()
        plan.shards = {
            name: ShardSlice.full(name, plan.model.get_parameter(name).shape)
            for name in plan.sources
            if name in packed
        }
    apply_kv_scales(plan.model, plan.checkpoint.read_kv_scales())
    return plan


def build_model(config: ModelConfig, family: ModelFamily, dtype: torch.dtype) -> CausalLM:
    """Build the modules on the meta device: shapes and dtypes without memory."""
    with _default_dtype(dtype), torch.device("meta"), SkipInitialization():
        model = family.build(config)
    assert isinstance(model, CausalLM), f"family {family.name} must build a CausalLM"
    return model


def _check_mesh(checkpoint: Checkpoint, mesh: Mesh) -> None:
    checkpoint.check_can_shard()
    check_has_experts(checkpoint.config, mesh.shape)


def check_context_parallel(model: CausalLM) -> None:
    """ArgumentError for layers that need all tokens of a sequence on one rank."""
    if model.state_specs:
        raise ArgumentError(
            f"context_parallel does not support {model.config.family}: its layers with states (linear "
            "attention, convolutions) read the tokens of a sequence in order",
            next="use context_parallel=1; pipeline= and tensor= work",
        )


def check_has_experts(config: ModelConfig, shape: MeshShape) -> None:
    """ArgumentError for an expert axis over a model without experts."""
    if shape.expert > 1 and config.moe is None:
        raise ArgumentError(
            f"expert={shape.expert} needs a model with experts, and this model is dense",
            where=f"{config.family}, {shape}",
            next="use expert=1; tensor= shards every weight",
        )


def _install_stored_formats(plan: LoadPlan) -> None:
    """Replace dense modules by quantized ones where the file stores quantized weights."""
    model, options, config = plan.model, plan.options, plan.checkpoint.config
    repack = needs_repacking(options.device, model.dtype)
    choices = choose_parameter_formats(model, plan.sources, config, repack)
    for name, choice in choices.items():
        if choice.format is None:
            plan.dequantized[name] = choice.reason
            continue
        source = plan.sources[name][0]
        has_input_scale = source.entry.has_input_scale and options.activations is None
        activations = _resolve_activations(plan, source)
        install_quantized_weight(model, name, choice.format, activations, has_input_scale)


def _resolve_activations(plan: LoadPlan, source: ParameterSource) -> str | None:
    """The activation format of a weight; None: the fastest on the device.

    A checkpoint may declare weight-only quantization. GPUs follow it. CPUs multiply integers with
    int8 activations anyway.
    """
    options, entry = plan.options, source.entry
    if options.activations is not None or entry.activations is not None:
        return options.activations or entry.activations
    scheme = plan.checkpoint.quantization.find_scheme(entry.name.removesuffix(".weight"))
    is_weight_only = scheme is not None and scheme.activations == "none"
    return UNQUANTIZED if is_weight_only and torch.device(options.device).type != "cpu" else None


# ---- quantize= -----------------------------------------------------------------------------------


def _select_dense_weights(plan: LoadPlan) -> dict[str, QuantConfig]:
    """The dense parameters, by name in the unsharded model, that are quantized while loading."""
    if plan.options.quantize is None:
        return {}
    config = resolve_quant_config(plan.options.quantize)
    if config.static_activations:
        raise ArgumentError(
            "static activation scales need calibration batches, and a load has none",
            next="load the model, then call fulgurite.quantize(model, ..., calibrate=batches)",
        )
    layers, skipped = select_layers(plan.model, config, DEFAULT_SKIP, allow_meta=True)
    skipped_names = {parameter.name for parameter in skipped}
    names = [name for name, _ in plan.model.named_parameters()]
    return {
        name: config
        for name in names
        if name.rpartition(".")[0] in layers and name not in skipped_names
        if plan.model.get_parameter(name).dim() > 1
    }


def _install_dense_formats(plan: LoadPlan, selected: Mapping[str, QuantConfig]) -> None:
    for name, shard in plan.shards.items():
        config = selected.get(shard.name)
        if config is None:
            continue
        shape = plan.model.get_parameter(name).shape
        format = resolve_format(config.weights)
        try:
            check_shape(format, shape)
        except FormatError as error:  # blocks that end inside this rank's shard
            plan.dequantized[name] = f"quantize={config.weights!r}: {error.what}"
            continue
        if config.activations not in (None, UNQUANTIZED):
            entry = resolve_format(config.activations)
            check_shape(entry, shape, where=f"the input of {name}")
            if torch.device(plan.options.device).type == "cuda":
                require_native(entry, get_device_features(torch.device(plan.options.device)))
        install_quantized_weight(plan.model, name, format, config.activations)
        plan.from_dense.add(name)


# ---- KV-cache scales -----------------------------------------------------------------------------


def apply_kv_scales(model: CausalLM, scales: Mapping[int, KVScales]) -> None:
    """Set the factors of an FP8 KV cache in the attention specs."""
    if isinstance(model, TransformersModel):
        model.specs = tuple(_scale_spec(spec, scales) for spec in model.specs)
        return
    for module in model.modules():
        spec = getattr(module, "spec", None)
        if isinstance(spec, AttentionSpec):
            module.spec = _scale_spec(spec, scales)


def _scale_spec(spec: AttentionSpec, scales: Mapping[int, KVScales]) -> AttentionSpec:
    found = scales.get(spec.layer_index)
    if found is None:
        return spec
    return replace(spec, key_scale=found.key, value_scale=found.value)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
