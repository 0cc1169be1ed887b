"""Choosing by measurement: never worse than torch's own ops.

In: a region, the executor that claimed it, and the region as torch would run it. Out: who runs it. By default
generated code is compared with torch once, in a few milliseconds, on inputs of the region's metadata, and a region
that torch runs faster is given back; `tune=True` compares every executor that can run it, at length. The decision is
written to the cache folder under everything that it depends on, so the next process doesn't measure again, and kept
for `explain`. `tune=False` measures nothing: the order of the executors decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import cache, native, timing
from fulgurite.executors.base import Chosen, Executor
from fulgurite.executors.torch import TorchExecutor
from fulgurite.trace.cost import node_bytes, seconds_text, size_hint, tensors, value_bytes
from fulgurite.trace.signature import signature
from fulgurite.transforms.purity import is_random
from fulgurite.version import VERSION

Tune = Literal["auto"] | bool
FORMAT = 2  # of the decisions on disk
MARGIN = 1.1  # torch must be faster by this much to get a region back: less is noise
CLEAR = (3, 16 << 20)  # bytes saved (times) and moved, from where on memory alone decides
LARGEST = 1 << 30  # bytes of example inputs that are made for a comparison


@dataclass(frozen=True)
class Decision:
    """Which executor won a region, and by what times (seconds)."""

    region: str
    winner: str
    seconds: dict[str, float]
    cached: bool

    def __str__(self) -> str:
        times = ", ".join(f"{name} {seconds_text(s)}" for name, s in sorted(self.seconds.items()))
        return f"{self.region}: {self.winner} ({times}{', from cache' if self.cached else ''})"


class Tuner:
    """Picks executors for regions and remembers why."""

    def __init__(self, executors: Sequence[Executor], tune: Tune) -> None:
        self.executors = list(executors)
        self.tune = tune
        self.decisions: list[Decision] = []

    def choose(
        self,
        name: str,
        first: Executor,
        module: fx.GraphModule,
        plain: Callable[[], fx.GraphModule],
    ) -> Chosen:
        """Who runs the region, and how; `plain` makes the region as torch would run it."""
        able = self._able(first, module)
        call = first.tuned(module) if self.tune is True else first.lower(module)
        if len(able) == 1:
            return Chosen(first, call)
        calls = {first.name: call}
        torch_module = plain()
        if self.tune == "auto" and _is_clear(module, torch_module):
            return Chosen(first, call)
        key = _key(module, able, getattr(call, "source", ""))
        stored = cache.read_text("decisions", key)
        decision = None if stored is None else _read(stored, name, able)
        if decision is None:
            for executor in able[1:]:
                taken = torch_module if isinstance(executor, TorchExecutor) else module
                calls[executor.name] = executor.lower(taken)
            seconds = self._measure(module, calls)
            if seconds is None:  # too busy a machine to tell: the order of the executors decides
                return Chosen(first, call)
            decision = Decision(name, _winner(first, seconds), seconds, cached=False)
            cache.write_text("decisions", key, json.dumps({"format": FORMAT, **asdict(decision)}))
        self.decisions.append(decision)
        winner = next(e for e in able if e.name == decision.winner)
        if isinstance(winner, TorchExecutor):
            return Chosen(winner, None, _remark(first, decision))
        return Chosen(winner, calls.get(winner.name) or winner.lower(module))

    def _able(self, first: Executor, module: fx.GraphModule) -> list[Executor]:
        """The executors to compare, the one that claimed the region first."""
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        values = [tensor for n in module.graph.nodes for tensor in tensors(n.meta.get("val"))]
        empty = any(size_hint(size) == 0 for tensor in values for size in tensor.shape)
        if empty or any(map(is_random, nodes)):  # nothing to measure; draws must not be repeated
            return [first]
        if any(map(_divides_integers, nodes)):  # the integers that are measured with are zeros
            return [first]
        others = [executor for executor in self.executors if executor is not first]
        if self.tune == "auto":
            others = [e for e in others if first.compared and isinstance(e, TorchExecutor)]
        return [first, *(e for e in others if all(map(e.claims, nodes)))]

    def _measure(
        self, module: fx.GraphModule, calls: dict[str, Callable[..., Any]]
    ) -> dict[str, float] | None:
        measure = timing.best_on if self.tune == "auto" else timing.compare_on
        # capture runs on FakeTensors and dispatches in Python; a clock needs what the program will see
        with _disable_current_modes(), torch._C._DisablePythonDispatcher():
            inputs = [example(n.meta["val"]) for n in module.graph.nodes if n.op == "placeholder"]
            return measure(calls, *inputs)


def _winner(first: Executor, seconds: dict[str, float]) -> str:
    fastest = min(seconds, key=lambda name: seconds[name])
    return first.name if seconds[first.name] <= MARGIN * seconds[fastest] else fastest


def _remark(first: Executor, decision: Decision) -> str:
    times = decision.seconds[first.name] / decision.seconds[decision.winner]
    return f"given back: {first.name} takes {times:.1f}×"


def _is_clear(module: fx.GraphModule, plain: fx.GraphModule) -> bool:
    """Whether the bytes say enough: large tensors, and torch moves them several times as often.

    Also where inputs to compare on would take too much memory.
    """
    given = [n for n in module.graph.nodes if n.op == "placeholder"]
    results = module.graph.output_node().all_input_nodes
    read = sum(value_bytes(node.meta.get("val")) for node in given)
    moved = read + sum(value_bytes(node.meta.get("val")) for node in results)
    by_torch = sum(map(node_bytes, plain.graph.nodes))
    times, least = CLEAR
    return (by_torch >= times * moved and moved >= least) or moved > LARGEST


def _divides_integers(node: fx.Node) -> bool:
    """Would a zero among the integers it reads be an error?"""
    name = str(getattr(node.target, "_opname", ""))
    value = node.meta.get("val")
    whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    return whole and name in ("div", "floor_divide", "remainder", "fmod")


def example(value: Any) -> Any:
    """A real value that looks like the metadata; cheap to make, so a short pattern is repeated."""
    if not isinstance(value, torch.Tensor):
        return size_hint(value) if isinstance(value, torch.SymInt) else value
    shape = [size_hint(size) for size in value.shape]
    strides = [size_hint(stride) for stride in value.stride()]
    tensor = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return tensor.zero_()  # an index must be in range
    generator = torch.Generator().manual_seed(0)  # the program's own is not touched
    pattern = (torch.rand(4093, generator=generator) + 0.5).to(value.device, value.dtype)
    reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    flat, whole = tensor.as_strided((reach,), (1,)), reach - reach % len(pattern)
    flat[:whole].view(-1, len(pattern)).copy_(
        pattern
    )  # where the tensor is: a GPU fills it at once
    flat[whole:].copy_(pattern[: reach - whole])
    return tensor


def _key(module: fx.GraphModule, able: Sequence[Executor], source: str) -> str:
    """Everything a decision depends on: the ops and sizes, the generated code, the machine."""
    devices = {str(t.device) for n in module.graph.nodes for t in tensors(n.meta.get("val"))}
    machine = [torch.cuda.get_device_name(d) if "cuda" in d else d for d in sorted(devices)]
    machine += [native.processor(), str(torch.get_num_threads())]
    names = [executor.name for executor in able]
    text = signature(module)
    return cache.digest(str(FORMAT), VERSION, torch.__version__, *machine, *names, text, source)


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
