"""Tensors of a checkpoint: header fields first, memory-mapped data later, slices of values last.

    TensorEntry        name, shape and number format, from the header of the file; reads no data
    CheckpointTensor   the mapped data of one tensor; `read(slices)` returns its values

Only the requested slices are read and, for quantized formats, the blocks that contain them. So a
rank that owns half of a weight reads half of it from disk. A quantized weight is always [.., N, K]:
rows first, K last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.models.loading.packed_rows import dequantize_slices
from fulgurite.quant import Format, QuantTensor

Shape = tuple[int, ...]
# One slice per dimension, with start and stop. Only rows may have a step.
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint; `read(slices)` returns its values, dequantized if need be.

    `data` is a view of the mapped file: dense, or a `QuantTensor`. `input_scale` is the static
    scale of the layer's input, if the checkpoint has one.
    """

    name: str
    data: Tensor
    input_scale: Tensor | None = None

    @property
    def shape(self) -> Shape:
        return tuple(self.data.shape)

    def read(self, slices: Slices) -> Tensor:
        """The values of a part of the tensor."""
        if isinstance(self.data, QuantTensor):
            return dequantize_slices(self.data, slices, self.name)
        return self.data[slices]

    def read_rows(self, start: int, stop: int) -> Tensor:
        """A range of the first dimension."""
        return self.read((slice(start, stop), *full_slices(self.shape[1:])))

    def read_all(self) -> Tensor:
        """The whole tensor."""
        return self.read(full_slices(self.shape))


@dataclass(frozen=True)
class TensorEntry:
    """What the header of a file says about one weight.

    format            number format of the packed data; None: dense
    layout            who defines the stored layout: "dense", "gguf", "modelopt nvfp4", …
    dtype             of a dense tensor; None: quantized
    has_input_scale   whether the checkpoint has a static scale of the layer's input
    activations       the activation format that the file prescribes, if any
    reason            why a weight that is stored quantized has no packed format here
    load              map the data
    """

    name: str
    shape: Shape
    load: Callable[[], CheckpointTensor]
    format: Format | None = None
    layout: str = "dense"
    dtype: torch.dtype | None = None
    has_input_scale: bool = False
    activations: str | None = None
    reason: str = ""

    def read(self, slices: Slices) -> Tensor:
        """The values of a part of the weight."""
        return self.load().read(slices)

    def read_all(self) -> Tensor:
        """All values of the weight."""
        return self.load().read_all()

    @property
    def is_quantized(self) -> bool:
        """Whether the file stores it quantized; then K is its last dimension."""
        return self.layout != "dense"


def full_slices(shape: Shape) -> Slices:
    """The slices of a whole tensor."""
    return tuple(slice(0, size) for size in shape)
