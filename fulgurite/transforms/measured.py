"""Whether a kernel of ours or torch's op is faster for operands of some sizes and strides, by measurement.

In: the operands' layouts, and both calls. Out: which one to use. Each combination is timed once, a few milliseconds,
and the decision is stored in the cache folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import native, replay, timing
from fulgurite.device import num_cpu_threads
from fulgurite.trace.decisions import Decision, decision_key, read_decision, write_decision
from fulgurite.trace.node_meta import fake_value
from fulgurite.version import VERSION

FORMAT = "2"  # of the timings: without the host's time for our call
MAX_TIMED_BYTES = 256 << 20  # of the operands that are made for a timing
MAX_TIMINGS = 3  # on a busy machine readings may not settle
MIN_GAIN = 1.1  # times faster than torch's, or it stays

Layout = (
    tuple[tuple[int, ...], tuple[int, ...]] | None
)  # sizes and strides of an operand, if there is one
Call = Callable[..., Any]  # takes the operands


@dataclass(frozen=True)
class Comparison:
    """Two calls that compute the same.

    kind        what they compute
    constants   the arguments that are no tensors
    """

    kind: str
    operands: tuple[Layout, ...]
    constants: tuple[Any, ...]
    run_torch: Call
    run_ours: Call


def is_plain(node: Any) -> bool:
    """Whether a value is a float32 tensor on the CPU of fixed sizes, none of them zero."""
    value = fake_value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.device.type != "cpu":
        return False
    if value.layout != torch.strided:
        return False
    return all(isinstance(n, int) and n > 0 for n in (*value.shape, *value.stride()))


def layout_of(node: Any) -> Layout:
    if node is None:
        return None
    return tuple(fake_value(node).shape), tuple(fake_value(node).stride())


def is_ours_faster(comparison: Comparison) -> bool:
    """Whether our kernel is faster; stored after the first timing."""
    kind = comparison.kind
    key = decision_key(
        VERSION, FORMAT, torch.__version__, native.cpu_fingerprint(), str(torch.get_num_threads()),
        kind, *map(str, comparison.operands), *map(str, comparison.constants),
    )  # fmt: skip
    decision = read_decision(key, kind, {"torch", "fulgurite"})
    if decision is None:
        with _disable_current_modes(), torch._C._DisablePythonDispatcher():  # capture's FakeTensors
            seconds = time_calls(comparison)
        if seconds is None:
            return False
        is_ours = MIN_GAIN * seconds["fulgurite"] < seconds["torch"]
        decision = Decision(kind, "fulgurite" if is_ours else "torch", seconds, cached=False)
        write_decision(key, decision)
    return decision.winner == "fulgurite"


def time_calls(comparison: Comparison) -> dict[str, float] | None:
    """The seconds of both calls; None if operands are too large, or readings too different."""
    spans = [0 if layout is None else _span(*layout) for layout in comparison.operands]
    if 4 * sum(spans) > MAX_TIMED_BYTES:
        return None
    operands = [
        None if layout is None else torch.ones(span).as_strided(*layout)
        for span, layout in zip(spans, comparison.operands, strict=True)
    ]
    ours = replay.record_kernels(comparison.run_ours, *operands)  # as a host program calls it
    calls = {"torch": comparison.run_torch, "fulgurite": lambda *_: ours()}
    is_alone = torch.get_num_threads() == 1 and num_cpu_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter
    readings = (timing.best_times_on(calls, *operands, clock=clock) for _ in range(MAX_TIMINGS))
    return next((seconds for seconds in readings if seconds is not None), None)


def _span(sizes: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
