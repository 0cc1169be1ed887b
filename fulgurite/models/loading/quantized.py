"""Weights that stay quantized: modules on the meta device first, packed data later.

    install_quantized_weight   a dense module -> a module with a quantized weight, without memory
    load_packed_parameter      packed data of the sources -> the parameter, or a rank's shard of it

Weights keep the format of the file, with two exceptions: on GPUs with 16-bit activations, GGUF
blocks are repacked into grouped integers (`quant/repack.py`); and FP8 scales that several rows
share become scales of single rows where `parameter_formats.py` chose so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fulgurite.errors import FormatError
from fulgurite.kernels.gemm.modules import QuantEmbedding, QuantLinear, quantizable_parameters
from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, Slices
from fulgurite.models.loading.fill import find_target_ranges, intersect_ranges
from fulgurite.models.loading.packed_rows import find_selected_rows, select_rows
from fulgurite.models.loading.weight_assignment import ParameterSource
from fulgurite.models.weight_mapping import WeightAssignment, WeightMapping
from fulgurite.parallel.sharding import ShardSlice
from fulgurite.quant import Format, QuantTensor, repack_gguf
from fulgurite.quant.shapes import data_shape, scale_shape

REPACKED_DTYPES = (torch.bfloat16, torch.float16)


def needs_repacking(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether the kernels of a device read GGUF blocks only as grouped integers."""
    return torch.device(device).type == "cuda" and dtype in REPACKED_DTYPES


