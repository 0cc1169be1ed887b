"""`DeviceCollectives`: what an axis may use instead of its process group, without the host."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class DeviceCollectives(Protocol):
    """Collectives on the device. All ranks of the axis make the same calls in the same order."""

    def accepts(self, x: Tensor) -> bool:
        """Whether a message goes this way, and not through the process group."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        ...

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' x, which are equally large, concatenated along dimension 0."""
        ...

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x; this rank's part of dimension 0, which is a multiple of W."""
        ...

    def all_to_all(self, x: Tensor) -> Tensor:
        """Part w of dimension 0 to rank w, in W equal parts; the received parts in rank order."""
        ...

    def check(self) -> None:
        """Raise the error that the device has recorded, if any. Waits for the device."""
        ...
