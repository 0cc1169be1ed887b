"""Capture one call of a function: static buffers, a warm-up, the capture, and what surrounds its replays.

In: a function and the inputs of a call. Out: a `ReplayableCall`. Raises a RuntimeError if the call can't be
captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fulgurite.cudagraph.capture import BoxedFunction
from fulgurite.cudagraph.memory import CaptureBackend, CapturePool
from fulgurite.cudagraph.replay import OutputMode, ReplayableCall, ResultTail, copy_strided
from fulgurite.cudagraph.seeds import CapturedSeeds, capture_seeds


@dataclass(frozen=True)
class GraphInterface:
    """What is known of a function's inputs and outputs.

    output_modes      see `replay.py`
    device            where the function runs; it may have no inputs there
    mutated_inputs    positions of inputs that the function writes to
    dynamic_inputs    positions of inputs whose sizes, or values if they are numbers, may change
    """

    output_modes: tuple[OutputMode, ...]
    device: torch.device
    mutated_inputs: tuple[int, ...] = ()
    dynamic_inputs: tuple[int, ...] = ()


class CapturableFunction(Protocol):
    """What a capture needs of a `GraphedFunction`."""

    plain: BoxedFunction
    captured: BoxedFunction
    tail: ResultTail | None
    interface: GraphInterface
    backend: CaptureBackend
    is_on_device: list[bool]  # the results of a plain call


def capture_call(
    function: CapturableFunction, inputs: list[Any], copied: list[int], pool: CapturePool
) -> ReplayableCall:
    """Capture a call.

    copied   positions of inputs that replays copy into static buffers: those on the host among them
    """
    interface, backend = function.interface, function.backend
    tensors = [k for k, value in enumerate(inputs) if isinstance(value, Tensor)]
    if any(not backend.is_on_device(inputs[k]) for k in interface.mutated_inputs):
        raise RuntimeError("it writes to an input on the host")
    if any(torch._debug_has_internal_overlap(inputs[k]) == 1 for k in copied):
        raise RuntimeError("an input overlaps itself and can't be copied into a buffer")
    with torch.inference_mode(False), torch.no_grad():
        buffers = {k: copy_strided(inputs[k], interface.device) for k in copied}
        own = [buffers.get(k, value) for k, value in enumerate(inputs)]
        if copied or function.captured is not function.plain:
            _warm_up(function, own)
        seeds = CapturedSeeds(interface.device)
        with capture_seeds(seeds):
            call = backend.capture(function.captured, own, pool.on(interface.device))
    if not _returns_same_devices(function, call.outputs):
        raise RuntimeError("a result that is on the host would be on the device")
    replayable = ReplayableCall(
        call,
        own,
        [k for k in tensors if k not in buffers],
        buffers,
        interface.mutated_inputs,
        interface.output_modes,
        pool,
        function.tail,
    )
    replayable.seeds = seeds if seeds.draws else None
    replayable.plan = replayable.make_plan(inputs, interface.dynamic_inputs)
    return replayable


def _warm_up(function: CapturableFunction, inputs: list[Any]) -> None:
    """Load kernels that are specialized for these addresses. Random state and inputs stay."""
    device = function.interface.device
    before = {k: copy_strided(inputs[k]) for k in function.interface.mutated_inputs}
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            function.captured(list(inputs))
    finally:
        for k, value in before.items():
            inputs[k].copy_(value)


def _returns_same_devices(function: CapturableFunction, outputs: Sequence[Any]) -> bool:
    """Whether the user gets tensors of the captured call where a plain call returns them.

    Results for backward may be elsewhere: the seed of attention with dropout.
    """
    made_later = function.tail.outputs if function.tail is not None else ()
    found = find_on_device(outputs, function.backend)
    modes = function.interface.output_modes
    return all(
        modes[position] == "shared" or position in made_later or found[position] == on_device
        for position, on_device in enumerate(function.is_on_device)
    )


def find_on_device(results: Sequence[Any], backend: CaptureBackend) -> list[bool]:
    return [isinstance(value, Tensor) and backend.is_on_device(value) for value in results]