def empty_quantized(
    format: Format, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> QuantTensor:
    """A quantized tensor with uninitialized data."""
    data = torch.empty(data_shape(format, shape), dtype=format.data_dtype, device=device)
    scales = {
        scale.name: torch.empty(scale_shape(scale, shape), dtype=scale.dtype, device=device)
        for scale in format.separate_scales
    }
    return QuantTensor(format, data, scales, dtype)


def install_quantized_weight(
    model: nn.Module,
    name: str,
    format: Format,
    activations: str | None,
    has_input_scale: bool = False,
) -> None:
    """Replace the dense parameter `name` by a quantized one on the meta device.

    A linear or embedding becomes a `QuantLinear` or `QuantEmbedding`.
    """
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    dense = module.get_parameter(last)
    weight = empty_quantized(format, dense.shape, dense.dtype, "meta")
    quantized: nn.Module
    if type(module) is nn.Linear:
        scale = torch.empty((), dtype=torch.float32, device="meta") if has_input_scale else None
        quantized = QuantLinear(weight, None, activations, scale)
        quantized.bias = module.bias
    elif type(module) is nn.Embedding:
        quantized = QuantEmbedding(weight, activations)
    else:
        assert last in quantizable_parameters(module), f"{name} has no quantized kernels"
        module.activations = activations
        setattr(module, last, nn.Parameter(weight, requires_grad=False))
        return
    parent, _, child = path.rpartition(".")
    setattr(model.get_submodule(parent), child, quantized)


def load_packed_parameter(
    parameter: QuantTensor,
    shard: ShardSlice,
    sources: Sequence[ParameterSource],
    config: ModelConfig,
    device: torch.device | str,
) -> tuple[QuantTensor, Tensor | None]:
    """The packed data of a parameter on a device, and the static scale of its module's input.

    `parameter` is on the meta device. One tensor that fills all of it stays a view of the mapped
    file on a CPU.
    """
    input_scale = None
    result: QuantTensor | None = None
    for source in sources:
        tensor = source.entry.load()
        if tensor.input_scale is not None:
            input_scale = tensor.input_scale.to(device)
        if _fills_all(shard, source.assignment.mapping):
            weight = convert_packed(tensor, source.assignment.mapping, config, parameter.format)
            if weight.shape == parameter.shape:
                weight = weight.with_packed_data(weight.packed_data, parameter.dtype).to(device)
                weight = match_format(weight, parameter.format)
                return weight.check_scales(tensor.name), input_scale
        if result is None:
            result = empty_quantized(parameter.format, parameter.shape, parameter.dtype, device)
        fill_packed_parameter(result, shard, tensor, source.assignment, config)
    assert result is not None, f"{shard.name} has no sources"
    return result.check_scales(shard.name), input_scale


def _fills_all(shard: ShardSlice, mapping: WeightMapping) -> bool:
    is_full = shard.ranges == ShardSlice.full(shard.name, shard.shape).ranges
    return is_full and mapping.target_view is weight_mapping.whole_parameter


def convert_packed(
    tensor: CheckpointTensor, mapping: WeightMapping, config: ModelConfig, format: Format
) -> QuantTensor:
    """`mapping.convert` of a quantized tensor: the rows that it selects, in the format."""
    weight = tensor.data
    assert isinstance(weight, QuantTensor), f"{tensor.name} is not quantized"
    if mapping.convert is weight_mapping.identity:
        return weight
    weight = with_single_row_scales(weight, format)
    return select_rows(weight, _selected_rows(weight, mapping, config))


def _selected_rows(weight: QuantTensor, mapping: WeightMapping, config: ModelConfig) -> Tensor:
    rows, ndim = weight.shape[-2], weight.dim()
    index = find_selected_rows(lambda t: mapping.convert(t, config), rows, ndim)
    assert index is not None, f"{mapping.convert.__name__} was checked for packed data"
    return index


def fill_packed_parameter(
    parameter: QuantTensor,
    shard: ShardSlice,
    tensor: CheckpointTensor,
    assignment: WeightAssignment,
    config: ModelConfig,
) -> None:
    """Copy the blocks of a checkpoint tensor that belong to this shard into its parameter."""
    mapping, weight = assignment.mapping, tensor.data
    assert isinstance(weight, QuantTensor), f"{tensor.name} is not quantized"
    weight = with_single_row_scales(weight, parameter.format)
    index = None
    if mapping.convert is not weight_mapping.identity:
        index = _selected_rows(weight, mapping, config)
    target_ranges = find_target_ranges(mapping.target_view, shard.shape, config, assignment.expert)
    missing_dims = len(shard.shape) - weight.dim()
    for source, target in intersect_ranges(target_ranges, shard.ranges):
        part = parameter[target]
        for _ in range(missing_dims):  # the tensor of a single expert
            part = part[0]
        values = _slice_rows(weight, index, source[missing_dims:]).to(parameter.device)
        _copy_packed(part, match_format(values, parameter.format))


def _slice_rows(weight: QuantTensor, index: Tensor | None, slices: Slices) -> QuantTensor:
    """`weight[.., index, :][slices]`."""
    *experts, rows, columns = slices
    part = weight[tuple(experts)] if experts else weight
    assert isinstance(part, QuantTensor), "slices of a QuantTensor are QuantTensors"
    if index is not None:
        part, rows = select_rows(part, index[rows]), slice(None)
    part = part[(*(slice(None) for _ in experts), rows, columns)]
    assert isinstance(part, QuantTensor), "slices of a QuantTensor are QuantTensors"
    return part


def _copy_packed(target: QuantTensor, values: QuantTensor) -> None:
    """Copy packed data and scales."""
    if target.shape != values.shape:
        raise FormatError(
            f"cannot copy {list(values.shape)} into {list(target.shape)} ({values.format.name})"
        )
    target.copy_(values)


def match_format(weight: QuantTensor, format: Format) -> QuantTensor:
    """The same values in the parameter's format: GGUF repacked, FP8 with scales of single rows."""
    weight = with_single_row_scales(weight, format)
    return weight if weight.format == format else repack_gguf(weight)


def with_single_row_scales(weight: QuantTensor, format: Format) -> QuantTensor:
    """An FP8 weight whose scales are repeated for each row, if `format` asks for that."""
    if weight.format == format or weight.format.family != "fp8":
        return weight
    block = weight.format.block[0] or weight.shape[-2]
    scale = weight.scales["scale"].repeat_interleave(block, dim=-2)
    rows = scale[..., : weight.shape[-2], :].contiguous()
    return QuantTensor(format, weight.packed, {"scale": rows}, weight.dtype)
