"""Replay: a step that is nothing but native kernel calls, run again in one C call.

In: a function that, once warm, calls only native kernels and makes only views around them: fused
regions, packed linears, paged attention. Out: a `Recording`, which runs the same kernels on the same
addresses without Python, torch's dispatcher or allocation: on the CPU what CUDA graphs are on a GPU.

    token_ids, positions = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    step = replay.record(model_step, token_ids, positions)
    token_ids[0], positions[0] = 17, 4
    step()                                   # results lie in step.outputs, the same tensors every time

A native kernel is a C function `int64_t name(const int64_t* a)`: addresses, sizes and the number of
threads in one array; it returns 0 where all is well. Kernels are called through `Kernel`, which writes the
call down while a step is recorded. Anything else that computes would be missing from the replay, so
recording refuses it by name. Sizes are those of the recorded step: record one step a batch size.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler_legacy

from fulgurite import native
from fulgurite.errors import FulguriteError, ReplayError

SOURCE = """
// Calls written down: functions of one array of integers each, and where their arrays lie.
typedef long int64_t;
typedef int64_t (*Function)(const int64_t*);
struct Call { Function function; const int64_t* arguments; };
struct timespec { long seconds, nanoseconds; };
extern "C" int clock_gettime(int, timespec*);
#define EXPORT extern "C" __attribute__((visibility("default")))

// a: the calls, how many, room for the status of a call that failed; the number of that call, from 1
EXPORT int64_t replay(const int64_t* a) {
  const Call* calls = (const Call*)a[0];
  for (int64_t k = 0; k < a[1]; ++k) {
    int64_t status = calls[k].function(calls[k].arguments);
    if (__builtin_expect(status != 0, 0)) {
      *(int64_t*)a[2] = status;
      return k + 1;
    }
  }
  return 0;
}

// the same with the nanoseconds of each call added to a[3]
EXPORT int64_t timed(const int64_t* a) {
  const Call* calls = (const Call*)a[0];
  int64_t* spent = (int64_t*)a[3];
  timespec before, after;
  for (int64_t k = 0; k < a[1]; ++k) {
    clock_gettime(1, &before);
    calls[k].function(calls[k].arguments);
    clock_gettime(1, &after);
    spent[k] += (after.seconds - before.seconds) * 1000000000 + after.nanoseconds - before.nanoseconds;
  }
  return 0;
}
"""


class Kernel:
    """A native function, called with its packed arguments; writes itself down while recording."""

    def __init__(
        self,
        library: ctypes.CDLL,
        symbol: str,
        name: str | None = None,
        problem: Callable[[int], Exception] | None = None,
    ) -> None:
        function = getattr(library, symbol)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
        self.name = name or symbol
        self.function = function
        self.library = library
        self.address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self.problem = problem or self._failed

    def __call__(self, packed: bytes, keep: Sequence[object] = ()) -> None:
        """Run it. `keep`: what owns the memory behind the addresses, which a recording has to hold."""
        if _here.recorder is not None:
            _here.recorder.add(self, packed, keep)
        status = self.function(packed)
        if status:
            raise self.problem(status)

    def _failed(self, status: int) -> Exception:
        return FulguriteError(f"the native kernel {self.name} failed with status {status}")


@dataclass(frozen=True)
class Call:
    kernel: Kernel
    packed: bytes


class Recorder:
    """Gathers native calls and the memory they use."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.kept: list[object] = []

    def add(self, kernel: Kernel, packed: bytes, keep: Sequence[object]) -> None:
        self.calls.append(Call(kernel, packed))
        self.kept.extend(keep)


ALLOCATIONS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def _refuse_computing(names: Sequence[str]) -> None:
    """Raise for the first op that is neither a view, an allocation nor made of others."""
    for name in dict.fromkeys(names):
        namespace, _, short = name.partition("::")
        if namespace == "aten" and short not in ALLOCATIONS and not _only_looks(name):
            raise ReplayError(
                f"{name} computes something that is not a native kernel",
                next="compile the part around it with the fuser, or move it out of the recorded step",
            )


