"""Weights that stay quantized while loading: GGUF blocks, FP8 and other quantized checkpoints.

In: a model on the meta device, the weight assignments and the memory-mapped tensors. Out: the same
model, in which every linear and embedding with a quantized weight in the file is a `QuantLinear` or
`QuantEmbedding`; and the names of the parameters that are filled by that.

Weights keep the format of the file, with one exception: on GPUs with 16-bit activations, GGUF
blocks are repacked into grouped integers (`quant/repack.py`), which the kernels read. A weight
stays quantized if it fills a whole 2-D parameter and its conversion only selects or reorders rows
(`ROW_SELECTIONS`). Stacked experts are handled by `quantized_experts.py`. All other tensors (norms,
biases) are dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from fulgurite.kernels.gemm.modules import QuantEmbedding, QuantLinear, quantizable_parameters
from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.loading.checkpoint_tensor import (
    CheckpointTensor,
    Slices,
    from_dense,
    full_slices,
)
from fulgurite.models.loading.fill import find_target_ranges, intersect_ranges, read_converted
from fulgurite.models.loading.quantized_experts import ExpertStacks, find_expert_source
from fulgurite.models.weight_mapping import Convert, WeightAssignment, WeightMapping
from fulgurite.parallel.sharding import ShardSlice
from fulgurite.quant import QuantTensor, repack_gguf
from fulgurite.quant.files.gguf import FORMAT_OF_GGUF_TYPE

# Conversions that only select or reorder rows, so that packed rows need no unpacking.
ROW_SELECTIONS: tuple[Convert, ...] = (
    weight_mapping.identity,
    weight_mapping.slice_q,
    weight_mapping.slice_k,
    weight_mapping.slice_v,
    weight_mapping.slice_first_half,
    weight_mapping.slice_second_half,
    weight_mapping.unpermute_rope,
)
REPACKED_DTYPES = (torch.bfloat16, torch.float16)


def load_quantized_weights(
    model: nn.Module,
    tensors: Iterable[tuple[str, CheckpointTensor]],
    assignments: Mapping[str, Sequence[WeightAssignment]],
    config: ModelConfig,
    *,
    device: torch.device | str,
    activations: str | None = None,
    repack: bool = False,
) -> set[str]:
    """Load the weights that stay quantized; returns the names of the parameters they fill.

    `repack`: repack GGUF blocks into grouped integers.
    """
    parameters = dict(model.named_parameters())
    stacks = ExpertStacks(assignments, config, device, repack)
    filled: set[str] = set()
    shapes_only = torch.device(device).type == "meta"
    for name, tensor in tensors:
        if shapes_only:
            tensor = replace(tensor, data=tensor.data.to("meta"))
        for assignment in assignments.get(name, ()):
            target = parameters[assignment.parameter]
            if target.dim() == 3:
                stacks.add(tensor, assignment, target)
                continue
            weight = build_quantized_weight(tensor, assignment.mapping, config, target.dtype)
            if weight is None or weight.shape != target.shape:
                continue
            if not shapes_only:
                weight.check_scales(name)
            weight = repack_gguf(weight.to(device)) if repack else weight.to(device)
            if _replace_dense_module(model, assignment.parameter, weight, activations):
                filled.add(assignment.parameter)
    for name, weight in stacks.complete().items():
        if not shapes_only:
            weight.check_scales(name)
        if _set_expert_weight(model, name, weight, activations):
            filled.add(name)
    return filled


def needs_repacking(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether the kernels of a device read GGUF blocks only as grouped integers."""
    return torch.device(device).type == "cuda" and dtype in REPACKED_DTYPES


def fill_quantized_parameter(
    parameter: QuantTensor,
    shard: ShardSlice,
    tensor: CheckpointTensor,
    assignment: WeightAssignment,
    config: ModelConfig,
) -> None:
    """Copy the blocks of a checkpoint tensor that belong to this shard into its parameter."""
    mapping, is_stack = assignment.mapping, parameter.dim() == 3
    if is_stack:
        source = find_expert_source(tensor, mapping)
    else:
        source = find_quantized_source(tensor, mapping, parameter.dtype)
    assert source is not None, f"{shard.name} is quantized, and {tensor.name} is not"
    weight, convert = source
    if weight.format is not parameter.format:
        weight = repack_gguf(weight)
    target_ranges = find_target_ranges(mapping.target_view, shard.shape, config, assignment.expert)
    for source_slices, target_slices in intersect_ranges(target_ranges, shard.ranges):
        target = parameter[target_slices]
        if is_stack and len(tensor.shape) == 2:  # the tensor of a single expert
            target, source_slices = target[0], source_slices[1:]
        target.copy_(_slice_converted(weight, convert, config, source_slices))


def _slice_converted(
    weight: QuantTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> QuantTensor:
    """`convert(weight)[slices]`, applied to the packed data and to each scale."""
    if convert is weight_mapping.identity:
        return weight[slices]
    *rows, columns = slices
    selected = weight.map(
        lambda part: read_converted(
            from_dense("", part), convert, config, (*rows, slice(0, part.shape[-1]))
        )
    )
    return selected[(*full_slices(selected.shape[:-1]), columns)]


def build_quantized_weight(
    tensor: CheckpointTensor, mapping: WeightMapping, config: ModelConfig, dtype: torch.dtype
) -> QuantTensor | None:
    """The quantized weight of a checkpoint tensor, or None if it has to be dequantized."""
    source = find_quantized_source(tensor, mapping, dtype)
    if source is None:
        return None
    weight, convert = source
    if convert is weight_mapping.identity:
        return weight
    return weight.map(lambda part: convert(part, config))


def find_quantized_source(
    tensor: CheckpointTensor, mapping: WeightMapping, dtype: torch.dtype
) -> tuple[QuantTensor, Convert] | None:
    """A checkpoint tensor as a quantized weight, and the conversion of its packed rows."""
    if mapping.target_view is not weight_mapping.whole_parameter or len(tensor.shape) != 2:
        return None
    convert = mapping.convert
    if isinstance(tensor.data, QuantTensor):
        return (tensor.data.to(dtype), convert) if convert is weight_mapping.identity else None
    if tensor.format not in FORMAT_OF_GGUF_TYPE or convert not in ROW_SELECTIONS:
        return None
    return QuantTensor(FORMAT_OF_GGUF_TYPE[tensor.format], tensor.data, {}, dtype), convert


def _replace_dense_module(
    model: nn.Module, parameter: str, weight: QuantTensor, activations: str | None
) -> bool:
    """Replace the linear or embedding that owns the parameter; False for any other module."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    quantized: nn.Module
    if name != "weight":
        return False
    if type(module) is nn.Linear:
        quantized = QuantLinear(weight, None, activations)
        quantized.bias = module.bias  # still on meta; filled later like other dense parameters
    elif type(module) is nn.Embedding:
        quantized = QuantEmbedding(weight, activations)
    else:
        return False
    parent, _, last = path.rpartition(".")
    setattr(model.get_submodule(parent), last, quantized)
    return True


def _set_expert_weight(
    model: nn.Module, parameter: str, weight: QuantTensor, activations: str | None
) -> bool:
    """Replace a dense stack of experts; False if its module does not support quantized weights."""
    path, _, name = parameter.rpartition(".")
    module = model.get_submodule(path)
    if name not in quantizable_parameters(module):
        return False
    module.activations = activations
    setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return True
