"""What was computed once from a packed weight, kept for as long as the weight's memory lives.

    panels = LaidOut(lay_out_panels)
    panels(data, scales, format)        # laid out on the first call, found again on the next

A weight whose data or scales were written to since, or whose memory went back, is laid out anew (torch
counts no writes to inference tensors: those must not be written to). Any number of threads may ask: two that
ask for the same new weight at once may both lay it out, and one of the results is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fulgurite.quant import QuantTensor, resolve_format

T = TypeVar("T")
TensorLocation = tuple[int, torch.Size, tuple[int, ...]]
CacheKey = tuple[str, tuple[TensorLocation, ...]]


def version_of(tensor: Tensor) -> int:
    """How often a tensor's memory was written to, as far as torch counts it."""
    return 0 if tensor.is_inference() else tensor._version


def _location_of(tensor: Tensor) -> TensorLocation:
    """Where a tensor's numbers are."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@dataclass(frozen=True)
class CacheEntry(Generic[T]):
    """A result, good while the storages it came from live (then their memory is nobody else's) and are not
    written to."""

    storages: tuple[StorageWeakRef, ...]
    versions: tuple[int, ...]
    result: T

    def expired(self) -> bool:
        return any(storage.expired() for storage in self.storages)


class WeightLayoutCache(Generic[T]):
    """A function of a packed weight whose results are kept by the weight's memory."""

    def __init__(self, lay_out: Callable[[QuantTensor], T]) -> None:
        self.lay_out = lay_out
        self.entries: dict[CacheKey, CacheEntry[T]] = {}
        self.changing = threading.Lock()

    def __call__(self, data: Tensor, scales: Sequence[Tensor], format: str) -> T:
        parts = (data, *scales)
        key = (format, tuple(map(_location_of, parts)))
        versions = tuple(map(version_of, parts))
        found = self.entries.get(key)
        if found is None or found.versions != versions or found.expired():
            names = [scale.name for scale in resolve_format(format).separate_scales]
            weight = QuantTensor(format, data, dict(zip(names, scales, strict=True)))
            storages = tuple(StorageWeakRef(part.untyped_storage()) for part in parts)
            found = CacheEntry(storages, versions, self.lay_out(weight))
            self._keep(key, found)
        return found.result

    def _keep(self, key: CacheKey, entry: CacheEntry[T]) -> None:
        with self.changing:
            expired = [k for k, old in self.entries.items() if old.expired()]
            gone = [self.entries.pop(k) for k in expired]
            self.entries[key] = entry
        del gone  # freed outside the lock: large memory goes back to the system here
