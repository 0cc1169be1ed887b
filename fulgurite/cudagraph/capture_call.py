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
    plain_devices: list[str]  # of the results of a plain call


def capture_call(
    function: CapturableFunction, inputs: list[Any], copied: list[int], pool: CapturePool
) -> ReplayableCall:
    """Capture a call.

    copied   positions of inputs that replays copy into static buffers
    """
    interface, backend = function.interface, function.backend
    tensors = [k for k, value in enumerate(inputs) if isinstance(value, Tensor)]
    if any(inputs[k].device.type != backend.device_type for k in tensors):
        raise RuntimeError("an input is on the host")
    if any(torch._debug_has_internal_overlap(inputs[k]) == 1 for k in copied):
        raise RuntimeError("an input overlaps itself and can't be copied into a buffer")
    with torch.inference_mode(False), torch.no_grad():
        buffers = {k: copy_strided(inputs[k]) for k in copied}
        own = [buffers.get(k, value) for k, value in enumerate(inputs)]
        if copied or function.captured is not function.plain:
            _warm_up(function, own)
        seeds = CapturedSeeds(interface.device)
        with capture_seeds(seeds):
            call = backend.capture(function.captured, own, pool.on(interface.device))
    if not _returns_same_devices(function, call.outputs):
        # attention with dropout: its seed is on the host, in a capture on the device, and backward
        # reads it where its own mode expects it
        raise RuntimeError("results that are on the host would be on the device")
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
    """Whether the captured call returns tensors on the devices of a plain call's results."""
    made_later = function.tail.outputs if function.tail is not None else ()
    found = device_types(outputs)
    return all(
        position in made_later or found[position] == device
        for position, device in enumerate(function.plain_devices)
    )


def device_types(results: Sequence[Any]) -> list[str]:
    return [value.device.type if isinstance(value, Tensor) else "" for value in results]
