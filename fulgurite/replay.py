"""Replay: run a recorded step of native CPU kernels again in one C call.

In: a function that, once warm, only calls native kernels and makes views: fused regions, quantized
linears, paged attention. Out: a `Recording`. It runs the same kernels on the same addresses without
Python, torch's dispatcher or allocation. It is to the CPU what a CUDA graph is to a GPU.

    token_ids, positions = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    step = replay.record(model_step, token_ids, positions)
    token_ids[0], positions[0] = 17, 4
    step()                            # the outputs are step.outputs, the same tensors every time

A native kernel is a C function `int64_t name(const int64_t* a)`. The array holds addresses, sizes and
the number of threads. The function returns 0 on success. `NativeKernel` calls such a function, and
records the call while a step is recorded. Any other computation would be missing from the replay, so
`record` raises an error that names it. Sizes are those of the recorded step: record one step per
batch size. Kernels allocate their outputs with `empty`, so that temporaries of a recording share memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler, profiler_legacy

from fulgurite import native
from fulgurite.errors import FulguriteError, ReplayError

SOURCE = """
// Recorded calls: functions of one array of integers, and the addresses of their arrays.
typedef long int64_t;
typedef int64_t (*Function)(const int64_t*);
struct Call { Function function; const int64_t* arguments; };
struct timespec { long seconds, nanoseconds; };
extern "C" int clock_gettime(int, timespec*);
#define EXPORT extern "C" __attribute__((visibility("default")))

// a: the calls, their count, where to store the status of a failed call.
// Returns 0, or the number of the call that failed, counted from 1.
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

