"""CUDA graphs: capture a function of tensors once, then replay it in one launch.

In: a function whose only effects are writes to its inputs. Two calls on CUDA tensors of equal shapes
must launch the same kernels. Out: `GraphedFunction`, which behaves like that function.

`capture_graph` is the only place that captures. Samplers and decode steps call it directly.
`GraphedFunction` runs its first calls eagerly. It then captures the kernels and replays them on the
same addresses:

    inputs    An input whose address never changed (a parameter) is static: it is read in place.
              Other inputs are copied into the graph's memory. If a static input moves, the function
              is captured again, and that input is copied from then on.
              Mutated inputs (running statistics) that were copied in are copied back.
    outputs   Outputs lie in the graph's memory, which the next replay overwrites. User-visible
              outputs are copied. Tensors saved for backward and gradients are shared: while
              someone holds one, calls run eagerly.

A call also runs eagerly on another stream, inside a capture, from a second thread, or past the limit
of shapes. `notes` lists the reasons for `explain`.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

OutputMode = Literal["internal", "copied", "shared"]
Function = Callable[..., Sequence[Tensor]]
MAX_CAPTURES_PER_SHAPE = 8  # each static input that moves costs one
MAX_SHAPES = 32  # distinct input shapes of one function


# ---- capture -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph and the outputs that each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    outputs: Any

    def replay(self) -> Any:
        self.graph.replay()
        return self.outputs


class GraphPool:
    """The memory pool and stream that several graphs share; they must never run at once.

    The stream matters because cuBLAS has a workspace per stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)


def capture_graph(
    run: Callable[[], Any],
    *,
    pool: Any = None,
    stream: torch.cuda.Stream | None = None,
    warmups: int = 0,
    synchronize: bool = True,
) -> CapturedGraph:
    """Capture the kernels that `run` launches on the current device.

    pool          handle of a memory pool to share; None: a pool of its own
    stream        stream to warm up and capture on; None: one of torch's
    warmups       calls before the capture, which compile and load kernels
    synchronize   False: neither wait for the device nor empty the allocator's cache. Other threads
                  may then keep calling CUDA. For captures between the steps of a running program.
    """
    side = stream or torch.cuda.Stream() if warmups or not synchronize else None
    current = torch.cuda.current_stream(None if stream is None else stream.device)
    if side is not None and warmups:
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(warmups):
                run()
        current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if side is None or synchronize:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = run()
        return CapturedGraph(graph, outputs)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        outputs = run()
        graph.capture_end()
    current.wait_stream(side)
    return CapturedGraph(graph, outputs)


class CapturedCall(Protocol):
    """A captured call: its inputs, its outputs, and how to replay it."""

    inputs: list[Any]
    outputs: list[Tensor]

    def replay(self) -> Any: ...


class CudaCapturedCall:
    """The kernels of one call as a CUDA graph with a memory pool of its own."""

    def __init__(self, run: Function, inputs: Sequence[Any]) -> None:
        self.inputs = list(inputs)
        device = next(value.device for value in inputs if isinstance(value, Tensor))
        with torch.cuda.device(device), torch.random.fork_rng([device]):
            run(*inputs)  # kernels specialized for these addresses may not be compiled yet
        with torch.cuda.device(device):
            self.graph = capture_graph(lambda: list(run(*inputs)))
        self.outputs: list[Tensor] = self.graph.outputs

    def replay(self) -> None:
        self.graph.replay()


# ---- a function that is captured and replayed ----------------------------------------------------


@dataclass
class _ReplayableCall:
    """A captured call with the copies of inputs and outputs around it."""

    call: CapturedCall
    static_inputs: dict[int, int]  # position of an input that is read in place → its address
    copied_inputs: list[int]
    copied_back: list[int]  # the copied inputs that the function mutates
    output_modes: Sequence[OutputMode]
    # storages of shared outputs, each with its use count while nobody else holds it
    baseline_use_counts: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        read_in_place = {
            self.call.inputs[k].untyped_storage().data_ptr() for k in self.static_inputs
        }
        pairs = zip(self.call.outputs, self.output_modes, strict=True)
        shared = [tensor for tensor, mode in pairs if mode == "shared"]
        self._storages = [
            tensor.untyped_storage()
            for tensor in shared
            if tensor.untyped_storage().data_ptr() not in read_in_place
        ]
        # Keep addresses only: a reference to forward's shared output would block forward's replay.
        for k in self.static_inputs:
            self.call.inputs[k] = None
        self.baseline_use_counts = [(s._cdata, _use_count(s._cdata)) for s in self._storages]

    def moved_inputs(self, addresses: Sequence[int]) -> list[int]:
        return [k for k, address in self.static_inputs.items() if addresses[k] != address]

    def has_live_outputs(self) -> bool:
        """Whether someone still holds a shared output of the last replay."""
        return any(_use_count(storage) > count for storage, count in self.baseline_use_counts)

    def __call__(self, inputs: Sequence[Any]) -> tuple[Tensor, ...]:
        own = self.call.inputs
        if self.copied_inputs:
            targets = [own[k] for k in self.copied_inputs]
            torch._foreach_copy_(targets, [inputs[k] for k in self.copied_inputs])
        self.call.replay()
        if self.copied_back:
            targets = [inputs[k] for k in self.copied_back]
            torch._foreach_copy_(targets, [own[k] for k in self.copied_back])
        return tuple(
            _copy_strided(tensor) if mode == "copied" else tensor.detach()
            for tensor, mode in zip(self.call.outputs, self.output_modes, strict=True)
        )


def _use_count(storage: int) -> int:
    return torch._C._storage_Use_Count(storage)


