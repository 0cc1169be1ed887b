"""A cache of what was computed from a quantized weight, valid as long as the weight's memory lives.

    panels_cache = WeightLayoutCache(pack_panels)
    panels_cache(data, scales, format)        # packed on the first call, found again on the next

An entry is computed again if the data or the scales were written to, or their memory was freed
(torch does not count writes to inference tensors: those must not be written to). The cache is
thread-safe: two threads that ask for the same new weight may both compute it, and one of the
results is kept.
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
    """How often a tensor's memory was written to, as far as torch counts."""
    return 0 if tensor.is_inference() else tensor._version


def _location_of(tensor: Tensor) -> TensorLocation:
    """Address, shape and strides of a tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@dataclass(frozen=True)
class CacheEntry(Generic[T]):
    """A result, valid while the storages it came from are alive and are not written to."""

    storages: tuple[StorageWeakRef, ...]
    versions: tuple[int, ...]
    result: T

    def is_expired(self) -> bool:
        return any(storage.expired() for storage in self.storages)


class WeightLayoutCache(Generic[T]):
    """A function of a quantized weight, cached by the weight's memory."""

    def __init__(self, compute: Callable[[QuantTensor], T]) -> None:
        self.compute = compute
        self.entries: dict[CacheKey, CacheEntry[T]] = {}
        self.lock = threading.Lock()

    def __call__(self, data: Tensor, scales: Sequence[Tensor], format: str) -> T:
        parts = (data, *scales)
        key = (format, tuple(map(_location_of, parts)))
        versions = tuple(map(version_of, parts))
        found = self.entries.get(key)
        if found is None or found.versions != versions or found.is_expired():
            names = [scale.name for scale in resolve_format(format).separate_scales]
            weight = QuantTensor(format, data, dict(zip(names, scales, strict=True)))
            storages = tuple(StorageWeakRef(part.untyped_storage()) for part in parts)
            found = CacheEntry(storages, versions, self.compute(weight))
            self._store(key, found)
        return found.result

    def _store(self, key: CacheKey, entry: CacheEntry[T]) -> None:
        with self.lock:
            expired = [k for k, old in self.entries.items() if old.is_expired()]
            removed = [self.entries.pop(k) for k in expired]
            self.entries[key] = entry
        del removed  # freed outside the lock: large memory is returned to the system here
