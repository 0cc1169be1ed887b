"""One tensor of a checkpoint file: memory-mapped data in, slices of its values out.

Only the requested slices are read and, for quantized formats, the blocks that contain them. So a
rank that owns half of a weight reads half of it from disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]
# One slice per dimension, with start and stop. Steps are allowed only along rows of packed data.
Slices = tuple[slice, ...]


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor of a checkpoint; `read(slices)` returns its values, dequantized if need be.

    `data` is the tensor as stored in the file; quantized safetensors weights are a `QuantTensor`.
    `format` is "dense", or the name of the quantized format in the file.
    """

    name: str
    shape: Shape
    data: Tensor
    format: str
    read: Callable[[Slices], Tensor]

    def read_rows(self, start: int, stop: int) -> Tensor:
        """A range of the first dimension."""
        return self.read((slice(start, stop), *full_slices(self.shape[1:])))

    def read_all(self) -> Tensor:
        """The whole tensor."""
        return self.read(full_slices(self.shape))


def full_slices(shape: Shape) -> Slices:
    """The slices of a whole tensor."""
    return tuple(slice(0, size) for size in shape)


def from_dense(name: str, tensor: Tensor) -> CheckpointTensor:
    """Wrap a tensor that is stored unquantized."""
    return CheckpointTensor(
        name, tuple(tensor.shape), tensor, "dense", lambda slices: tensor[slices]
    )
