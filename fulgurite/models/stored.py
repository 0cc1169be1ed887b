"""A tensor as a file keeps it: mapped memory, and how a part of it becomes numbers.

What is asked for is read, and of packed formats the blocks around it; the rest of the file stays on
the disk. So a rank of many that owns half of a weight reads half of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]
Box = tuple[
    slice, ...
]  # a slice a dimension, its ends given; steps only where packed rows allow it


@dataclass(frozen=True)
class StoredTensor:
    """`part(box)` gives those numbers; packed formats are unpacked only then.

    `data` is what lies in the file (safetensors' packed formats: as a `QuantTensor`), and `format` its
    name in the file: "dense", or a packed format.
    """

    name: str
    shape: Shape
    data: Tensor
    format: str
    part: Callable[[Box], Tensor]

    def rows(self, start: int, stop: int) -> Tensor:
        """A range of the first dimension."""
        return self.part((slice(start, stop), *everything(self.shape[1:])))

    def all(self) -> Tensor:
        """The whole tensor."""
        return self.part(everything(self.shape))


def everything(shape: Shape) -> Box:
    """The box that leaves nothing out."""
    return tuple(slice(0, size) for size in shape)


def dense(name: str, tensor: Tensor) -> StoredTensor:
    """A tensor that is already what it stands for."""
    return StoredTensor(name, tuple(tensor.shape), tensor, "dense", lambda box: tensor[box])
