"""GraphedFunction: a function that is captured after some calls, and replayed from then on.

In: a function of a list of inputs whose only effects are writes to its inputs. Two calls with equal sizes
must launch the same kernels. Out: a function of the same inputs and outputs.

The first calls run without a graph ("plain"). They show which inputs keep their address, and, unless the
capture is forced, what the host and the device need (`decision.py`). A capture serves all calls with equal
sizes whose static inputs are where they were. Other addresses are captured too, once they repeat or move.
If outputs of a capture are still held (gradients that accumulate), another capture with outputs of its
own runs. A call also runs plain on another stream, inside a capture, while another thread replays, and past
the limits below. `notes` lists the reasons for `explain`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fulgurite.cudagraph.capture import BoxedFunction
from fulgurite.cudagraph.capture_call import GraphInterface, capture_call, find_on_device
from fulgurite.cudagraph.decision import Decision
from fulgurite.cudagraph.memory import CaptureMemory, CapturePool
from fulgurite.cudagraph.native_replay import GraphedState, Words
from fulgurite.cudagraph.replay import ReplayableCall, ResultTail, weak_method
from fulgurite.cudagraph.state import MAX_CALLS, MAX_MISSES, LayerState, ShapeState
from fulgurite.units import format_bytes

MAX_UNUSED_REPLAYS = 100  # per layer: a capture that is not used for so long is freed
MAX_CAPTURES = 24  # captures for one set of sizes, unless each is replayed often
MIN_REPLAYS_PER_CAPTURE = 20
# Inputs that are copied at every call: 60 µs of an H200's time, and memory for all of them.
MAX_COPIED_BYTES = 128 << 20
MAX_SHAPES = 32  # sets of sizes of one function
MAX_SLOTS = 3  # captures for the same addresses, with outputs of their own
WAITS_FOR_OUTPUTS = 2  # calls that find outputs still held, before another capture
# What a pool has grown for captures that are given up, from which all captures of the pool are made again: that takes
# a few milliseconds each.
MIN_RETIRED_BYTES = 32 << 20


class GraphedFunction:
    """A function that is captured after some calls and replayed from then on.

    plain        the function
    interface    its inputs and outputs
    memory       memory that its captures share with those of other functions
    captured     what is captured: the same function, if `plain` itself can't be. With a tail: the
                 function up to the tail, which returns the tail's internal inputs last
    forced       capture without measuring whether that pays
    """

    def __init__(
        self,
        name: str,
        plain: BoxedFunction,
        interface: GraphInterface,
        memory: CaptureMemory,
        *,
        captured: BoxedFunction | None = None,
        tail: ResultTail | None = None,
        forced: bool = False,
        report: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self.name, self.plain, self.interface, self.memory = name, plain, interface, memory
        self.captured, self.tail = captured or plain, tail
        self.forced, self.report = forced, report
        self.backend = memory.backend
        self.plain_calls = 0
        self.notes: list[str] = []
        self._states: dict[Any, ShapeState] = {}
        self.is_on_device: list[bool] = []  # the results of a plain call
        # what followed the last capture before: layers are called in turn
        self._expected: list[weakref.ref[ReplayableCall] | None] = [None]
        self._native = GraphedState(
            self._expected, memory.lock, Words(0), memory.stream_words, interface.device
        )
        # no reference cycle: captures free GPU memory
        find_and_run = weak_method(self._find_and_run)
        self._run_weakly = self._native.make_callable(find_and_run) or find_and_run
        self._last_call: weakref.ref[ReplayableCall] | None = None
        self._has_dropped_captures = False  # their memory pools may be unused now

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        return self._run_weakly(inputs)

    def make_callable(self) -> BoxedFunction:
        """The function without Python around replays: what graphs call. It keeps this object alive."""
        return self._native.make_callable(self._find_and_run) or self._find_and_run

    @property
    def replays(self) -> int:
        return self._native.replays[0]

    def _find_and_run(self, inputs: list[Any]) -> Sequence[Any]:
        """A call that native code did not serve by the capture that was expected."""
        self.memory.observe_call(id(self))
        state = self._states.get(self._key(inputs))
        if state is None:
            state = self._add_state(inputs)
        if state is None or state.disabled:
            if self._has_dropped_captures:
                self._has_dropped_captures = False
                self.memory.free_unused_pools()
            if state is not None:
                state.count_plain_call()
            return self._call_plain(inputs)
        if not self.memory.lock.acquire(blocking=False):
            return self._run_plain(inputs, "called while another call of the program replays")
        try:
            if not self._is_on_own_stream():
                return self._run_plain(inputs, "called on another stream, or inside a capture")
            return self._run(state, inputs)
        finally:
            self.memory.lock.release()

    def _key(self, inputs: Sequence[Any]) -> Any:
        """What the captures of a call depend on, beside addresses. Static sizes are guarded already."""
        changing = [inputs[k] for k in self.interface.dynamic_inputs]
        return tuple((x.shape, x.stride()) if isinstance(x, Tensor) else x for x in changing)

    def _add_state(self, inputs: Sequence[Any]) -> ShapeState | None:
        if len(self._states) >= MAX_SHAPES:
            self._note(f"more than {MAX_SHAPES} input shapes: pad to fewer of them")
            return None
        return self._states.setdefault(self._key(inputs), ShapeState(Decision(self.forced)))

    def _is_on_own_stream(self) -> bool:
        """Whether replays may run on the current stream: that of the program's first capture."""
        stream = self._current_stream()
        if stream is None:
            return True
        is_own = self.memory.stream is None or stream == self.memory.stream
        return is_own and not torch._C._cuda_isCurrentStreamCapturing()

    def _current_stream(self) -> int | None:
        """CUDA's handle of the current stream; None: the device has none."""
        device = self.interface.device
        if device.type != "cuda":
            return None
        return int(torch._C._cuda_getCurrentRawStream(device.index))

    def _note(self, reason: str) -> None:
        if reason not in self.notes:
            self.notes.append(reason)

    def _run_plain(self, inputs: list[Any], reason: str = "") -> Sequence[Any]:
        if reason:
            self._note(reason)
        results = self._call_plain(inputs)
        self.memory.observe_results(id(self), results)
        return results

    def _call_plain(self, inputs: list[Any]) -> Sequence[Any]:
        self.plain_calls += 1
        results = self.plain(inputs)
        if not self.is_on_device:
            self.is_on_device = find_on_device(results, self.backend)
        return results

    # ---- replay, or capture first --------------------------------------------------------------------

    def _run(self, state: ShapeState, inputs: list[Any]) -> Sequence[Any]:
        """Replay a capture of these addresses; if there is none, run plain or capture."""
        call, held = self._find_capture(state, inputs)
        if call is not None:
            return self._replay(state, call, inputs)
        layer = state.observe(inputs, self.memory.addresses)
        if state.decision.should_capture is None:
            return self._measure_plain(state, inputs)
        if not self._is_time_to_capture(state, layer, held):
            return self._run_plain(inputs)
        moving = self._find_moving_inputs(layer, inputs, held)
        if not self._may_copy(state, [inputs[k] for k in moving]):
            return self._run_plain(inputs)
        captured = self._capture(state, layer, inputs, moving, held)
        if captured is None:
            return self._run_plain(inputs)
        return self._replay(state, captured, inputs)

    def _find_capture(
        self, state: ShapeState, inputs: list[Any]
    ) -> tuple[ReplayableCall | None, list[ReplayableCall]]:
        """The capture that serves these inputs, or None, and those that would but for held outputs."""
        held: list[ReplayableCall] = []
        for call in list(state.calls()):
            if call.matches(inputs):
                if call.is_due and self._copies_in_vain(call, inputs):
                    state.drop(call)
                elif call.may_replay():
                    return call, []
                else:
                    held.append(call)
        return None, held

    def _copies_in_vain(self, call: ReplayableCall, inputs: Sequence[Any]) -> bool:
        """Whether it copies what another capture makes at one place: that was captured later."""
        known = self.memory.addresses.find()
        return any(inputs[k].untyped_storage().data_ptr() in known for k in call.copied)

    def _replay(self, state: ShapeState, call: ReplayableCall, inputs: list[Any]) -> Sequence[Any]:
        self._native.replays[0] += 1
        state.misses = 0
        call.last_used = self.replays
        if not state.decision.is_confirmed:
            return self._measure_replay(state, call, inputs)
        if call.plan is not None:
            self._expect_after_last(call)
        return call(inputs)

    def _expect_after_last(self, call: ReplayableCall) -> None:
        """Remember that this capture followed the last one."""
        reference = weakref.ref(call)
        last = self._last_call() if self._last_call is not None else None
        if last is not None:
            last.successor = reference
        if call.successor is None:
            call.successor = reference
        self._last_call, self._expected[0] = reference, call.successor

    def _measure_plain(self, state: ShapeState, inputs: list[Any]) -> Sequence[Any]:
        if not state.is_warm:
            return self._run_plain(inputs)
        results = state.decision.plain.run(lambda: self._run_plain(inputs), self.backend.stopwatch)
        if state.decision.should_capture is False:
            self._disable(state)
        return results  # type: ignore[no-any-return]

    def _measure_replay(
        self, state: ShapeState, call: ReplayableCall, inputs: list[Any]
    ) -> Sequence[Any]:
        if call.replays == 0:  # the first launch of a graph uploads it
            return call(inputs)
        results = state.decision.replayed.run(lambda: call(inputs), self.backend.stopwatch)
        confirmed = state.decision.is_confirmed
        if confirmed is False:
            self._disable(state)
        elif confirmed:
            self.report(str(state.decision))
        return results  # type: ignore[no-any-return]

    def _disable(self, state: ShapeState) -> None:
        """Run plain from now on, and free the captures."""
        state.disable()
        if state.reserved_bytes >= MIN_RETIRED_BYTES:
            for pool in state.pools:
                pool.retire()
        state.pools.clear()
        state.reserved_bytes = 0
        self._has_dropped_captures = True
        self._expected[0] = self._last_call = None
        self.report(str(state.decision))

    def _is_time_to_capture(
        self, state: ShapeState, layer: LayerState, held: list[ReplayableCall]
    ) -> bool:
        if held:
            self.memory.observe_blocked()
            layer.held += 1
            self._note("outputs of the last replay are still held")
            return layer.held >= WAITS_FOR_OUTPUTS and len(held) < MAX_SLOTS
        is_often_captured = layer.captures >= max(
            MAX_CAPTURES, self.replays // MIN_REPLAYS_PER_CAPTURE
        )
        if state.misses > MAX_MISSES or (layer.is_warm and is_often_captured):
            state.decision.reason_against = "its inputs keep moving"
            self._disable(state)
        return layer.is_warm and not state.disabled

    def _may_copy(self, state: ShapeState, moving: list[Tensor]) -> bool:
        """Whether a capture that copies these inputs at every call is worth their memory.

        The tensors that a forward without a capture saved, say: if it is captured later, they move no
        more.
        """
        count = sum(tensor.nbytes for tensor in moving)
        may_copy = self.forced or count <= MAX_COPIED_BYTES
        state.decision.reason_to_wait = (
            "" if may_copy else f"{format_bytes(count)} of inputs would be copied at every call"
        )
        return may_copy

    # ---- capture -------------------------------------------------------------------------------------

    def _find_moving_inputs(
        self, layer: LayerState, inputs: list[Any], held: list[ReplayableCall]
    ) -> list[int]:
        """The positions of the inputs that a capture copies.

        None on the device if they are too large, and these addresses repeat: the gradient of logits, say, which
        alternates between two places. Then each place has a capture, in spite of the memory.
        """
        is_on_device = self.backend.is_on_device
        on_host = [k for k, x in enumerate(inputs) if isinstance(x, Tensor) and not is_on_device(x)]
        moving = set(held[0].copied) if held else layer.moving_inputs()
        if moving:
            known = self.memory.addresses.find()
            moving = {k for k in moving if inputs[k].untyped_storage().data_ptr() not in known}
        count = sum(inputs[k].nbytes for k in moving)
        if count > MAX_COPIED_BYTES and not held and layer.repeats_addresses():
            moving.clear()
        return sorted(moving.union(on_host))

    def _capture(
        self,
        state: ShapeState,
        layer: LayerState,
        inputs: list[Any],
        moving: list[int],
        held: list[ReplayableCall],
    ) -> ReplayableCall | None:
        """Capture the function for these inputs; None if that failed, and is not tried again.

        moving   positions of inputs to copy
        held     captures for these addresses whose outputs are held
        """
        slots = {call.pool.slot for call in held if call.are_outputs_held()}
        # Those that the new one replaces are freed before the capture, which reuses their memory. No variable
        # may hold them here or in a caller.
        state.keep(lambda call: call not in held or call.pool.slot in slots)  # others are blocked
        if moving and not held and not layer.may_add_capture():
            layer.calls.clear()
        held.clear()
        pool = self.memory.pool(next(k for k in range(MAX_SLOTS) if k not in slots))
        pool.add_owner(self)
        state.pools.add(pool)
        layer.captures += 1
        device = self.interface.device
        before = self.backend.reserved_memory(device)
        try:
            try:
                call = capture_call(self, inputs, moving, pool)
            finally:
                state.reserved_bytes += self.backend.reserved_memory(device) - before
        except RuntimeError as error:  # what a capture forbids, or out of memory
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
            state.decision.reason_against = f"capture failed: {first_line}"
            self._disable(state)
            return None
        if call.shared_outputs is not None:
            self.memory.addresses.add(call.shared_outputs)
        if self.memory.stream is None:
            self.memory.stream = self._current_stream()
        self._drop_unused()
        state.decision.memory_share = call.kept_bytes / self.backend.total_memory(device)
        layer.calls = [call, *layer.calls][:MAX_CALLS]
        layer.addresses.clear()
        layer.held = 0
        return call

    def drop_captures(self, pool: CapturePool) -> None:
        """Free the captures of a pool; the next calls capture again."""
        for state in self._states.values():
            state.keep(lambda call: call.pool is not pool)

    def _drop_unused(self) -> None:
        """Free the captures that were not replayed for long, of all sizes."""
        num_layers = sum(len(state.layers) for state in self._states.values())
        for state in self._states.values():
            state.drop_unused(self.replays - MAX_UNUSED_REPLAYS * num_layers)

    # ---- inspection ----------------------------------------------------------------------------------

    @property
    def captures(self) -> int:
        return sum(state.captures for state in self._states.values())

    def describe(self) -> str:
        """What was decided, for each set of sizes."""
        decisions = [str(state.decision) for state in self._states.values()]
        return "; ".join(dict.fromkeys(decisions))

    def __str__(self) -> str:
        counts = f"{self.captures} captures, {self.replays} replays"
        counts += f", {self.plain_calls} calls without a graph"
        return "; ".join(part for part in [counts, self.describe(), *self.notes] if part)

    def __repr__(self) -> str:
        return f"<{self.name}: {self}>"
