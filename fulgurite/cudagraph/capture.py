"""Capture the kernels that a function launches as a CUDA graph.

In: a function without arguments. Out: `CapturedGraph`, whose `replay` launches the same kernels on the
same addresses. A capture that fails or is interrupted ends: torch is as it was before.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fulgurite.cudagraph.driver_graph import NEEDS_GENERATOR, DriverGraph

BoxedFunction = Callable[[list[Any]], Sequence[Any]]

# Devices on which CUDA invalidated a capture of torch's: a forbidden call, such as a synchronization. torch
# 2.11 does not recover wholly: a second such capture leaves its random generator unusable.
_invalidated_devices: set[int] = set()


class Graph(Protocol):
    """A CUDA graph: torch's, or the driver's."""

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph and the outputs that each replay overwrites."""

    graph: Graph
    outputs: Any

    def replay(self) -> Any:
        self.graph.replay()
        return self.outputs


class GraphPool:
    """The memory pool and stream that several graphs share; they must never run at once.

    The stream matters because cuBLAS has a workspace per stream.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = stream or torch.cuda.Stream(device)


class LivePool(GraphPool):
    """A pool that lives without graphs: torch can't reuse the handle of one whose graphs are gone."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        super().__init__(device, stream)
        self._anchors = [self._capture_nothing(DriverGraph)]

    def prepare_torch_graphs(self) -> None:
        """Keep the pool alive for torch's graphs, too: it also counts them in its pool of host memory."""
        if len(self._anchors) == 1:
            self._anchors.append(self._capture_nothing(torch.cuda.CUDAGraph))

    def _capture_nothing(self, make_graph: Callable[[], Graph]) -> CapturedGraph:
        counter = torch.zeros(1, device=self.stream.device)
        with torch.cuda.device(self.stream.device):
            return capture_graph(
                counter.zero_,
                pool=self.handle,
                stream=self.stream,
                synchronize=False,
                graph=make_graph(),
            )


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which compiled functions are captured: one per device, for one workspace."""
    return torch.cuda.Stream(device)


def capture_graph(
    run: Callable[[], Any],
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    warmups: int = 0,
    synchronize: bool = True,
    graph: Graph | None = None,
) -> CapturedGraph:
    """Capture the kernels that `run` launches on the current device.

    pool          handle of a memory pool to share; None: a pool of its own
    stream        stream to warm up and capture on; None: one of torch's
    warmups       calls before the capture, which compile and load kernels
    synchronize   False: neither wait for the device nor empty the allocator's cache. Other threads
                  may then keep calling CUDA. For captures between the steps of a running program.
    graph         an empty graph to capture into; None: one of torch's
    """
    side = stream or torch.cuda.Stream()
    current = torch.cuda.current_stream(None if stream is None else stream.device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(warmups):
            run()
    if synchronize:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph() if graph is None else graph
    with torch.cuda.stream(side), _without_garbage_collection():
        outputs = _capture_on_current_stream(graph, pool or torch.cuda.graph_pool_handle(), run)
    current.wait_stream(side)
    return CapturedGraph(graph, outputs)


def _capture_on_current_stream(graph: Graph, pool: Any, run: Callable[[], Any]) -> Any:
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        outputs = run()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # an invalid capture; what `run` raised says why
            _end_capture(graph, pool)
        raise
    _end_capture(graph, pool)
    return outputs


def _end_capture(graph: Graph, pool: Any) -> None:
    """End a capture. If CUDA has invalidated it, undo what torch leaves behind, and raise.

    The allocator still serves the pool then, and the random generator refuses to run outside of a
    capture. The end of another capture resets the generator.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        if isinstance(graph, DriverGraph):
            raise
        device = torch.cuda.current_device()
        _invalidated_devices.add(device)
        with contextlib.suppress(RuntimeError):  # torch may have got so far
            torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
        other = torch.cuda.CUDAGraph()
        other.capture_begin(capture_error_mode="thread_local")
        torch.empty(0, device=device)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the graph is empty
            other.capture_end()
        raise


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """The collector may free memory or graphs of others, which a capture does not allow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CapturedCall(Protocol):
    """A captured call: its outputs, and how to replay it."""

    outputs: list[Any]

    def replay(self) -> Any: ...


class Capture(Protocol):
    """Captures one call of a function on these inputs, with memory of a pool."""

    def __call__(self, run: BoxedFunction, inputs: list[Any], pool: Any) -> CapturedCall: ...


class CudaCapturedCall:
    """The kernels of one call as a CUDA graph.

    torch's graph is for functions that draw from its random generator. Raises a RuntimeError if the call
    can't be captured. After such a one that CUDA invalidated, no other of them is tried on the device.
    """

    def __init__(self, run: BoxedFunction, inputs: list[Any], pool: LivePool) -> None:
        def capture(make_graph: Callable[[], Graph]) -> CapturedGraph:
            def try_once() -> CapturedGraph:
                return capture_graph(
                    lambda: list(run(list(inputs))),
                    pool=pool.handle,
                    stream=pool.stream,
                    synchronize=False,
                    graph=make_graph(),
                )

            try:
                return try_once()
            except torch.OutOfMemoryError:  # inside a capture, the allocator frees no cached memory
                torch.cuda.empty_cache()
                return try_once()

        with torch.cuda.device(pool.stream.device):
            try:
                graph = capture(DriverGraph)
            except RuntimeError as error:
                if NEEDS_GENERATOR not in str(error):
                    raise
                _check_generator(pool.stream.device)
                pool.prepare_torch_graphs()
                graph = capture(torch.cuda.CUDAGraph)
        self.outputs: list[Any] = graph.outputs
        self.replay = graph.graph.replay


def _check_generator(device: torch.device) -> None:
    """RuntimeError if torch's generator can't take part in another capture."""
    if device.index in _invalidated_devices:
        raise RuntimeError(
            "CUDA invalidated an earlier capture on this device, and torch can't recover from "
            "a second one: no more captures with its random numbers in this process"
        )
