"""One captured call: what is copied before and after its replay.

In: a captured call, and the inputs of a later one. Out: that call's outputs.

    inputs    An input of the address that was captured is read in place. The others are copied into
              static buffers, all in one launch; those that the function mutates are copied back. Inputs
              on the host are copied without waiting for the device.
    outputs   copied   the caller gets memory of its own, which no replay overwrites
              shared   the caller gets the graph's memory; see `memory.py` for when it is overwritten
              internal only the function's tail reads it: launches that run after the replay, into fresh
                       memory (`ResultTail`)
              An output that is an input, or a view of one, is made from the input of this call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fulgurite.cudagraph.capture import BoxedFunction, CapturedCall
from fulgurite.cudagraph.memory import CapturePool, SharedOutputs
from fulgurite.cudagraph.native_replay import Plan, ReplayPlan, Result, ResultKind, Words
from fulgurite.cudagraph.seeds import CapturedSeeds

OutputMode = Literal["copied", "shared", "internal"]
CHECKED_REPLAYS = (4, 16, 64, 256)
MIN_GROUPED_COPIES = 3  # so many outputs are allocated one by one and copied in one launch


class UnsupportedOutputError(RuntimeError):
    """A captured function returned what a replay can't return."""


@dataclass(frozen=True)
class ResultTail:
    """Launches that run after each replay, without a graph: those that make large results.

    run       takes the internal outputs of the graph, then inputs of the call; returns results
    inputs    positions of these inputs
    outputs   positions of the results
    """

    run: BoxedFunction
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class ReplayableCall:
    """A captured call with the copies around it.

    static     positions of inputs that are read in place
    buffers    position of each other tensor → its static buffer
    mutated    positions of inputs that the function writes to
    tail       what makes the other results, after the replay
    """

    def __init__(
        self,
        call: CapturedCall,
        inputs: Sequence[Any],
        static: list[int],
        buffers: dict[int, Tensor],
        mutated: Sequence[int],
        output_modes: Sequence[OutputMode],
        pool: CapturePool,
        tail: ResultTail | None = None,
    ) -> None:
        self.pool, self.order = pool, pool.add(self)
        self._state = Words(0, 0, 0)  # replays, last_used, is_due
        self.successor: weakref.ref[ReplayableCall] | None = None  # what was replayed after it
        self.seeds: CapturedSeeds | None = None  # of its random kernels
        self.static = static
        self.addresses = [x.data_ptr() if isinstance(x, Tensor) else 0 for x in inputs]
        self._replay = call.replay
        self._call = call  # owns the graph
        self.copied = list(buffers)
        self._buffers = list(buffers.values())
        self._copied_back = [k for k in buffers if k in mutated]
        self._back_sources = [buffers[k] for k in self._copied_back]
        self._tail = tail
        self._internal: list[Any] = []  # what the tail reads of the graph's memory
        self._results: list[Any] = list(call.outputs)  # constants stay in it
        self._from_inputs: list[tuple[int, int, _InputView]] = []  # output, input, how
        self._shared: list[tuple[int, Tensor]] = []
        self._cloned: list[tuple[int, Tensor]] = []
        self._copied_together: list[tuple[int, Tensor]] = []
        self._plan_outputs(inputs, output_modes)
        call.outputs = []  # the lists above keep the graph's memory
        self.plan: Plan | None = None  # for native code
        self.shared_outputs: SharedOutputs | None = None
        if self._shared:
            self.shared_outputs = SharedOutputs(self.order, [tensor for _, tensor in self._shared])
            weakref.finalize(self, self.shared_outputs.release).atexit = False

    def _plan_outputs(self, inputs: Sequence[Any], output_modes: Sequence[OutputMode]) -> None:
        in_place = {}
        for k in self.static:
            if inputs[k].numel():
                in_place[inputs[k].untyped_storage().data_ptr()] = k
        own = {buffer.untyped_storage().data_ptr(): k for k, buffer in enumerate(self._buffers)}
        pairs = list(zip(self._results, output_modes, strict=True))
        self._internal = [value for value, mode in pairs if mode == "internal"]
        del self._results[len(pairs) - len(self._internal) :]  # the last ones are internal
        self._internal_storages = {_storage(value) for value in self._internal} - {None}
        if self._internal_storages & in_place.keys():
            raise UnsupportedOutputError("a region returns one of its inputs to the tail")
        for position, (value, mode) in enumerate(pairs):
            if not isinstance(value, Tensor) or mode == "internal":
                continue
            self._results[position] = None  # a reference would count as a holder
            storage = value.untyped_storage().data_ptr()
            if storage in in_place:
                source = in_place[storage]
                view = _InputView(value, inputs[source])
                self._from_inputs.append((position, source, view))
            elif mode == "copied" and storage in own:
                source = self.copied[own[storage]]
                view = _InputView(value, self._buffers[own[storage]])
                self._from_inputs.append((position, source, view))
            else:
                found = self._shared if mode == "shared" else self._copied_together
                found.append((position, value))
        if len(self._copied_together) < MIN_GROUPED_COPIES:  # a clone takes half the host time
            is_dense = torch.ops.aten.is_non_overlapping_and_dense
            self._cloned = [pair for pair in self._copied_together if is_dense(pair[1])]
            self._copied_together = [p for p in self._copied_together if not is_dense(p[1])]

    @property
    def replays(self) -> int:
        return self._state[0]

    @property
    def last_used(self) -> int:
        """Number of the function's replay."""
        return self._state[1]

    @last_used.setter
    def last_used(self, number: int) -> None:
        self._state[1] = number

    @property
    def is_due(self) -> bool:
        """To be looked at: do inputs still have to be copied?"""
        return bool(self._state[2])

    def make_plan(self, inputs: Sequence[Any], dynamic: Sequence[int] = ()) -> Plan | None:
        """How native code replays this capture; None: Python does.

        dynamic   positions of inputs whose sizes, or values if they are numbers, may change
        """
        made = {k: Result(ResultKind.MEMORY, tensor) for k, tensor in self._shared}
        made |= {k: Result(ResultKind.COPY, tensor) for k, tensor in self._cloned}
        made |= {k: view.as_result(source) for k, source, view in self._from_inputs}
        constants = enumerate(self._results)
        results = [made.get(k) or Result(ResultKind.CONSTANT, value) for k, value in constants]
        must_finish = self._copied_back or self._copied_together or self._tail
        return ReplayPlan(
            self._replay,
            partial(_copy_inputs, self._buffers, self.copied),
            None if self.seeds is None else self.seeds.draw,
            weak_method(self._finish) if must_finish else None,
            self.pool.shared,
            self.shared_outputs,
            self._state,
            self.order,
            len(inputs),
            [(k, self.addresses[k]) for k in self.static],
            list(zip(self.copied, self._buffers, strict=True)),
            results,
            [(k, inputs[k]) for k in dynamic],
        ).pack()

    def matches(self, inputs: list[Any]) -> bool:
        """Whether the inputs that are read in place are where they were captured."""
        return all(inputs[k].data_ptr() == self.addresses[k] for k in self.static)

    def may_replay(self) -> bool:
        """Whether nobody holds outputs that a replay would overwrite."""
        return not self.pool.shared or self.pool.may_replay(self.order)

    def are_outputs_held(self) -> bool:
        return self.shared_outputs is not None and self.shared_outputs.are_held()

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        if self.shared_outputs is not None:
            self.pool.share(self.shared_outputs)
        if self.copied:
            _copy_inputs(self._buffers, self.copied, inputs)
        if self.seeds is not None:
            self.seeds.draw()
        self._replay()
        self._state[0] += 1
        self._state[2] = self.replays in CHECKED_REPLAYS and bool(self.copied)
        results = self._results.copy()
        for position, tensor in self._shared:
            results[position] = tensor.detach()
        for position, source, view in self._from_inputs:
            results[position] = view.of(inputs[source])
        for position, tensor in self._cloned:
            results[position] = tensor.clone()
        self._finish(inputs, results)
        return results

    def _finish(self, inputs: Sequence[Any], results: list[Any]) -> None:
        """What native code leaves to Python: mutated buffers, many copies, the tail."""
        if self._copied_back:
            copy_all([inputs[k] for k in self._copied_back], self._back_sources)
        if self._copied_together:
            copies = [empty_like_strided(tensor) for _, tensor in self._copied_together]
            copy_all(copies, [tensor for _, tensor in self._copied_together])
            for (position, _), copy in zip(self._copied_together, copies, strict=True):
                results[position] = copy
        if self._tail is not None:
            self._run_tail(self._tail, inputs, results)

    def _run_tail(self, tail: ResultTail, inputs: Sequence[Any], results: list[Any]) -> None:
        values = tail.run([*self._internal, *(inputs[k] for k in tail.inputs)])
        for position, value in zip(tail.outputs, values, strict=True):
            # a kernel that stored its result in the graph's memory, against what was planned
            is_overwritten = _storage(value) in self._internal_storages
            results[position] = value.clone() if is_overwritten else value

    @property
    def kept_bytes(self) -> int:
        """Bytes of its outputs and static buffers, which stay allocated between replays."""
        kept = [tensor for _, tensor in (*self._shared, *self._cloned, *self._copied_together)]
        kept += [value for value in self._internal if isinstance(value, Tensor)]
        storages = {
            _storage(tensor): tensor.untyped_storage().nbytes()
            for tensor in (*kept, *self._buffers)
        }
        return sum(storages.values())


