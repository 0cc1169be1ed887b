"""A CUDA graph by the driver, beside torch's random generator.

torch's `CUDAGraph` puts the device's default generator into a capture: until it ends, random numbers
that another thread draws are an error in that thread. A `DriverGraph` leaves the generator alone, so a
captured function may not draw from it: torch raises `NEEDS_GENERATOR`.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import torch

# what torch says of a random operator inside a capture that its generator does not take part in
NEEDS_GENERATOR = "not in capture mode"
THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads may call anything


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, pointers = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
    for name, arguments in {
        "cuStreamBeginCapture_v2": [pointer, ctypes.c_int],
        "cuStreamEndCapture": [pointer, pointers],
        "cuGraphInstantiateWithFlags": [pointers, pointer, ctypes.c_ulonglong],
        "cuGraphLaunch": [pointer, pointer],
        "cuGraphDestroy": [pointer],
        "cuGraphExecDestroy": [pointer],
        "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
    }.items():
        getattr(driver, name).argtypes = arguments
    return driver


def _check(function: str, *arguments: Any) -> None:
    error = getattr(_driver(), function)(*arguments)
    if error:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(error, ctypes.byref(name))
        text = name.value.decode() if name.value else str(error)
        raise RuntimeError(f"{function}: {text}")


class DriverGraph:
    """`torch.cuda.CUDAGraph`, as far as captures need it."""

    def __init__(self) -> None:
        self._executable = ctypes.c_void_p()
        self._device = torch.cuda.current_device()

    def capture_begin(self, pool: Any, capture_error_mode: str = "thread_local") -> None:
        """Capture what this thread launches on the current stream, with memory of the pool."""
        assert capture_error_mode == "thread_local", "other threads may call CUDA"
        self._pool, self._stream = pool, torch.cuda.current_stream(self._device).cuda_stream
        torch._C._cuda_beginAllocateCurrentThreadToPool(self._device, pool)
        # the pool counts its graphs: it is freed with the last of them
        self._free_pool = weakref.finalize(self, torch._C._cuda_releasePool, self._device, pool)
        self._free_pool.atexit = False
        try:
            _check("cuStreamBeginCapture_v2", self._stream, THREAD_LOCAL)
        except RuntimeError:
            torch._C._cuda_endAllocateToPool(self._device, pool)
            raise

    def capture_end(self) -> None:
        graph = ctypes.c_void_p()
        try:
            _check("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        finally:
            torch._C._cuda_endAllocateToPool(self._device, self._pool)
        try:
            _check("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), graph, 0)
        finally:
            _check("cuGraphDestroy", graph)
        destroy = weakref.finalize(self, _driver().cuGraphExecDestroy, self._executable)
        destroy.atexit = False  # the driver may be gone

    def replay(self) -> None:
        """Launch the graph on the current stream."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        error = _driver().cuGraphLaunch(self._executable, stream)
        if error:
            _check("cuGraphLaunch", self._executable, stream)
