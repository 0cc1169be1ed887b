"""Loads models: a name, path or checkpoint in, a `CausalLM` with its weights out.

load_model        modules on the meta device, then one parameter at a time to its dtype and device
load_shard        the same for one rank: modules sharded on the meta device, then only this rank's
                  part of each tensor is read
build_random_model   random weights, for benchmarks and tests

Parameters are filled in the order of the file. At most one of them has a temporary copy at a time.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.device import resolve_dtype
from fulgurite.kernels.gemm.modules import QuantLinear
from fulgurite.kernels.quantize.row_chunks import quantize_in_row_chunks
from fulgurite.logs import LOG
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.layers import CausalLM
from fulgurite.models.load_report import LoadReport
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import Checkpoint, open_checkpoint
from fulgurite.models.loading.fill import fill_parameter
from fulgurite.models.loading.load_plan import LoadOptions, LoadPlan, build_model, plan_load
from fulgurite.models.loading.quantized import load_packed_parameter
from fulgurite.models.loading.transformers_weights import load_transformers
from fulgurite.models.transformers_backend.family import TransformersFamily
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher
from fulgurite.parallel.experts.placement import Placement
from fulgurite.parallel.mesh import Mesh
from fulgurite.parallel.sharding import Sharding
from fulgurite.quant import QuantTensor
from fulgurite.quant.config import QuantConfig


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str = "cpu",
    keep_quantized: bool = False,
    activations: str | None = None,
    quantize: str | QuantConfig | None = None,
    implementation: str = "auto",
) -> CausalLM:
    """Load the model of a folder, a file or a name on the Hub (see hub.py).

    dtype            compute dtype, also by its name; None: the dtype of the checkpoint
    keep_quantized   keep weights that the file stores quantized (see quantized.py); otherwise they
                     are dequantized to `dtype`
    activations      activation format of quantized weights. None: what the checkpoint prescribes,
                     as far as the device has kernels for it. "none": not quantized
    quantize         quantize the dense linears and experts while loading: a name or config of
                     `fulgurite.quantize`
    implementation   whose modules: `fulgurite`, `transformers`, or `auto`: fulgurite's if it has the
                     architecture
    """
    with open_checkpoint(hub.resolve_model_path(name), implementation) as checkpoint:
        return load_checkpoint(
            checkpoint,
            dtype=resolve_dtype(dtype),
            device=device,
            keep_quantized=keep_quantized,
            activations=activations,
            quantize=quantize,
        )


def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    keep_quantized: bool = False,
    activations: str | None = None,
    quantize: str | QuantConfig | None = None,
) -> CausalLM:
    """Load all weights of an open checkpoint; see `load_model` for the arguments."""
    options = LoadOptions(dtype, device, keep_quantized, activations, quantize)
    return load_planned(plan_load(checkpoint, options))


def load_shard(
    name: str | Path | Checkpoint,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_quantized: bool = False,
    activations: str | None = None,
    quantize: str | QuantConfig | None = None,
    dispatcher: TokenDispatcher | None = None,
    placement: Placement | None = None,
) -> tuple[CausalLM, Sharding]:
    """Load this rank's shard of a model; nothing else of the checkpoint is read.

    The result equals `load_model` followed by `parallelize`: the sharded model and its `Sharding`.
    """
    if not isinstance(name, Checkpoint):
        with open_checkpoint(hub.resolve_model_path(name)) as checkpoint:
            return load_shard(
                checkpoint,
                mesh,
                dtype=dtype,
                device=device,
                keep_quantized=keep_quantized,
                activations=activations,
                quantize=quantize,
                dispatcher=dispatcher,
                placement=placement,
            )
    device = mesh.device if device is None else device
    options = LoadOptions(dtype, device, keep_quantized, activations, quantize)
    plan = plan_load(name, options, mesh, dispatcher=dispatcher, placement=placement)
    assert plan.sharding is not None, "a plan with a mesh is sharded"
    return load_planned(plan), plan.sharding


def build_sharded_model(
    checkpoint: Checkpoint,
    mesh: Mesh,
    dtype: torch.dtype | None,
    keep_quantized: bool,
    activations: str | None = None,
    device: torch.device | str | None = None,
    **parallelize_options: Any,
) -> tuple[CausalLM, Sharding]:
    """Build this rank's shard on the meta device: shapes, dtypes and formats without memory.

    `device` is the device it will be loaded to (None: the mesh's). Some formats depend on it.
    """
    device = mesh.device if device is None else device
    options = LoadOptions(dtype, device, keep_quantized, activations)
    plan = plan_load(checkpoint, options, mesh, **parallelize_options)
    assert plan.sharding is not None, "a plan with a mesh is sharded"
    return plan.model, plan.sharding


def build_meta_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    keep_quantized: bool,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """Build the whole model on the meta device, to plan its memory.

    `device` is the device it will be loaded to. Some formats depend on it.
    """
    plan = plan_load(checkpoint, LoadOptions(dtype, device, keep_quantized))
    return plan.model.to("meta")


@torch.inference_mode(False)  # parameters must not be inference tensors
@torch.no_grad()
def load_planned(plan: LoadPlan) -> CausalLM:
    """Read the weights of a plan into its model."""
    checkpoint, options, model = plan.checkpoint, plan.options, plan.model
    start = time.perf_counter()
    if isinstance(checkpoint.family, TransformersFamily):
        model = load_transformers(plan)
    else:
        for name in _order_by_file(plan):
            _load_parameter(plan, name)
        model.to(options.device)  # buffers
    model.load_report = _report(plan, model, time.perf_counter() - start)
    for line in str(model.load_report).splitlines():
        LOG.log(_level(line), "load: %s", line)
    return model.eval()


def _order_by_file(plan: LoadPlan) -> list[str]:
    """The parameters in the order of their first tensor in the file."""
    entries = plan.checkpoint.entries().values()
    positions = {entry.name: position for position, entry in enumerate(entries)}

    def position(name: str) -> int:
        sources = plan.sources[plan.shards[name].name]
        return min((positions[source.entry.name] for source in sources), default=0)

    return sorted(plan.shards, key=position)


def _load_parameter(plan: LoadPlan, name: str) -> None:
    """Read one parameter, or this rank's shard of it."""
    device, config = plan.options.device, plan.checkpoint.config
    path, _, last = name.rpartition(".")
    module = plan.model.get_submodule(path)
    parameter, shard = module.get_parameter(last), plan.shards[name]
    sources = plan.sources[shard.name]
    assert parameter.is_meta, f"{name} already has memory"
    if isinstance(parameter, QuantTensor) and name not in plan.from_dense:
        weight, scale = load_packed_parameter(parameter, shard, sources, config, device)
        if isinstance(module, QuantLinear) and module.input_scale is not None:
            module.input_scale = scale
        setattr(module, last, nn.Parameter(weight, requires_grad=False))
        return
    dense = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    for source in sources:
        fill_parameter(dense, shard, source.entry.load(), source.assignment, config)
    if isinstance(parameter, QuantTensor):
        quantized = quantize_in_row_chunks(dense, parameter.format).check_scales(name)
        setattr(module, last, nn.Parameter(quantized, requires_grad=False))
    else:
        setattr(module, last, nn.Parameter(dense))


def _report(plan: LoadPlan, model: CausalLM, seconds: float) -> LoadReport:
    formats: dict[str, int] = {}
    unused: list[str] = []
    for name, parameter in model.named_parameters():
        is_quantized = isinstance(parameter, QuantTensor)
        key = parameter.format.name if is_quantized else _dtype_name(parameter)
        formats[key] = formats.get(key, 0) + parameter.nbytes
        sources = plan.sources[plan.shards[name].name] if name in plan.shards else ()
        if parameter.dim() == 3 and any(source.entry.has_input_scale for source in sources):
            unused.append(name)
    return LoadReport(
        plan.checkpoint.quantization.method,
        formats,
        dict(plan.dequantized),
        tuple(unused),
        seconds,
        getattr(plan.checkpoint.source, "file_opens", 1),
    )


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _level(line: str) -> int:
    """Weights that could not stay quantized are a warning."""
    return logging.WARNING if line.startswith("dequantized") else logging.INFO


def allocate_parameters(model: nn.Module, device: torch.device | str) -> None:
    """Replace meta parameters by uninitialized memory on the device, and move buffers there."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            assert parameter.is_meta, f"{path}.{name} already has memory"
            memory = torch.empty_like(parameter, device=device)
            quantized = isinstance(parameter, QuantTensor)
            setattr(module, name, nn.Parameter(memory, requires_grad=not quantized))
    model.to(device)


def build_random_model(
    config: ModelConfig,
    family: ModelFamily,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    std: float = 0.02,
) -> CausalLM:
    """Build a model with random weights, for benchmarks and tests. Norm weights are about 1."""
    model = build_model(config, family, dtype or config.dtype)
    allocate_parameters(model, device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0.0, std, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return model.eval()