@functools.cache
def _only_looks(name: str) -> bool:
    """Whether an op makes views only, or is composed of ops that are seen themselves."""
    schemas = torch._C._jit_get_schemas_for_operator(name)
    looks = all(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            f"{schema.name}.{schema.overload_name}".rstrip("."), "CompositeImplicitAutograd"
        )
        or all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        for schema in schemas
        if "out" not in schema.overload_name and schema.returns
    )
    return looks


class _Here(threading.local):
    recorder: Recorder | None = None


_here = _Here()


def recording() -> bool:
    """Whether native calls on this thread are being written down."""
    return _here.recorder is not None


def keep(tensor: Tensor) -> Tensor:
    """The tensor; a recording in progress holds its memory."""
    if _here.recorder is not None:
        _here.recorder.kept.append(tensor)
    return tensor


def record(step: Callable[..., Any], *inputs: Any, warmups: int = 1) -> Recording:
    """Run `step(*inputs)` and write its native calls down. It has to be idempotent on its inputs.

    warmups   runs before, in which regions are compiled and memory is first touched
    """
    if _here.recorder is not None:
        raise ReplayError("a recording inside a recording", next="record the outer step only")
    for _ in range(warmups):
        step(*inputs)
    recorder = Recorder()
    _here.recorder = recorder
    try:
        # A profiler sees every op without being seen: under a dispatch mode TorchDynamo would step aside.
        with profiler_legacy.profile() as seen:
            outputs = step(*inputs)
    finally:
        _here.recorder = None
    _refuse_computing([event.name for event in seen.function_events])
    return Recording(recorder.calls, (recorder.kept, inputs, step), outputs)


class Recording:
    """The recorded calls. Calling it runs them; `outputs` is what the step returned."""

    def __init__(self, calls: Sequence[Call], held: Any, outputs: Any) -> None:
        self.calls = tuple(calls)
        self.outputs = outputs
        self._held = held  # everything whose memory the calls use
        arguments = b"".join(call.packed for call in calls)
        self._arguments = ctypes.create_string_buffer(arguments, max(len(arguments), 1))
        at = ctypes.addressof(self._arguments)
        rows: list[int] = []
        for call in calls:
            rows += [call.kernel.address, at]
            at += len(call.packed)
        self._table = (ctypes.c_int64 * len(rows))(*rows)
        self._status = ctypes.c_int64(0)
        library = _library()
        self._run = library.replay
        self._head = struct.pack(
            "3q", ctypes.addressof(self._table), len(calls), ctypes.addressof(self._status)
        )

    def __call__(self) -> Any:
        """Run the step again on what its inputs hold now; returns `outputs`."""
        failed = self._run(self._head)
        if failed:
            raise self.calls[failed - 1].kernel.problem(self._status.value)
        return self.outputs

    def __repr__(self) -> str:
        return f"<recording of {len(self.calls)} native calls>"

    def profile(self, repeats: int = 20) -> list[tuple[str, int, float]]:
        """(kernel, how many calls, seconds a step) of each kernel, slowest first."""
        spent = (ctypes.c_int64 * len(self.calls))()
        head = self._head + struct.pack("q", ctypes.addressof(spent))
        for _ in range(repeats):
            _library().timed(head)
        total: dict[str, list[float]] = {}
        for call, nanoseconds in zip(self.calls, spent, strict=True):
            total.setdefault(call.kernel.name, []).append(nanoseconds * 1e-9 / repeats)
        rows = [(name, len(times), sum(times)) for name, times in total.items()]
        return sorted(rows, key=lambda row: -row[2])


@functools.cache
def _library() -> ctypes.CDLL:
    library = native.load(SOURCE)
    for function in (library.replay, library.timed):
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return library
