"""A tensor as a file keeps it: mapped memory, and how a range of its rows becomes numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """`rows(start, stop)` gives that range of the first dimension; packed formats are unpacked only
    then.

    `data` is what lies in the file (safetensors' packed formats: as a `QuantTensor`), and `format` its
    name in the file: "dense", or a packed format.
    """

    name: str
    shape: Shape
    data: Tensor
    format: str
    rows: Callable[[int, int], Tensor]

    def all(self) -> Tensor:
        """The whole tensor."""
        return self.rows(0, self.shape[0] if self.shape else 1)


def dense(name: str, tensor: Tensor) -> StoredTensor:
    """A tensor that is already what it stands for."""

    def rows(start: int, stop: int) -> Tensor:
        return tensor[start:stop] if tensor.ndim else tensor

    return StoredTensor(name, tuple(tensor.shape), tensor, "dense", rows)
