"""Memory that the captures of one program share.

In: captured calls, in the order of their captures. Out: whether one may be replayed now.

Captures of one pool use the same memory for their intermediate values. The outputs of a capture stay
allocated, so a later capture never uses their memory. But the outputs of a later capture may lie where an
earlier one has its intermediate values. So a capture may be replayed if nobody holds shared outputs of
itself or of a later one.

Backward uses the pools of forward if gradients are freed before the next forward pass, as by
`zero_grad(set_to_none=True)`: its intermediate values, and gradients, then take the memory of forward's
intermediate values. Otherwise it has pools of its own: gradients that accumulate don't block forward.

torch frees the memory of a pool with its last capture. So a capture that is given up takes all captures
of its pool with it if the pool has grown much for it. The others are captured again, into a new pool.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fulgurite.cudagraph.capture import Capture, CudaCapturedCall, LivePool, capture_stream
from fulgurite.cudagraph.native_replay import Words
from fulgurite.cudagraph.timing import CudaStopwatch, Stopwatch


def make_cuda_pool(device: torch.device) -> LivePool:
    return LivePool(device, capture_stream(device))


def read_total_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def read_reserved_memory(device: torch.device) -> int:
    return int(torch.cuda.memory_reserved(device))


@dataclass(frozen=True)
class CaptureBackend:
    """How calls are captured and timed. Tests replace it to run on CPUs.

    total_memory   bytes of memory of a device
    reserved_memory  bytes of it that this process holds, pools of captures among them
    is_on_device   whether a tensor is in the device's memory
    """

    device_type: str
    capture: Capture
    make_pool: Callable[[torch.device], Any]
    stopwatch: Stopwatch
    total_memory: Callable[[torch.device], int]
    reserved_memory: Callable[[torch.device], int]
    is_on_device: Callable[[Tensor], bool]


def _is_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


CUDA = CaptureBackend(
    "cuda",
    CudaCapturedCall,
    make_cuda_pool,
    CudaStopwatch(),
    read_total_memory,
    read_reserved_memory,
    _is_on_cuda,
)


class CaptureOwner(Protocol):
    """A function with captures."""

    def drop_captures(self, pool: CapturePool) -> None: ...


class SharedOutputs:
    """The storages of outputs that a capture shares with its callers."""

    def __init__(self, order: int, tensors: Sequence[Tensor]) -> None:
        self.order = order
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = list(storages.values())
        self._released: list[StorageWeakRef] | None = None  # once the capture is gone
        self._counts = [(key, torch._C._storage_Use_Count(key)) for key in storages]
        pairs = [word for pair in self._counts for word in pair]
        self._words = Words(order, len(self._counts), *pairs)  # for include/graph_replay.h
        self.words = self._words.address

    def are_held(self) -> bool:
        """Whether someone beside the capture holds one of them, or a view of it."""
        if self._released is not None:
            return not all(storage.expired() for storage in self._released)
        use_count = torch._C._storage_Use_Count
        return any(use_count(storage) > count for storage, count in self._counts)

    def release(self) -> None:
        """The capture is gone: keep no storage alive any more."""
        self._words[1] = -1
        self._released = [StorageWeakRef(storage) for storage in self._storages]
        self._storages, self._counts = [], []

    def addresses(self) -> set[int]:
        return {storage.data_ptr() for storage in self._storages}


class CapturePool:
    """Memory that captures share, and their outputs that may still be held."""

    def __init__(self, slot: int, make_pool: Callable[[torch.device], Any]) -> None:
        self.slot = slot
        self._make_pool = make_pool
        self._pools: dict[torch.device, Any] = {}
        self._captures = 0
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()  # the captures that are alive
        self._owners: weakref.WeakSet[CaptureOwner] = weakref.WeakSet()
        self.shared: list[SharedOutputs] = []  # that were given to callers; native code has it, too

    def on(self, device: torch.device) -> Any:
        if device not in self._pools:
            self._pools[device] = self._make_pool(device)
        return self._pools[device]

    def add_owner(self, owner: CaptureOwner) -> None:
        """A function that captures into this pool."""
        self._owners.add(owner)

    def add(self, call: Any) -> int:
        """Count a capture as alive as long as it is; returns its place in the order of captures."""
        self._calls.add(call)
        self._captures += 1
        return self._captures

    def free_if_unused(self) -> None:
        """Give the memory back if no capture is alive. The next one gets memory of its own."""
        if not self._calls:
            self._pools.clear()
            self.shared[:] = [one for one in self.shared if one.are_held()]

    def retire(self) -> None:
        """Drop all captures and with the last one the memory. The next ones get memory of their own."""
        for owner in list(self._owners):
            owner.drop_captures(self)
        self._owners.clear()
        self._pools.clear()

    def may_replay(self, order: int) -> bool:
        """Whether no outputs of this capture or of later ones are held."""
        self.shared[:] = [one for one in self.shared if one.order < order or one.are_held()]
        return all(one.order < order for one in self.shared)

    def share(self, outputs: SharedOutputs) -> None:
        """A replay gave these outputs to its caller."""
        self.shared.append(outputs)


class StaticAddresses:
    """Memory that a program finds at the same place in every call.

    These are its parameters, and the shared outputs of its captures.
    """

    def __init__(self) -> None:
        self._outputs: weakref.WeakSet[SharedOutputs] = weakref.WeakSet()
        self._parameters: dict[int, weakref.ref[Tensor]] = {}  # by id

    def add(self, outputs: SharedOutputs) -> None:
        self._outputs.add(outputs)

    def find(self) -> set[int]:
        """The storages' addresses. Parameters that moved or are gone don't count any more."""
        alive = [parameter() for parameter in list(self._parameters.values())]
        found = {_storage_address(parameter) for parameter in alive if parameter is not None}
        return found.union(*(one.addresses() for one in self._outputs))

    def identify(self, inputs: Sequence[Any]) -> tuple[tuple[int, ...], set[int]]:
        """The addresses of the inputs that are such memory, and those of their storages.

        They tell the layers of a model apart.
        """
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        for x in tensors:
            if isinstance(x, nn.Parameter) and id(x) not in self._parameters:
                forget = functools.partial(_forget, self._parameters, id(x))
                self._parameters[id(x)] = weakref.ref(x, forget)
        known = self.find()
        static = [x for x in tensors if _storage_address(x) in known]
        return tuple(x.data_ptr() for x in static), {_storage_address(x) for x in static}


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _forget(
    parameters: dict[int, weakref.ref[Tensor]], key: int, dead: weakref.ref[Tensor]
) -> None:
    if parameters.get(key) is dead:
        del parameters[key]


class CaptureMemory:
    """Memory of the captures of a program's forward graphs, or of its backward graphs.

    Captures share the pool of their slot. All run on one stream, one at a time. A function whose
    outputs of slot 0 are held runs a capture of slot 1, which has memory of its own.

    forward   of backward graphs: the memory of the forward graphs
    """

    def __init__(
        self,
        backend: CaptureBackend = CUDA,
        addresses: StaticAddresses | None = None,
        forward: CaptureMemory | None = None,
    ) -> None:
        self.backend = backend
        self.addresses = addresses or StaticAddresses()
        self.lock: threading.Lock = threading.Lock() if forward is None else forward.lock
        # whether a stream is known, and its handle
        self.stream_words: Words = Words(0, 0) if forward is None else forward.stream_words
        self._pools: list[CapturePool] = []
        self._forward = forward
        # of the last calls of backward functions without captures, by id
        self._gradients: dict[int, list[StorageWeakRef]] = {}
        self._keeps_gradients = False  # from one forward pass to the next

    def observe_call(self, function: int) -> None:
        """A function is called, not by native code. Notes whether earlier gradients are held then.

        function   its id. Gradients of other backward graphs may be of the same step.
        """
        memory = self._forward or self
        if memory._gradients:
            given = memory._gradients
            checked = given.values() if self._forward is None else [given.get(function, [])]
            memory._keeps_gradients |= not all(one.expired() for part in checked for one in part)
            if self._forward is None:
                given.clear()

    def observe_results(self, function: int, results: Sequence[Any]) -> None:
        """What a call without a capture returned: gradients, of backward graphs."""
        if self._forward is not None:
            storages = [x.untyped_storage() for x in results if isinstance(x, Tensor)]
            self._forward._gradients[function] = [StorageWeakRef(storage) for storage in storages]

    def observe_blocked(self) -> None:
        """A capture can't be replayed, because outputs are held: gradients, perhaps."""
        self._keeps_gradients = True

    @property
    def stream(self) -> int | None:
        """CUDA's handle of the stream of the first capture's call."""
        return self.stream_words[1] if self.stream_words[0] else None

    @stream.setter
    def stream(self, handle: int | None) -> None:
        self.stream_words[0], self.stream_words[1] = handle is not None, handle or 0

    def free_unused_pools(self) -> None:
        for pool in self._pools:
            pool.free_if_unused()
        if self._forward is not None:
            self._forward.free_unused_pools()

    def pool(self, slot: int) -> CapturePool:
        """The pool of the next capture."""
        if self._forward is not None and not self._forward._keeps_gradients:
            return self._forward.pool(slot)
        while len(self._pools) <= slot:
            self._pools.append(CapturePool(len(self._pools), self.backend.make_pool))
        return self._pools[slot]
