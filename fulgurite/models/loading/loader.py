"""Loads models: a name, path or checkpoint in, a `CausalLM` with its weights out.

load_model        modules on the meta device, then one tensor at a time to its dtype and device
load_shard        the same for one rank: modules sharded on the meta device, then only this rank's
                  part of each tensor is read
build_random_model   random weights, for benchmarks and tests
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fulgurite.errors import ArgumentError
from fulgurite.models.config import ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.layers import CausalLM
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import Checkpoint, assign_weights, open_checkpoint
from fulgurite.models.loading.fill import fill_parameter
from fulgurite.models.loading.quantized import (
    fill_quantized_parameter,
    load_quantized_weights,
    needs_repacking,
)
from fulgurite.models.weight_mapping import WeightAssignment
from fulgurite.parallel.dispatcher import TokenDispatcher
from fulgurite.parallel.mesh import Mesh
from fulgurite.parallel.placement import Placement
from fulgurite.parallel.sharding import Sharding, ShardSlice
from fulgurite.parallel.tensor import parallelize
from fulgurite.quant import QuantTensor


def load_model(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    keep_quantized: bool = False,
    activations: str | None = None,
) -> CausalLM:
    """Load the model of a folder, a file or a name on the Hub (see hub.py).

    dtype            compute dtype; None: the dtype of the checkpoint
    keep_quantized   keep weights that the file stores quantized (see quantized.py); otherwise they
                     are dequantized to `dtype`
    activations      activation format of quantized weights. None: the fastest on the device.
                     "none": activations are not quantized
    """
    checkpoint = open_checkpoint(hub.resolve_model_path(name))
    return load_checkpoint(
        checkpoint,
        dtype=dtype,
        device=device,
        keep_quantized=keep_quantized,
        activations=activations,
    )


def build_model(config: ModelConfig, family: ModelFamily, dtype: torch.dtype) -> CausalLM:
    """Build the modules on the meta device: shapes and dtypes without memory."""
    with _default_dtype(dtype), torch.device("meta"):
        model = family.build(config)
    assert isinstance(model, CausalLM), f"family {family.name} must build a CausalLM"
    return model


@torch.inference_mode(False)  # parameters must not be inference tensors
def load_checkpoint(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype | None,
    device: torch.device | str,
    keep_quantized: bool = False,
    activations: str | None = None,
) -> CausalLM:
    """Load all weights of an open checkpoint; see `load_model` for the arguments."""
    _check_dtype(dtype)
    model = build_model(checkpoint.config, checkpoint.family, dtype or checkpoint.config.dtype)
    assignments = assign_weights(checkpoint, model)
    filled: set[str] = set()
    if keep_quantized:
        filled = load_quantized_weights(
            model,
            checkpoint.tensors(),
            assignments,
            checkpoint.config,
            device=device,
            activations=activations,
            repack=needs_repacking(device, model.norm.weight.dtype),
        )
    allocate_parameters(model, device)
    shards = {
        name: ShardSlice.full(name, parameter.shape)
        for name, parameter in model.named_parameters()
        if name not in filled
    }
    _fill_parameters(model, checkpoint, assignments, shards)
    return model.eval()


@torch.inference_mode(False)
def load_shard(
    name: str | Path | Checkpoint,
    mesh: Mesh,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    keep_quantized: bool = False,
    activations: str | None = None,
    dispatcher: TokenDispatcher | None = None,
    placement: Placement | None = None,
) -> tuple[CausalLM, Sharding]:
    """Load this rank's shard of a model; nothing else of the checkpoint is read.

    The result equals `load_model` followed by `parallelize`: the sharded model and its `Sharding`.
    """
    _check_dtype(dtype)
    checkpoint = (
        name if isinstance(name, Checkpoint) else open_checkpoint(hub.resolve_model_path(name))
    )
    device = mesh.device if device is None else device
    model, sharding = build_sharded_model(
        checkpoint,
        mesh,
        dtype,
        keep_quantized,
        activations,
        device=device,
        dispatcher=dispatcher,
        placement=placement,
    )
    allocate_parameters(model, device)
    assignments = assign_weights(checkpoint, _build_unsharded(checkpoint, dtype))
    _fill_parameters(model, checkpoint, assignments, sharding.slices)
    for path, parameter in model.named_parameters():
        if isinstance(parameter, QuantTensor):
            parameter.check_scales(path)
    return model.eval(), sharding


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
    if mesh.expert.size > 1 and checkpoint.config.moe is None:
        raise ArgumentError(
            f"expert={mesh.expert.size} needs a model with experts, and this model is dense",
            where=f"{checkpoint.family.name}, {mesh.shape}",
            next="use expert=1; tensor= shards every weight",
        )
    model = _build_unsharded(checkpoint, dtype)
    if keep_quantized:
        target_device = mesh.device if device is None else device
        _add_quantized_weights(model, checkpoint, target_device, activations)
    rules = checkpoint.family.sharding_rules
    return model, parallelize(model, mesh, rules, **parallelize_options)


def build_meta_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    keep_quantized: bool,
    device: torch.device | str = "cpu",
) -> CausalLM:
    """Build the whole model on the meta device, to plan its memory.

    `device` is the device it will be loaded to. Some formats depend on it.
    """
    model = _build_unsharded(checkpoint, dtype)
    if keep_quantized:
        _add_quantized_weights(model, checkpoint, device)
    return model.to("meta")


def _add_quantized_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    device: torch.device | str,
    activations: str | None = None,
) -> None:
    """Replace dense modules by quantized ones on the meta device, as loading to `device` would."""
    load_quantized_weights(
        model,
        checkpoint.tensors(),
        assign_weights(checkpoint, model),
        checkpoint.config,
        device="meta",
        activations=activations,
        repack=needs_repacking(device, model.norm.weight.dtype),
    )


def _build_unsharded(checkpoint: Checkpoint, dtype: torch.dtype | None) -> CausalLM:
    return build_model(checkpoint.config, checkpoint.family, dtype or checkpoint.config.dtype)


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(
            f"dtype={dtype} is not a floating-point dtype", next="try torch.bfloat16"
        )


def _fill_parameters(
    model: nn.Module,
    checkpoint: Checkpoint,
    assignments: dict[str, list[WeightAssignment]],
    shards: dict[str, ShardSlice],
) -> None:
    """Fill the parameters that `shards` names. Its keys are names in the (sharded) model."""
    parameters = dict(model.named_parameters())
    targets = {shard.name: (parameters[name], shard) for name, shard in shards.items()}
    with torch.no_grad():
        for name, tensor in checkpoint.tensors():
            for assignment in assignments.get(name, ()):
                if assignment.parameter not in targets:
                    continue
                parameter, shard = targets[assignment.parameter]
                quantized = isinstance(parameter, QuantTensor)
                fill = fill_quantized_parameter if quantized else fill_parameter
                fill(parameter, shard, tensor, assignment, checkpoint.config)


def allocate_parameters(model: nn.Module, device: torch.device | str) -> None:
    """Replace meta parameters by uninitialized memory on the device, and move buffers there."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, QuantTensor) and not parameter.is_meta:
                continue  # loaded by load_quantized_weights
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


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
