"""CUDA graphs: a function of tensors, recorded once and replayed in one launch.

In: a function whose only effects are writes to its inputs and that, called twice on equally shaped CUDA tensors, launches the same kernels. Out:
`Graphed`, which behaves like that function. The first calls run as they are; then the kernels are recorded and
replayed on the same addresses:

    inputs    that have stood still (parameters) are read where they are; others are copied into the graph's memory.
              One that stood still and moves is copied from then on, after a second recording.
              Those that are written to (running statistics) are, if copied, copied back.
    results   lie in the graph's memory, which the next replay overwrites. What the user gets is copied out. What is
              kept for backward, and gradients, are lent: while someone holds one, calls run without the graph.

A call that a graph can't serve runs as it is: another stream, a call inside a capture or from a second thread, sizes
past the limit. `notes` says what happened, for `explain`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

Handing = Literal["inside", "copied", "lent"]
Run = Callable[..., Sequence[Tensor]]
RECORDINGS = 8  # of one shape; an input that moves costs one
SHAPES = 32  # distinct sizes a graph is recorded for


class Tape(Protocol):
    """Something recorded: what it reads, what it gives, and how to run it again."""

    inputs: list[Any]
    outputs: list[Tensor]

    def replay(self) -> None: ...


class CudaTape:
    """The kernels of one call, as a CUDA graph with memory of its own."""

    def __init__(self, run: Run, inputs: Sequence[Any]) -> None:
        self.inputs = list(inputs)
        device = next(value.device for value in inputs if isinstance(value, Tensor))
        with torch.cuda.device(device), torch.random.fork_rng([device]):
            run(*inputs)  # these addresses may want kernels that are not compiled or loaded yet
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(device), torch.cuda.graph(self.graph):
            self.outputs = list(run(*inputs))

    def replay(self) -> None:
        self.graph.replay()


@dataclass
class _Recording:
    """A tape with its borders: which inputs are copied in, how results are handed out."""

    tape: Tape
    fixed: dict[int, int]  # position of an input that is read in place → its address
    copied: list[int]
    written: list[int]  # of the copied ones, those that are copied back
    handing: Sequence[Handing]
    idle: list[tuple[int, int]] = field(default_factory=list)  # storage, its uses while not lent

    def __post_init__(self) -> None:
        read_in_place = {self.tape.inputs[k].untyped_storage().data_ptr() for k in self.fixed}
        lent = [t for t, how in zip(self.tape.outputs, self.handing, strict=True) if how == "lent"]
        self._storages = [
            tensor.untyped_storage()
            for tensor in lent
            if tensor.untyped_storage().data_ptr() not in read_in_place
        ]
        for k in (
            self.fixed
        ):  # an address is enough; holding what forward lends would keep it from forward
            self.tape.inputs[k] = None
        self.idle = [(s._cdata, _uses(s._cdata)) for s in self._storages]

    def moved(self, addresses: Sequence[int]) -> list[int]:
        return [k for k, address in self.fixed.items() if addresses[k] != address]

    def is_lent(self) -> bool:
        return any(_uses(storage) > uses for storage, uses in self.idle)

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        held = self.tape.inputs
        if self.copied:
            torch._foreach_copy_([held[k] for k in self.copied], [inputs[k] for k in self.copied])
        self.tape.replay()
        if self.written:
            torch._foreach_copy_([inputs[k] for k in self.written], [held[k] for k in self.written])
        return tuple(
            _copy(tensor) if how == "copied" else tensor.detach()
            for tensor, how in zip(self.tape.outputs, self.handing, strict=True)
        )


def _uses(storage: int) -> int:
    return torch._C._storage_Use_Count(storage)


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return made.copy_(tensor)


@dataclass
class _Sizes:
    """What is known of calls with one set of sizes."""

    calls: int = 0
    addresses: tuple[int, ...] = ()
    still: set[int] = field(default_factory=set)  # inputs whose address did not change
    recordings: int = 0
    recording: _Recording | None = None
    given_up: bool = False

    def look(self, addresses: tuple[int, ...]) -> None:
        self.calls += 1
        pairs = zip(addresses, self.addresses or addresses, strict=True)
        self.still = {k for k, (now, before) in enumerate(pairs) if now == before}
        self.addresses = addresses


class Graphed:
    """A function that is replayed as a CUDA graph once it is warm."""

    def __init__(
        self,
        name: str,
        run: Run,
        handing: Sequence[Handing],
        *,
        written: Sequence[int] = (),
        warmups: int = 2,
        record: Callable[[Run, Sequence[Any]], Tape] = CudaTape,
    ) -> None:
        self.name, self.run, self.handing, self.warmups = name, run, tuple(handing), warmups
        self.written = tuple(written)  # positions of inputs that the function writes to
        self.record = record
        self.replays = self.plain_runs = 0
        self.notes: list[str] = []
        self._sizes: dict[Any, _Sizes] = {}
        self._busy = threading.Lock()
        self._stream: Any = None

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        if not self._busy.acquire(blocking=False):
            return self._plainly(inputs, "called from a second thread meanwhile")
        try:
            return self._call(inputs)
        finally:
            self._busy.release()

    def _call(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        if self._elsewhere():
            return self._plainly(inputs, "called on another stream, or inside a capture")
        key = tuple(x.shape if isinstance(x, Tensor) else x for x in inputs)
        known = self._sizes.get(key)
        if known is None:
            if len(self._sizes) >= SHAPES:
                return self._plainly(inputs, f"more than {SHAPES} sizes: pad to fewer of them")
            known = self._sizes[key] = _Sizes()
        if known.given_up:
            return self._plainly(inputs)
        addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else 0 for x in inputs)
        recording = self._recording(known, addresses, inputs)
        if recording is None:
            return self._plainly(inputs)
        if recording.is_lent():
            return self._plainly(inputs, "results of the last replay are still held")
        self.replays += 1
        return recording(inputs)

    def _elsewhere(self) -> bool:
        if not torch.cuda.is_available():
            return False
        stream = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = stream
        return torch.cuda.is_current_stream_capturing() or stream != self._stream

    def _plainly(self, inputs: Sequence[Any], why: str = "") -> Sequence[Tensor]:
        self.plain_runs += 1
        if why and why not in self.notes:
            self.notes.append(why)
        return self.run(*inputs)

    def _recording(
        self, known: _Sizes, addresses: tuple[int, ...], inputs: Sequence[Any]
    ) -> _Recording | None:
        if known.recording is not None:
            moved = known.recording.moved(addresses)
            if not moved:
                return known.recording
            known.recording = None
            known.still -= set(moved)
        else:
            known.look(addresses)
            if known.calls <= self.warmups:
                return None
        if known.recordings >= RECORDINGS:
            known.given_up = True
            self.notes.append("given up: inputs that stood still moved again and again")
            return None
        known.recordings += 1
        known.recording = self._record(known, inputs)
        return known.recording

    def _record(self, known: _Sizes, inputs: Sequence[Any]) -> _Recording | None:
        tensors = [k for k, value in enumerate(inputs) if isinstance(value, Tensor)]
        fixed = {k: inputs[k].data_ptr() for k in tensors if k in known.still}
        copied = [k for k in tensors if k not in known.still]
        if any(torch._debug_has_internal_overlap(inputs[k]) == 1 for k in copied):
            self._give_up(known, "an input overlaps itself and can't be copied into a graph")
            return None
        held = [_copy(value) if k in copied else value for k, value in enumerate(inputs)]
        before = {k: _copy(held[k]) for k in self.written}
        try:
            tape = self.record(self.run, held)
        except RuntimeError as error:  # what CUDA says of an operation that a capture forbids
            first = str(error).strip().splitlines()[0]
            self._give_up(known, f"could not be captured: {first}")
            return None
        finally:
            for k, value in before.items():  # recording runs the function once for nothing
                held[k].copy_(value)
        back = [k for k in copied if k in self.written]
        return _Recording(tape, fixed, copied, back, self.handing)

    def _give_up(self, known: _Sizes, why: str) -> None:
        known.given_up = True
        self.notes.append(why)
        warnings.warn(
            f"fulgurite: {self.name} runs without a CUDA graph: {why}. Compile without cudagraph=True, "
            "or keep that operation out of the function.",
            stacklevel=2,
        )

    def __repr__(self) -> str:
        return f"<{self.name}: {self}>"

    def __str__(self) -> str:
        said = f"{self.replays} replays, {self.plain_runs} calls without the graph"
        return "; ".join([said, *self.notes])
