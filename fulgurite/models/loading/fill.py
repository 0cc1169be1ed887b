"""Fills a parameter, or a rank's shard of it, from a checkpoint tensor.

In: a checkpoint tensor, its weight mapping and the slice of the parameter that this rank holds.
Out: the filled parameter. Only the needed part of the file is read, in chunks to bound the
temporary memory.

A weight mapping has two functions of whole tensors: `convert` for the checkpoint tensor,
`target_view` for the parameter. Here both are inverted. `find_target_ranges` applies `target_view`
to a tensor of positions to find the ranges that the mapping fills. `intersect_ranges` intersects
them with the ranges of the shard. `read_converted` then reads just that part of the checkpoint
tensor; each conversion has its own reader in `PARTIAL_READERS`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, Slices
from fulgurite.models.weight_mapping import (
    Convert,
    TargetView,
    WeightAssignment,
    WeightMapping,
)
from fulgurite.parallel.sharding import Range, ShardSlice

MAX_STAGING_BYTES = 32 * 2**20  # temporary float32 memory while a tensor is converted
PER_HEAD_VIEWS: tuple[TargetView, ...] = (
    weight_mapping.view_kv_b_keys,
    weight_mapping.view_kv_b_values,
)


def fill_parameter(
    parameter: Tensor,
    shard: ShardSlice,
    tensor: CheckpointTensor,
    assignment: WeightAssignment,
    config: ModelConfig,
) -> None:
    """Copy the part of a checkpoint tensor that belongs to this shard into the parameter."""
    mapping = assignment.mapping
    if mapping.target_view in PER_HEAD_VIEWS:
        _fill_per_head(parameter, shard, tensor, mapping, config)
        return
    target_ranges = find_target_ranges(mapping.target_view, shard.shape, config, assignment.expert)
    missing_dims = len(shard.shape) - len(converted_shape(tensor, mapping, config))
    for source, target in intersect_ranges(target_ranges, shard.ranges):
        _copy_in_chunks(parameter[target], tensor, mapping, config, source, missing_dims)


def _fill_per_head(
    parameter: Tensor,
    shard: ShardSlice,
    tensor: CheckpointTensor,
    mapping: WeightMapping,
    config: ModelConfig,
) -> None:
    """Fill some rows of every head: [heads, rows of a head, columns] (kv_b_proj of MLA)."""
    (rows, *others), head_rows = shard.ranges, shard.shape[0] // config.num_heads
    assert len(rows) == 1 and others == [((0, shard.shape[1]),)], f"{shard.name}: sharded by heads"
    first, last = rows[0][0] // head_rows, rows[0][1] // head_rows
    target = mapping.target_view(parameter, replace(config, num_heads=last - first), 0)
    source = (slice(first, last), *(slice(0, size) for size in target.shape[1:]))
    _copy_in_chunks(target, tensor, mapping, config, source, 0)


def _copy_in_chunks(
    target: Tensor,
    tensor: CheckpointTensor,
    mapping: WeightMapping,
    config: ModelConfig,
    source: Slices,
    missing_dims: int,
) -> None:
    """Copy `source` of the converted tensor into `target`, some rows at a time.

    `missing_dims`: leading dimensions of the target that the tensor of a single expert lacks.
    """
    for _ in range(missing_dims):
        assert target.shape[0] == 1, f"{tensor.name} belongs to one expert"
        target = target[0]
    rows, *others = source[missing_dims:]
    step = max(1, MAX_STAGING_BYTES // max(1, 4 * target[:1].numel()))
    for start in range(rows.start, rows.stop, step):
        stop = min(start + step, rows.stop)
        chunk = read_converted(tensor, mapping.convert, config, (slice(start, stop), *others))
        target[start - rows.start : stop - rows.start].copy_(chunk)


# ---- where a tensor goes -------------------------------------------------------------------------


def converted_shape(
    tensor: CheckpointTensor, mapping: WeightMapping, config: ModelConfig
) -> torch.Size:
    """The shape of the converted tensor."""
    return mapping.convert(torch.empty(tensor.shape, device="meta"), config).shape


def find_target_ranges(
    target_view: TargetView, shape: tuple[int, ...], config: ModelConfig, expert: int
) -> list[Range]:
    """The part of a parameter that a mapping fills: one range per dimension."""
    ranges = []
    for dim, size in enumerate(shape):
        view_shape = [1] * len(shape)
        view_shape[dim] = size
        # Positions along one dimension. An expanded tensor takes no memory for the others.
        positions = target_view(torch.arange(size).view(view_shape).expand(shape), config, expert)
        if positions.numel() == 0:
            return [(0, 0)] * len(shape)
        ends = positions[(0,) * positions.dim()], positions[(-1,) * positions.dim()]
        ranges.append((int(ends[0]), int(ends[1]) + 1))
    return ranges


class SliceOverlap(NamedTuple):
    """Slices of the converted checkpoint tensor, and the slices of the shard that they fill."""

    source: Slices
    target: Slices


def intersect_ranges(
    target_ranges: list[Range], shard_ranges: tuple[tuple[Range, ...], ...]
) -> Iterator[SliceOverlap]:
    """Intersect the ranges that a tensor fills with the ranges that a shard holds.

    A shard may hold several ranges of a dimension. Every combination of ranges is one overlap.
    """
    overlaps: list[list[tuple[slice, slice]]] = []
    for (first, last), ranges in zip(target_ranges, shard_ranges, strict=True):
        pairs, offset = [], 0  # `offset`: where a range starts in the shard
        for start, stop in ranges:
            low, high = max(first, start), min(last, stop)
            if low < high:
                source = slice(low - first, high - first)
                pairs.append((source, slice(offset + low - start, offset + high - start)))
            offset += stop - start
        overlaps.append(pairs)
    for combination in itertools.product(*overlaps):
        sources, targets = (tuple(pair[side] for pair in combination) for side in (0, 1))
        yield SliceOverlap(sources, targets)


# ---- what is read --------------------------------------------------------------------------------


def read_converted(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """`convert(tensor)[slices]`, without reading more of the file than needed."""
    return PARTIAL_READERS[convert](tensor, convert, config, slices)


def _read_elementwise(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """For conversions that change values but not positions."""
    return convert(tensor.read(slices), config)


def _read_transposed(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    *experts, rows, columns = slices
    return tensor.read((*experts, columns, rows)).transpose(-1, -2)


def _read_oriented(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """For conversions that transpose only what is stored the other way."""
    converted = convert(torch.empty(tensor.shape, device="meta"), config)
    if converted.is_contiguous():
        return tensor.read(slices)
    return _read_transposed(tensor, convert, config, slices)


def _read_row_range(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """For conversions that select a contiguous range of rows."""
    first = int(convert(torch.arange(tensor.shape[0]), config)[0])
    return tensor.read((slice(first + slices[0].start, first + slices[0].stop), *slices[1:]))


def _read_whole_heads(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """For conversions that reorder rows within a head."""
    size, (start, stop) = config.head_dim, (slices[0].start, slices[0].stop)
    first, last = start // size * size, -(-stop // size) * size
    heads = convert(tensor.read((slice(first, last), *slices[1:])), config)
    return heads[start - first : stop - first]


def _read_selected_rows(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """For conversions that select rows in any order."""
    rows = convert(torch.arange(tensor.shape[0]), config)[slices[0]]
    first, last = int(rows.min()), int(rows.max())
    return tensor.read((slice(first, last + 1), *slices[1:]))[rows - first]


def _read_reshaped(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """For vectors of another shape."""
    return convert(tensor.read(tuple(slice(0, size) for size in tensor.shape)), config)[slices]


def _read_conv(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    taps, channels = slices
    return convert(tensor.read((channels, slice(0, 1), taps)), config)


def _read_deinterleaved(
    tensor: CheckpointTensor, convert: Convert, config: ModelConfig, slices: Slices
) -> Tensor:
    """For interleaved gate and up rows (or columns, if also transposed)."""
    transposed = convert is weight_mapping.transpose_deinterleave_gate_up
    half = tensor.shape[2 if transposed else 1] // 2
    parts = []
    for parity in (0, 1):  # gate rows, up rows
        start, stop = slices[1].start - parity * half, slices[1].stop - parity * half
        start, stop = max(start, 0), min(stop, half)
        if start < stop:
            rows = slice(2 * start + parity, 2 * stop, 2)
            part = (slices[0], rows, *slices[2:])
            parts.append(
                _read_transposed(tensor, convert, config, part) if transposed else tensor.read(part)
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


PartialReader = Callable[[CheckpointTensor, Convert, ModelConfig, Slices], Tensor]
PARTIAL_READERS: dict[Convert, PartialReader] = {
    weight_mapping.identity: _read_elementwise,
    weight_mapping.subtract_one: _read_elementwise,
    weight_mapping.transpose: _read_transposed,
    weight_mapping.orient_gate_up: _read_oriented,
    weight_mapping.orient_down: _read_oriented,
    weight_mapping.deinterleave_gate_up: _read_deinterleaved,
    weight_mapping.transpose_deinterleave_gate_up: _read_deinterleaved,
    weight_mapping.slice_q: _read_row_range,
    weight_mapping.slice_k: _read_row_range,
    weight_mapping.slice_v: _read_row_range,
    weight_mapping.slice_first_half: _read_row_range,
    weight_mapping.slice_second_half: _read_row_range,
    weight_mapping.unpermute_rope: _read_whole_heads,
    weight_mapping.group_qkvz: _read_selected_rows,
    weight_mapping.group_ba: _read_selected_rows,
    weight_mapping.slice_query: _read_selected_rows,
    weight_mapping.slice_gate: _read_selected_rows,
    weight_mapping.transpose_conv: _read_conv,
    weight_mapping.as_row: _read_reshaped,
    weight_mapping.flatten: _read_reshaped,
}