// The same; adds the nanoseconds of each call to a[3].
EXPORT int64_t replay_timed(const int64_t* a) {
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


class NativeKernel:
    """A native function of packed arguments; a recording in progress records its calls."""

    def __init__(
        self,
        library: ctypes.CDLL,
        symbol: str,
        name: str | None = None,
        make_error: Callable[[int], Exception] | None = None,
    ) -> None:
        function = getattr(library, symbol)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
        self.name = name or symbol
        self.function = function
        self.library = library
        self.address = ctypes.cast(function, ctypes.c_void_p).value or 0
        self.make_error = make_error or self._default_error

    def __call__(self, packed: bytes, keep_alive: Sequence[object] = ()) -> None:
        """Run the kernel. A recording holds `keep_alive`, the owners of the addressed memory."""
        if _thread_state.recorder is not None:
            _thread_state.recorder.add(self, packed, keep_alive)
        elif profiler._is_profiler_enabled:  # reading it takes 20 ns
            return self._call_profiled(packed)
        status = self.function(packed)
        if status:
            raise self.make_error(status)

    def _call_profiled(self, packed: bytes) -> None:
        """Run the kernel as an event of torch.profiler with the kernel's name."""
        with profiler.record_function(self.name):
            status = self.function(packed)
        if status:
            raise self.make_error(status)

    def _default_error(self, status: int) -> Exception:
        return FulguriteError(f"the native kernel {self.name} failed with status {status}")


@dataclass(frozen=True)
class NativeCall:
    kernel: NativeKernel
    packed: bytes


class Workspace:
    """Memory of a recording's temporaries. Calls run in order, so a block whose tensor is gone is
    used for the next one."""

    def __init__(self) -> None:
        self.blocks: dict[int, Tensor] = {}  # bytes by their address
        self.free: list[Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        block = self._take(num_bytes)
        # The tensor owns this object; when both are gone, the block is free.
        owner = (ctypes.c_char * num_bytes).from_address(block.data_ptr())
        weakref.finalize(owner, self.free.append, block).atexit = False
        return torch.frombuffer(owner, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def _take(self, num_bytes: int) -> Tensor:
        """The smallest free block that fits, or a new one."""
        fitting = [k for k, block in enumerate(self.free) if block.nbytes >= num_bytes]
        if fitting:
            return self.free.pop(min(fitting, key=lambda k: self.free[k].nbytes))
        block = torch.empty(num_bytes, dtype=torch.uint8)
        self.blocks[block.data_ptr()] = block
        return block

    def owns(self, thing: object) -> bool:
        return isinstance(thing, Tensor) and thing.untyped_storage().data_ptr() in self.blocks

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks.values())


class Recorder:
    """Collects native calls and the owners of the memory they use."""

    def __init__(self) -> None:
        self.calls: list[NativeCall] = []
        self.keep_alive: list[object] = []
        self.workspace = Workspace()

    def add(self, kernel: NativeKernel, packed: bytes, keep_alive: Sequence[object]) -> None:
        self.calls.append(NativeCall(kernel, packed))
        self.hold(keep_alive)

    def hold(self, things: Sequence[object]) -> None:
        """Keep these alive. Temporaries may go: the workspace has their memory."""
        self.keep_alive.extend(thing for thing in things if not self.workspace.owns(thing))


ALLOCATION_OPS = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


def _check_no_computation(names: Sequence[str]) -> None:
    """Raise for the first op that is no view, no allocation and not composed of other ops."""
    for name in dict.fromkeys(names):
        namespace, _, short = name.partition("::")
        if namespace == "aten" and short not in ALLOCATION_OPS and not _is_view_or_composite(name):
            raise ReplayError(
                f"{name} computes something outside of native kernels",
                next="compile the code around it with the fuser, or move it out of the recorded step",
            )


@functools.cache
def _is_view_or_composite(name: str) -> bool:
    """Whether an op returns views only, or is composed of ops that the profiler reports itself."""
    schemas = torch._C._jit_get_schemas_for_operator(name)
    named = [(f"{schema.name}.{schema.overload_name}".rstrip("."), schema) for schema in schemas]
    return all(
        torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")
        or all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        for overload, schema in named
        if "out" not in schema.overload_name and schema.returns
        # TorchScript has overloads that the dispatcher does not know: aten::to.prim_Device
        if torch._C._dispatch_has_kernel(overload)
    )


class _ThreadState(threading.local):
    recorder: Recorder | None = None


_thread_state = _ThreadState()
# recordings in progress on any thread; host programs read it, and run as Python meanwhile
num_recordings = ctypes.c_int64(0)
_num_recordings_lock = threading.Lock()


def _count_recording(change: int) -> None:
    with _num_recordings_lock:
        num_recordings.value += change


def is_recording() -> bool:
    """Whether native calls on this thread are being recorded."""
    return _thread_state.recorder is not None


def hold_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor; a recording in progress keeps its memory alive."""
    if _thread_state.recorder is not None:
        _thread_state.recorder.hold((tensor,))
    return tensor


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialized CPU tensor; while a step is recorded, in memory of the recording."""
    recorder = _thread_state.recorder
    return (
        torch.empty(shape, dtype=dtype)
        if recorder is None
        else recorder.workspace.empty(shape, dtype)
    )


def record(step: Callable[..., Any], *inputs: Any, warmups: int = 1) -> Recording:
    """Run `step(*inputs)` and record its native calls. The step must be idempotent on its inputs.

    warmups   calls before the recording, which compile regions and touch memory first
    """
    _check_not_recording()
    for _ in range(warmups):
        step(*inputs)
    # A profiler sees every op. Under a dispatch mode TorchDynamo would not run compiled code.
    with profiler_legacy.profile() as profile:
        recording = record_kernels(step, *inputs)
    _check_no_computation([event.name for event in profile.function_events])
    return recording


def record_kernels(step: Callable[..., Any], *inputs: Any) -> Recording:
    """Run `step(*inputs)` and record its native calls alone: what else it computes is not in the recording.

    A recording for timings.
    """
    _check_not_recording()
    recorder = Recorder()
    _thread_state.recorder = recorder
    _count_recording(1)
    try:
        outputs = step(*inputs)
    finally:
        _thread_state.recorder = None
        _count_recording(-1)
    return Recording(recorder, (inputs, step), outputs)


def _check_not_recording() -> None:
    if _thread_state.recorder is not None:
        raise ReplayError("a recording inside a recording", next="record the outer step only")


class Recording:
    """Recorded calls. Calling it runs them; `outputs` is what the step returned."""

    def __init__(self, recorder: Recorder, inputs: Any, outputs: Any) -> None:
        self.calls = calls = tuple(recorder.calls)
        self.outputs = outputs
        self.workspace = recorder.workspace
        self._keep_alive = (recorder.keep_alive, inputs)  # owners of the memory that the calls use
        arguments = b"".join(call.packed for call in calls)
        self._arguments = ctypes.create_string_buffer(arguments, max(len(arguments), 1))
        address = ctypes.addressof(self._arguments)
        rows: list[int] = []
        for call in calls:
            rows += [call.kernel.address, address]
            address += len(call.packed)
        self._table = (ctypes.c_int64 * len(rows))(*rows)
        self._status = ctypes.c_int64(0)
        library = _library()
        self._run = library.replay
        self._head = struct.pack(
            "3q", ctypes.addressof(self._table), len(calls), ctypes.addressof(self._status)
        )

    def __call__(self) -> Any:
        """Run the step again on the current contents of its inputs; return `outputs`.

        Under a profiler each call is an event of its own, with the kernel's name.
        """
        if profiler._is_profiler_enabled:
            for call in self.calls:
                call.kernel(call.packed)
            return self.outputs
        failed = self._run(self._head)
        if failed:
            raise self.calls[failed - 1].kernel.make_error(self._status.value)
        return self.outputs

    def __repr__(self) -> str:
        return f"<recording of {len(self.calls)} native calls>"

    def profile(self, repeats: int = 20) -> list[tuple[str, int, float]]:
        """Return (kernel, number of calls, seconds per step) of each kernel, slowest first."""
        spent = (ctypes.c_int64 * len(self.calls))()
        head = self._head + struct.pack("q", ctypes.addressof(spent))
        for _ in range(repeats):
            _library().replay_timed(head)
        total: dict[str, list[float]] = {}
        for call, nanoseconds in zip(self.calls, spent, strict=True):
            total.setdefault(call.kernel.name, []).append(nanoseconds * 1e-9 / repeats)
        rows = [(name, len(times), sum(times)) for name, times in total.items()]
        return sorted(rows, key=lambda row: -row[2])


@functools.cache
def _library() -> ctypes.CDLL:
    library = native.load(SOURCE)
    for function in (library.replay, library.replay_timed):
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int64
    return library
