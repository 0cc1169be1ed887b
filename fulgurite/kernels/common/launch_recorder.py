"""Recording of launch plans: one call of an operator → what it allocates and launches.

In: a call inside `Recorder.active()`. Out: `LaunchPlan`, which repeats it with other addresses, or None if
it does something that can't be repeated. `launch_plan.py` decides when to record and when to replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, ops
from torch.utils._python_dispatch import TorchDispatchMode

from fulgurite.kernels.common.triton_counters import acquire_counters, is_counters
from fulgurite.kernels.common.triton_import import triton
from fulgurite.kernels.registry import RECORDING

aten = ops.aten
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
}
VIEWS = {
    aten.view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.as_strided.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.detach.default,
    aten.alias.default,
    aten.t.default,
    aten.transpose.int,
    aten.expand.default,
    aten._unsafe_view.default,
}
MAYBE_VIEWS = {aten.contiguous.default, aten.reshape.default, aten.flatten.using_ints}
ALIGNMENT = 256  # bytes between the parts of a workspace


class Address(NamedTuple):
    """Where a pointer argument comes from: an entry of the call's list of addresses, and an offset."""

    position: int  # of the kernel's argument
    source: int
    offset: int


class PlannedLaunch(NamedTuple):
    """A launch with everything but its addresses."""

    run: Callable[..., None]
    head: tuple[Any, ...]  # grid
    tail: tuple[Any, ...]  # handle, metadata, hooks
    arguments: list[Any]
    addresses: tuple[Address, ...]
    types: Sequence[str] | None  # Triton's type of each argument


