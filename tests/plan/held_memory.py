"""What a process holds: the tensors that are alive, and new memory while something runs."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from fulgurite.plan.activations import AllocationTracker


class HostAllocationTracker(AllocationTracker):
    """Counts new memory on the CPU instead of the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.before = live_tensors()
        self.known = storage_bytes(self.before)

    def is_counted(self, tensor: Tensor) -> bool:
        if type(tensor) is not Tensor or tensor.device.type != "cpu":
            return False
        return tensor.untyped_storage()._cdata not in self.known


def live_tensors() -> list[Tensor]:
    """Every tensor with memory of its own: a QuantTensor has none, its parts do."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) in (Tensor, nn.Parameter)]
    return [one for one in found if not one.is_meta and one.layout is torch.strided]


def storage_bytes(tensors: list[Tensor]) -> dict[int, int]:
    storages = (one.untyped_storage() for one in tensors)
    return {storage._cdata: storage.nbytes() for storage in storages}
