"""Stacked experts that stay quantized while loading, [E, N, K].

In: checkpoint tensors, one per expert or one for all, each with its weight mapping. Out: the stacks
that were filled completely in one format, as `QuantTensor`s.

Conversions only reorder rows (`PACKED_CONVERSIONS`). So a mapping's `target_view` selects matching
parts of the packed data and of each scale, as it does for the dense parameter. A stack is
dequantized instead if that fails (half of the rows ends inside a 128x128 block) or if its tensors
differ in format.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fulgurite.models import weight_mapping
from fulgurite.models.config import ModelConfig
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor
from fulgurite.models.weight_mapping import Convert, WeightAssignment, WeightMapping
from fulgurite.quant import QuantTensor, repack_gguf, resolve_format
from fulgurite.quant.files.gguf import FORMAT_OF_GGUF_TYPE
from fulgurite.quant.shapes import data_shape, scale_shape

# The conversion of packed rows that corresponds to a mapping's conversion of dense values.
PACKED_CONVERSIONS: dict[Convert, Convert] = {
    weight_mapping.identity: weight_mapping.identity,
    weight_mapping.deinterleave_gate_up: weight_mapping.deinterleave_gate_up,
}
# gpt-oss stores MXFP4 blocks along K but dense weights transposed. So its packed rows need no
# transpose.
TRANSPOSED_CONVERSIONS: dict[Convert, Convert] = {
    weight_mapping.transpose: weight_mapping.identity,
    weight_mapping.transpose_deinterleave_gate_up: weight_mapping.deinterleave_gate_up,
}
TRANSPOSED_FORMAT = "MXFP4"


class ExpertStacks:
    """Collects quantized expert weights into stacks, one per parameter.

    `repack`: repack GGUF blocks into grouped integers.
    """

    def __init__(
        self,
        assignments: Mapping[str, Sequence[WeightAssignment]],
        config: ModelConfig,
        device: torch.device | str,
        repack: bool = False,
    ) -> None:
        self.missing = Counter(
            assignment.parameter for group in assignments.values() for assignment in group
        )
        self.config, self.device, self.repack = config, device, repack
        self.weights: dict[str, QuantTensor] = {}

    def add(self, tensor: CheckpointTensor, assignment: WeightAssignment, target: Tensor) -> None:
        """Copy one checkpoint tensor into its stack, if it can stay quantized."""
        mapping = assignment.mapping
        rows = convert_packed_rows(tensor, mapping, self.config)
        if rows is None:
            return
        if self.repack:
            rows = repack_gguf(rows.to(self.device))
        name = assignment.parameter
        stack = self.weights.get(name)
        if stack is None:
            stack = self.weights[name] = _allocate_stack(rows, target, self.device)
        if stack.format is not rows.format:
            return
        sources = _packed_tensors(rows)
        try:
            targets = [
                mapping.target_view(part, self.config, assignment.expert)
                for part in _packed_tensors(stack)
            ]
        except IndexError:  # half of a single row of scales
            return
        if [part.shape for part in targets] == [part.shape for part in sources]:
            for part, source in zip(targets, sources, strict=True):
                part.copy_(source)
            self.missing[name] -= 1

    def complete(self) -> dict[str, QuantTensor]:
        """The stacks to which all of their tensors were added, by parameter name."""
        return {name: stack for name, stack in self.weights.items() if self.missing[name] == 0}


def convert_packed_rows(
    tensor: CheckpointTensor, mapping: WeightMapping, config: ModelConfig
) -> QuantTensor | None:
    """The converted packed rows of a tensor, or None if it has to be dequantized."""
    source = find_expert_source(tensor, mapping)
    if source is None:
        return None
    weight, convert = source
    if convert is weight_mapping.identity:
        return weight
    return weight.map(lambda part: convert(part, config))


def find_expert_source(
    tensor: CheckpointTensor, mapping: WeightMapping
) -> tuple[QuantTensor, Convert] | None:
    """A checkpoint tensor as a quantized weight, and the conversion of its packed rows."""
    if isinstance(tensor.data, QuantTensor):
        weight = tensor.data
    elif tensor.format in FORMAT_OF_GGUF_TYPE:
        weight = QuantTensor(FORMAT_OF_GGUF_TYPE[tensor.format], tensor.data, {}, torch.float32)
    else:
        return None
    is_transposed = tensor.format == TRANSPOSED_FORMAT
    conversions = TRANSPOSED_CONVERSIONS if is_transposed else PACKED_CONVERSIONS
    convert = conversions.get(mapping.convert)
    if convert is None:
        return None
    reorders = convert is not weight_mapping.identity
    if reorders and any(scale.block[0] != 1 for scale in weight.format.separate_scales):
        return None
    return weight, convert


def _packed_tensors(weight: QuantTensor) -> list[Tensor]:
    return [weight.packed, *weight.scales.values()]


def _allocate_stack(rows: QuantTensor, target: Tensor, device: torch.device | str) -> QuantTensor:
    """An uninitialized stack with the shape of `target` in the format of `rows`."""
    format = resolve_format(rows.format)
    data = torch.empty(data_shape(format, target.shape), dtype=format.data_dtype, device=device)
    scales = {
        scale.name: torch.empty(scale_shape(scale, target.shape), dtype=scale.dtype, device=device)
        for scale in format.separate_scales
    }
    return QuantTensor(format, data, scales, target.dtype)