class NewTensor(NamedTuple):
    """A result: the allocation that it starts from, and its view of it."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    view: tuple[tuple[int, ...], tuple[int, ...], int] | None  # sizes, strides, offset


@dataclass(frozen=True)
class LaunchPlan:
    """What a call allocates and launches. Addresses: inputs, results, workspace, counters."""

    results: tuple[NewTensor, ...]
    workspace_bytes: int
    counters: tuple[int, ...]  # how many zeros each
    launches: tuple[PlannedLaunch, ...]
    kind: Any  # the class of the result: `Tensor`, `tuple`, or a named tuple

    def build(self, tensors: list[Tensor]) -> Any:
        """What the function returns, from its tensors."""
        if self.kind is Tensor:
            return tensors[0]
        return tuple(tensors) if self.kind is tuple else self.kind(*tensors)

    def replay(self, addresses: list[int], device: torch.device) -> Any:
        results = []
        for sizes, strides, dtype, view in self.results:
            tensor = allocate(sizes, strides, dtype)
            addresses.append(tensor.data_ptr())
            results.append(tensor if view is None else tensor.as_strided(*view))
        if self.workspace_bytes:
            workspace = allocate((self.workspace_bytes,), (1,), torch.uint8)
            addresses.append(workspace.data_ptr())
        for count in self.counters:
            addresses.append(acquire_counters(device, count).data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        for run, head, tail, arguments, origins, _ in self.launches:
            arguments = arguments.copy()
            for position, source, offset in origins:
                arguments[position] = addresses[source] + offset
            run(*head, stream, *tail, *arguments)
        return self.build(results)


allocate: Callable[..., Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", torch.empty_strided
)


# ---- recording -----------------------------------------------------------------------------------


@dataclass
class _RecordedLaunch:
    run: Callable[..., None]
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    arguments: list[Any]
    tensors: list[tuple[int, Tensor]]
    types: Sequence[str] | None


class Recorder(TorchDispatchMode):
    """Records the allocations and launches of one call."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.problem = ""
        # allocations, by the address of their storage; kept, so that no memory is used twice
        self.buffers: dict[int, Tensor] = {}
        self.launches: list[_RecordedLaunch] = []
        self.inputs = list(inputs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            if result.numel():
                self.buffers[result.untyped_storage().data_ptr()] = result
        elif func not in VIEWS and not (func in MAYBE_VIEWS and _is_view(result, args[0])):
            self.problem = self.problem or f"calls {func}"
        return result

    def add_launch(
        self,
        run: Callable[..., None],
        head: tuple[Any, ...],
        tail: tuple[Any, ...],
        arguments: list[Any],
        tensors: list[tuple[int, Tensor]],
        types: Sequence[str] | None = None,
    ) -> None:
        self.launches.append(_RecordedLaunch(run, head, tail, arguments, tensors, types))

    def fail(self, *_: Any, **__: Any) -> None:
        """A launch that can't be recorded; also Triton's launch hook."""
        self.problem = self.problem or "launches a kernel through Triton"

    @contextmanager
    def active(self) -> Iterator[None]:
        hooks = triton.knobs.runtime.launch_enter_hook
        hooks.add(self.fail)
        RECORDING.recorder = self
        try:
            with self:
                yield
        finally:
            RECORDING.recorder = None
            hooks.remove(self.fail)

    def make_plan(self, result: Any) -> LaunchPlan | None:
        """The plan of the recorded call; None if something can't be repeated."""
        outputs, kind = _take_apart(result)
        storages = {tensor.untyped_storage().data_ptr() for tensor in self.inputs}
        if self.problem or outputs is None or len(storages) < len(self.inputs):
            return None  # which of two inputs in one storage an address belongs to is unknown
        return _PlanBuilder(self, outputs).build(kind)


def _is_view(result: Tensor, source: Tensor) -> bool:
    return result.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()


def _take_apart(result: Any) -> tuple[list[Tensor] | None, Any]:
    """The tensors of a result, and its class; None if it is something else."""
    if type(result) is Tensor:
        return [result], Tensor
    if isinstance(result, tuple) and all(type(value) is Tensor for value in result):
        return list(result), type(result)
    return None, None


@dataclass
class _PlanBuilder:
    """Gives every recorded buffer its place in the list of addresses."""

    recorder: Recorder
    outputs: list[Tensor]
    source_of: dict[int, tuple[int, int]] = field(default_factory=dict)  # storage → entry, offset
    counters: dict[int, Tensor] = field(default_factory=dict)  # by their address

    def build(self, kind: Any) -> LaunchPlan | None:
        num_inputs = len(self.recorder.inputs)
        results = self._place_results(num_inputs)
        if results is None:
            return None
        workspace_bytes = self._place_workspace(num_inputs + len(results))
        self._first_counter = num_inputs + len(results) + bool(workspace_bytes)
        launches = []
        for launch in self.recorder.launches:
            found = [(position, self._find_source(x)) for position, x in launch.tensors]
            addresses = [Address(position, *source) for position, source in found if source]
            if len(addresses) < len(found):
                return None
            launches.append(
                PlannedLaunch(
                    launch.run,
                    launch.head,
                    launch.tail,
                    launch.arguments,
                    tuple(addresses),
                    launch.types,
                )
            )
        counts = tuple(tensor.numel() for tensor in self.counters.values())
        return LaunchPlan(tuple(results), workspace_bytes, counts, tuple(launches), kind)

    def _place_results(self, first: int) -> list[NewTensor] | None:
        """One allocation a result; None if a result is not new, or shares one with another."""
        results: list[NewTensor] = []
        for tensor in self.outputs:
            storage = tensor.untyped_storage().data_ptr()
            whole = self.recorder.buffers.get(storage)
            if whole is None or storage in self.source_of:
                return None
            if whole.dtype != tensor.dtype or whole.storage_offset():
                return None
            view = None
            if (whole.shape, whole.stride()) != (tensor.shape, tensor.stride()):
                view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            self.source_of[storage] = (first + len(results), 0)
            results.append(NewTensor(tuple(whole.shape), whole.stride(), whole.dtype, view))
        return results

    def _place_workspace(self, entry: int) -> int:
        """Buffers that are no results, one after the other in one allocation. Returns its bytes."""
        end = 0
        for storage, buffer in self.recorder.buffers.items():
            if storage not in self.source_of:
                self.source_of[storage] = (entry, end)
                size = buffer.untyped_storage().nbytes()
                end += -(-size // ALIGNMENT) * ALIGNMENT
        return end

    def _find_source(self, tensor: Tensor) -> tuple[int, int] | None:
        """The entry of the list of addresses, and the offset from it; None if unknown."""
        address, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
        if is_counters(tensor):
            self.counters.setdefault(address, tensor)
            return self._first_counter + list(self.counters).index(address), 0
        if storage in self.source_of:
            entry, offset = self.source_of[storage]
            return entry, offset + address - storage
        for k, known in enumerate(self.recorder.inputs):
            if address and known.untyped_storage().data_ptr() == storage:
                return k, address - known.data_ptr()
        return None
