"""What was computed once from a packed weight, kept for as long as the weight's memory lives.

    panels = LaidOut(lay_out_panels)
    panels(data, scales, format)        # laid out on the first call, found again on the next

A tensor that was written to since, or whose memory went back, is laid out anew. Any number of threads may ask: two that
ask for the same new weight at once may both lay it out, and one of the results is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fulgurite.quant import QuantTensor, resolve

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A result, good while the storage it came from lives and is not written to."""

    storage: StorageWeakRef
    version: int
    result: T


class LaidOut(Generic[T]):
    """A function of a packed weight whose results are kept by the weight's memory."""

    def __init__(self, lay_out: Callable[[QuantTensor], T]) -> None:
        self.lay_out = lay_out
        self.entries: dict[tuple[int, int, tuple[int, ...], str], Entry[T]] = {}
        self.changing = threading.Lock()

    def __call__(self, data: Tensor, scales: list[Tensor], format: str) -> T:
        storage = data.untyped_storage()
        key = (storage._cdata, data.storage_offset(), tuple(data.shape), format)
        version = 0 if data.is_inference() else data._version
        found = self.entries.get(key)
        if found is None or found.storage.expired() or found.version != version:
            names = [scale.name for scale in resolve(format).stored_scales]
            weight = QuantTensor(format, data, dict(zip(names, scales, strict=True)))
            found = Entry(StorageWeakRef(storage), version, self.lay_out(weight))
            self._keep(key, found)
        return found.result

    def _keep(self, key: tuple[int, int, tuple[int, ...], str], entry: Entry[T]) -> None:
        with self.changing:
            expired = [k for k, old in self.entries.items() if old.storage.expired()]
            gone = [self.entries.pop(k) for k in expired]
            self.entries[key] = entry
        del gone  # freed outside the lock: large memory goes back to the system here
