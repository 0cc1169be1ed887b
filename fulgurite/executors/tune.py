"""Choosing by measurement.

In: a region and the executors that can run it. Out: the fastest, timed on random inputs of the region's shapes.
The decision is written to the cache folder, so the next process doesn't measure again, and kept for `explain`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import cache, timing
from fulgurite.executors.base import Executor
from fulgurite.trace.cost import size_hint
from fulgurite.trace.printer import render

FORMAT = 1  # of the decisions on disk


@dataclass(frozen=True)
class Decision:
    """Which executor won a region, and by what times (seconds)."""

    region: str
    winner: str
    seconds: dict[str, float]
    cached: bool

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e6 * s:.1f} µs" for name, s in sorted(self.seconds.items()))
        return f"{self.region}: {self.winner} ({times}{', from cache' if self.cached else ''})"


class Tuner:
    """Picks executors for regions and remembers why."""

    def __init__(self, executors: Sequence[Executor]) -> None:
        self.executors = list(executors)
        self.decisions: list[Decision] = []

    def choose(
        self, first: Executor, module: fx.GraphModule
    ) -> tuple[Executor, Callable[..., Any]]:
        """The fastest executor for the region and its callable."""
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        able = [e for e in self.executors if e is first or all(map(e.claims, nodes))]
        name = f"region {len(self.decisions)} ({len(nodes)} ops)"
        key = _key(module, able)
        stored = cache.read_text("tune", key)
        decision = None if stored is None else _read(stored, name, able)
        if decision is None:
            calls = {e.name: e.lower(module) for e in able}
            decision = Decision(name, *_fastest(module, calls), cached=False)
            record = {"format": FORMAT, **asdict(decision)}
            cache.write_text("tune", key, json.dumps(record))
        self.decisions.append(decision)
        winner = next(e for e in able if e.name == decision.winner)
        return winner, winner.lower(module)


def _fastest(
    module: fx.GraphModule, calls: dict[str, Callable[..., Any]]
) -> tuple[str, dict[str, float]]:
    with _disable_current_modes():  # capture runs on FakeTensors; a clock needs real ones
        inputs = [_example(n.meta["val"]) for n in module.graph.nodes if n.op == "placeholder"]
        seconds = timing.compare_on(calls, *inputs)
    return min(seconds, key=lambda name: seconds[name]), seconds


def _example(value: Any) -> Any:
    """A real value that looks like the metadata."""
    if not isinstance(value, torch.Tensor):
        return size_hint(value) if isinstance(value, torch.SymInt) else value
    shape = [size_hint(size) for size in value.shape]
    strides = [size_hint(stride) for stride in value.stride()]
    tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        return tensor.copy_(torch.randn(shape, device=value.device)) if tensor.numel() else tensor
    return tensor.copy_(torch.randint(0, 2, shape, device=value.device))


def _key(module: fx.GraphModule, able: Sequence[Executor]) -> str:
    text = render(module, "region", (), "text").text
    devices = sorted({str(n.meta["val"].device) for n in module.graph.nodes if _on_device(n)})
    machine = [torch.cuda.get_device_name(d) if "cuda" in d else d for d in devices]
    names = [e.name for e in able]
    return cache.digest("tune", str(FORMAT), torch.__version__, *machine, *names, text)


def _on_device(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _read(stored: str, name: str, able: Sequence[Executor]) -> Decision | None:
    """A stored decision, unless it was written by another version or is damaged."""
    try:
        record = json.loads(stored)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        return None
    if record.get("winner") not in {e.name for e in able}:
        return None
    return Decision(name, record["winner"], record["seconds"], cached=True)
