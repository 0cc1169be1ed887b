"""Decisions by measurement: which implementation of a region is fastest.

In: a region, its implementations and what the decision depends on. Out: a `Decision` with the times. It
is stored in the cache folder, so that the next process doesn't measure again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import cache
from fulgurite.trace.cost import format_seconds, size_hint
from fulgurite.trace.node_meta import fake_value

FORMAT = 3  # of the decisions on disk
INDEX_STEP = 7919  # between example indices: neighbouring rows are not stored one after the other
Measure = Callable[..., dict[str, float] | None]  # (implementations by name, *inputs) → seconds


@dataclass(frozen=True)
class Decision:
    """The implementation that won a region, and the times of all (seconds).

    confirmations   how many later processes measured the same winner
    """

    region: str
    winner: str
    seconds: dict[str, float]
    cached: bool
    confirmations: int = 0

    def __str__(self) -> str:
        times = ", ".join(f"{name} {format_seconds(s)}" for name, s in sorted(self.seconds.items()))
        return f"{self.region}: {self.winner} ({times}{', from cache' if self.cached else ''})"


@dataclass(frozen=True)
class ExampleIntegers:
    """Integers from 0 up to below a limit: spread in no order, or sorted from 0 to the largest one."""

    limit: int
    is_sorted: bool = False


ZEROS = ExampleIntegers(1)


def decision_key(*parts: str) -> str:
    """The cache key of a decision that depends on these texts."""
    return cache.digest(str(FORMAT), *parts)


def read_decision(key: str, region: str, choices: Collection[str]) -> Decision | None:
    """The stored decision; None if there is none, or it is damaged or of another format."""
    stored = cache.read_text("decisions", key)
    try:
        record = json.loads(stored or "")
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return None
    if record.get("winner") not in choices:
        return None
    confirmations = record.get("confirmations", 0)
    return Decision(region, record["winner"], record["seconds"], True, confirmations)


def write_decision(key: str, decision: Decision) -> None:
    cache.write_text("decisions", key, json.dumps({"format": FORMAT, **asdict(decision)}))


def run_on_example_inputs(
    module: fx.GraphModule,
    run: Callable[..., Any],
    integers: Mapping[fx.Node, ExampleIntegers] | None = None,
) -> Any:
    """Call `run` with real inputs that look like those of the region.

    integers   what the inputs that hold positions must be. Other integers are zeros.

    Capture runs on FakeTensors and dispatches in Python. Both are turned off, as in the final program.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    known = integers or {}
    with _disable_current_modes(), torch._C._DisablePythonDispatcher():
        return run(*(make_example_input(fake_value(n), known.get(n, ZEROS)) for n in placeholders))


def make_example_input(value: Any, integers: ExampleIntegers = ZEROS) -> Any:
    """A real value with the metadata of a fake one. A short pattern is repeated, which is fast."""
    if not isinstance(value, torch.Tensor):
        return size_hint(value) if isinstance(value, torch.SymInt) else value
    shape = [size_hint(size) for size in value.shape]
    strides = [size_hint(stride) for stride in value.stride()]
    tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat = tensor.as_strided((extent,), (1,)) if tensor.numel() else tensor
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        if integers.limit <= 1 or not tensor.numel():
            return tensor.zero_()
        values = torch.arange(extent, device=value.device)
        if integers.is_sorted:
            flat.copy_(values * (integers.limit - 1) // max(extent - 1, 1))
        else:
            flat.copy_(values * INDEX_STEP % integers.limit)
        return tensor
    generator = torch.Generator().manual_seed(0)  # the program's own is not touched
    pattern = (torch.rand(4093, generator=generator) + 0.5).to(value.device, value.dtype)
    repeated = extent - extent % len(pattern)
    flat[:repeated].view(-1, len(pattern)).copy_(pattern)  # on the device: one copy
    flat[repeated:].copy_(pattern[: extent - repeated])
    return tensor