def _storage(value: Any) -> int | None:
    """The address of a tensor's memory; None for other values, and for empty memory."""
    return value.untyped_storage().data_ptr() or None if isinstance(value, Tensor) else None


class _InputView:
    """How an output is made from an input whose memory it shares."""

    def __init__(self, output: Tensor, source: Tensor) -> None:
        if output.dtype != source.dtype or output.is_conj() or output.is_neg():
            raise UnsupportedOutputError("an output is a view of an input with another dtype")
        self.size, self.stride = output.shape, output.stride()
        self.offset = output.storage_offset() - source.storage_offset()
        is_whole = (self.size, self.stride) == (source.shape, source.stride())
        self.is_input = is_whole and self.offset == 0

    def as_result(self, position: int) -> Result:
        if self.is_input:
            return Result(ResultKind.INPUT, source=position)
        layout = (tuple(self.size), self.stride)
        return Result(ResultKind.VIEW, source=position, layout=layout, offset=self.offset)

    def of(self, source: Tensor) -> Tensor:
        if self.is_input:
            return source
        return source.as_strided(self.size, self.stride, source.storage_offset() + self.offset)


def _copy_inputs(buffers: list[Tensor], positions: list[int], inputs: Sequence[Any]) -> None:
    copy_all(buffers, [inputs[k] for k in positions])


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method that does not keep its object alive. Who calls it does."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        bound = reference()
        assert bound is not None, "a capture is alive while it is replayed"
        return bound(*arguments)

    return call


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy several tensors; in one launch where dtypes and strides allow it.

    CUDA copies from pageable host memory before the call returns, without waiting for the device.
    """
    if len(targets) == 1:
        targets[0].copy_(sources[0], non_blocking=True)
    else:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def copy_strided(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """A copy with the same strides, on the same device or on this one."""
    return empty_like_strided(tensor, device).copy_(tensor)


def empty_like_strided(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
    )