def _copy_strided(tensor: Tensor) -> Tensor:
    """Copy a tensor and keep its strides."""
    copy = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


@dataclass
class _ShapeState:
    """What is known of the calls with one set of input shapes."""

    calls: int = 0
    addresses: tuple[int, ...] = ()
    static: set[int] = field(default_factory=set)  # inputs whose address did not change
    captures: int = 0
    replayable: _ReplayableCall | None = None
    disabled: bool = False

    def observe(self, addresses: tuple[int, ...]) -> None:
        self.calls += 1
        pairs = zip(addresses, self.addresses or addresses, strict=True)
        self.static = {k for k, (now, before) in enumerate(pairs) if now == before}
        self.addresses = addresses


class GraphedFunction:
    """A function that is captured after some eager calls and replayed from then on."""

    def __init__(
        self,
        name: str,
        run: Function,
        output_modes: Sequence[OutputMode],
        *,
        mutated_inputs: Sequence[int] = (),
        warmups: int = 2,
        capture: Callable[[Function, Sequence[Any]], CapturedCall] = CudaCapturedCall,
    ) -> None:
        self.name, self.run, self.warmups = name, run, warmups
        self.output_modes = tuple(output_modes)
        self.mutated_inputs = tuple(mutated_inputs)  # positions
        self.capture = capture
        self.replays = self.eager_calls = 0
        self.notes: list[str] = []
        self._states: dict[Any, _ShapeState] = {}
        self._lock = threading.Lock()
        self._stream: Any = None

    def __call__(self, *inputs: Any) -> Sequence[Tensor]:
        if not self._lock.acquire(blocking=False):
            return self._run_eagerly(inputs, "called from a second thread meanwhile")
        try:
            return self._call(inputs)
        finally:
            self._lock.release()

    def _call(self, inputs: Sequence[Any]) -> Sequence[Tensor]:
        if self._is_on_another_stream():
            return self._run_eagerly(inputs, "called on another stream, or inside a capture")
        shapes = tuple(x.shape if isinstance(x, Tensor) else x for x in inputs)
        state = self._states.get(shapes)
        if state is None:
            if len(self._states) >= MAX_SHAPES:
                reason = f"more than {MAX_SHAPES} input shapes: pad to fewer of them"
                return self._run_eagerly(inputs, reason)
            state = self._states[shapes] = _ShapeState()
        if state.disabled:
            return self._run_eagerly(inputs)
        addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else 0 for x in inputs)
        replayable = self._get_replayable(state, addresses, inputs)
        if replayable is None:
            return self._run_eagerly(inputs)
        if replayable.has_live_outputs():
            return self._run_eagerly(inputs, "outputs of the last replay are still held")
        self.replays += 1
        return replayable(inputs)

    def _is_on_another_stream(self) -> bool:
        if not torch.cuda.is_available():
            return False
        stream = torch.cuda.current_stream()
        if self._stream is None:
            self._stream = stream
        return torch.cuda.is_current_stream_capturing() or stream != self._stream

    def _run_eagerly(self, inputs: Sequence[Any], reason: str = "") -> Sequence[Tensor]:
        self.eager_calls += 1
        if reason and reason not in self.notes:
            self.notes.append(reason)
        return self.run(*inputs)

    def _get_replayable(
        self, state: _ShapeState, addresses: tuple[int, ...], inputs: Sequence[Any]
    ) -> _ReplayableCall | None:
        """The captured call for these inputs, captured now if it is time; None: run eagerly."""
        if state.replayable is not None:
            moved = state.replayable.moved_inputs(addresses)
            if not moved:
                return state.replayable
            state.replayable = None
            state.static -= set(moved)
        else:
            state.observe(addresses)
            if state.calls <= self.warmups:
                return None
        if state.captures >= MAX_CAPTURES_PER_SHAPE:
            state.disabled = True
            self.notes.append("disabled: static inputs keep moving")
            return None
        state.captures += 1
        state.replayable = self._capture(state, inputs)
        return state.replayable

    def _capture(self, state: _ShapeState, inputs: Sequence[Any]) -> _ReplayableCall | None:
        tensors = [k for k, value in enumerate(inputs) if isinstance(value, Tensor)]
        static = {k: inputs[k].data_ptr() for k in tensors if k in state.static}
        copied = [k for k in tensors if k not in state.static]
        if any(torch._debug_has_internal_overlap(inputs[k]) == 1 for k in copied):
            self._disable(state, "an input overlaps itself and can't be copied into a graph")
            return None
        own = [_copy_strided(value) if k in copied else value for k, value in enumerate(inputs)]
        before = {k: _copy_strided(own[k]) for k in self.mutated_inputs}
        try:
            call = self.capture(self.run, own)
        except RuntimeError as error:  # CUDA's error for an operation that a capture forbids
            first_line = str(error).strip().splitlines()[0]
            self._disable(state, f"could not be captured: {first_line}")
            return None
        finally:
            for k, value in before.items():  # the capture's warmup call mutated them
                own[k].copy_(value)
        copied_back = [k for k in copied if k in self.mutated_inputs]
        return _ReplayableCall(call, static, copied, copied_back, self.output_modes)

    def _disable(self, state: _ShapeState, reason: str) -> None:
        state.disabled = True
        self.notes.append(reason)
        warnings.warn(
            f"fulgurite: {self.name} runs without a CUDA graph: {reason}. Compile without "
            "cudagraph=True, or keep that operation out of the function.",
            stacklevel=2,
        )

    def __repr__(self) -> str:
        return f"<{self.name}: {self}>"

    def __str__(self) -> str:
        counts = f"{self.replays} replays, {self.eager_calls} eager calls"
        return "; ".join([counts, *self.notes])
