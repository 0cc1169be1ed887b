"""Choose executors by measurement: never slower than torch's own ops.

In: a region, the executor that claimed it, and the region as torch would run it. Out: the executor that
runs it.

    autotune="auto"   Generated code is compared with torch once, in a few milliseconds, on inputs of the
                      region's metadata. A region falls back to torch where torch is faster.
    autotune=True     Every executor that can run the region is timed at length.
    autotune=False    Nothing is measured: the order of the executors decides.

Nothing is measured either where torch's ops are less accurate than generated code.

Decisions are stored in the cache folder under everything that they depend on, and listed by `explain`.

Measurements survive a busy machine. Implementations are timed in turns. Before a region falls back, it is
measured a second time, a moment later, and both must agree. A stored fallback is measured again by the
next process. If the time of the generated code is far above the cost model's, several must agree.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import fx
from torch._prims_common import (
    is_contiguous_for_memory_format_or_false,
    is_contiguous_or_false,
)

from fulgurite import native, timing
from fulgurite.device import num_cpu_threads
from fulgurite.executors.base import ClaimedRegion, Executor, ExecutorChoice
from fulgurite.executors.example_integers import find_example_integers
from fulgurite.executors.fallback import is_error_of_device
from fulgurite.executors.torch import TorchExecutor
from fulgurite.logs import LOG
from fulgurite.replay import is_recording, record_kernels
from fulgurite.trace.cost import (
    iter_tensors,
    node_bytes,
    size_hint,
    value_bytes,
)
from fulgurite.trace.decisions import (
    Decision,
    decision_key,
    read_decision,
    run_on_example_inputs,
    write_decision,
)
from fulgurite.trace.node_meta import fake_value
from fulgurite.trace.purity import is_random
from fulgurite.trace.signature import region_signature
from fulgurite.version import VERSION

Autotune = Literal["auto"] | bool
FALLBACK_MARGIN = 1.1  # torch must be faster by this factor to win a region: less is noise
# no clock is needed if torch moves at least this many times the bytes, and the region at least as many
OBVIOUS_SAVINGS = (3, 16 << 20)
MAX_EXAMPLE_BYTES = 1 << 30  # of the inputs that are made for a comparison
SECOND_LOOK_PAUSE = 0.01  # seconds: about as long as another process holds a core
# A kernel that takes this many times the predicted time was probably interrupted all the time.
IMPLAUSIBLE_SLOWDOWN = 30
MIN_PREDICTED_SECONDS = 2e-5  # of a call: launch and threads included
# processes that must agree on a fallback after the first: of plausible times, of implausible ones
CONFIRMATIONS = (1, 4)
_measured_keys: set[str] = set()  # by this process


class ExecutorTuner:
    """Picks executors for regions, and records the decisions."""

    def __init__(self, executors: Sequence[Executor], autotune: Autotune) -> None:
        self.executors = list(executors)
        self.autotune = autotune
        self.decisions: list[Decision] = []

    def choose_executor(self, region: ClaimedRegion) -> ExecutorChoice:
        """Choose who runs the region."""
        name, claiming, module = region.name, region.executor, region.module
        eligible = self._eligible_executors(claiming, module)
        lower = claiming.lower_autotuned if self.autotune is True else claiming.lower
        call = region.guard(lower(module))
        if len(eligible) == 1:
            return ExecutorChoice(claiming, call)
        torch_module = region.restore()
        if any(map(_sums_in_sequence, torch_module.graph.nodes)):
            return ExecutorChoice(claiming, call)
        if self.autotune == "auto" and _is_obviously_faster(module, torch_module):
            return ExecutorChoice(claiming, call)
        calls = {claiming.name: call}
        key = _make_key(module, eligible, getattr(call, "source", ""))
        stored = read_decision(key, name, {executor.name for executor in eligible})
        decision = stored
        is_known = self.autotune is True or key in _measured_keys
        is_known = is_known or not _needs_confirmation(stored, claiming, call)
        if stored is None or not is_known:
            for executor in eligible[1:]:
                is_torch = isinstance(executor, TorchExecutor)
                calls[executor.name] = executor.lower(torch_module if is_torch else module)
            seconds = self._measure_settled(claiming, module, calls)
            # timings don't settle, or the region fell back: the order of the executors decides
            if seconds is None or getattr(call, "fallback", None) is not None:
                LOG.info("autotuned %s: no settled timings, %s keeps it", name, claiming.name)
                return ExecutorChoice(claiming, call)
            decision = Decision(name, _pick_winner(claiming, seconds), seconds, cached=False)
            if stored is not None and stored.winner == decision.winner:
                decision = replace(decision, confirmations=stored.confirmations + 1)
            write_decision(key, decision)
            _measured_keys.add(key)
        assert decision is not None, "measured above"
        self.decisions.append(decision)
        winner = next(e for e in eligible if e.name == decision.winner)
        if isinstance(winner, TorchExecutor):
            return ExecutorChoice(winner, None, _fallback_comment(claiming, decision))
        return ExecutorChoice(winner, calls.get(winner.name) or winner.lower(module))

    def _eligible_executors(self, claiming: Executor, module: fx.GraphModule) -> list[Executor]:
        """The executors to compare; the one that claimed the region comes first."""
        nodes = [n for n in module.graph.nodes if n.op == "call_function"]
        values = [tensor for n in module.graph.nodes for tensor in iter_tensors(fake_value(n))]
        is_empty = any(size_hint(size) == 0 for tensor in values for size in tensor.shape)
        if is_empty or any(map(is_random, nodes)):  # nothing to time; draws must not be repeated
            return [claiming]
        if any(map(_is_unbacked, module.graph.nodes)):  # made-up sizes may not fit to each other
            return [claiming]
        if any(map(_divides_integers, nodes)):  # integer example inputs are zeros
            return [claiming]
        if find_example_integers(module) is None:
            return [claiming]
        others = [executor for executor in self.executors if executor is not claiming]
        if self.autotune == "auto":
            may_fall_back = claiming.falls_back_if_slower
            others = [e for e in others if may_fall_back and isinstance(e, TorchExecutor)]
        return [claiming, *(e for e in others if all(map(e.claims, nodes)))]

    def _measure_settled(
        self, claiming: Executor, module: fx.GraphModule, calls: dict[str, Callable[..., Any]]
    ) -> dict[str, float] | None:
        """Seconds of each call. A fallback is measured twice; None if the two don't agree."""
        first = self._measure(claiming, module, calls)
        is_long = self.autotune is True  # medians of a second's readings
        if first is None or is_long or _pick_winner(claiming, first) == claiming.name:
            return first
        time.sleep(SECOND_LOOK_PAUSE)
        second = self._measure(claiming, module, calls)
        if second is None or _pick_winner(claiming, second) != _pick_winner(claiming, first):
            return None
        return {name: min(first[name], second[name]) for name in first}  # noise only adds

    def _measure(
        self, claiming: Executor, module: fx.GraphModule, calls: dict[str, Callable[..., Any]]
    ) -> dict[str, float] | None:
        def measure(*inputs: Any) -> dict[str, float] | None:
            if "torch" in calls and not _is_accepted(calls["torch"], inputs):
                return None
            timed = calls | {claiming.name: _without_launcher(calls[claiming.name], inputs)}
            if self.autotune == "auto":
                return timing.best_times_on(timed, *inputs, clock=_choose_clock(inputs))
            return timing.median_times_on(timed, *inputs)

        try:
            seconds: dict[str, float] | None = run_on_example_inputs(
                module, measure, find_example_integers(module)
            )
        except (
            torch.OutOfMemoryError
        ):  # the example inputs are in addition to the program's tensors
            return None
        return seconds


def _without_launcher(call: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """The native calls of a region on the CPU, as a host program makes them.

    The launcher is Python and takes several microseconds, as much as the kernel of a small region.
    """
    devices = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
    if devices != {"cpu"} or is_recording():
        return call
    with torch.no_grad():
        call(*inputs)  # waits for the compiler
        recording = record_kernels(call, *inputs)
    return (lambda *_: recording()) if recording.calls else call


def _choose_clock(inputs: Sequence[Any]) -> timing.Clock:
    """The CPU time of this thread, which has no interruptions, if it alone computes; else wall time."""
    devices = {x.device.type for x in inputs if isinstance(x, torch.Tensor)}
    is_alone = devices == {"cpu"} and torch.get_num_threads() == 1 and num_cpu_threads() == 1
    return time.thread_time if is_alone else time.perf_counter


def _is_accepted(torch_call: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Whether torch's ops take the example inputs: some check what integers hold in ways of their own."""
    if not any(isinstance(x, torch.Tensor) and not x.dtype.is_floating_point for x in inputs):
        return True
    try:
        torch_call(*inputs)
    except (RuntimeError, IndexError, ValueError) as error:
        if is_error_of_device(error):
            raise
        return False
    return True


def _needs_confirmation(
    stored: Decision | None, claiming: Executor, call: Callable[..., Any]
) -> bool:
    """Whether a fallback that another process stored is measured again: it may have been busy."""
    if stored is None or stored.winner == claiming.name:
        return False
    seconds = stored.seconds.get(claiming.name, 0.0)
    return stored.confirmations < CONFIRMATIONS[_is_implausible(seconds, call)]


def _is_implausible(seconds: float, call: Callable[..., Any]) -> bool:
    """Whether a time of generated code is far above the cost model's."""
    predicted = sum(kernel.predicted_seconds for kernel in getattr(call, "kernels", ()))
    return seconds > IMPLAUSIBLE_SLOWDOWN * max(predicted, MIN_PREDICTED_SECONDS)


def _pick_winner(claiming: Executor, seconds: dict[str, float]) -> str:
    fastest = min(seconds, key=lambda name: seconds[name])
    is_close = seconds[claiming.name] <= FALLBACK_MARGIN * seconds[fastest]
    return claiming.name if is_close else fastest


def _fallback_comment(claiming: Executor, decision: Decision) -> str:
    ratio = decision.seconds[claiming.name] / decision.seconds[decision.winner]
    return f"fallback: {claiming.name} takes {ratio:.1f}×"


def _is_obviously_faster(module: fx.GraphModule, torch_module: fx.GraphModule) -> bool:
    """Whether bytes decide: tensors are large, and torch moves several times as many bytes.

    Also true if the inputs of a comparison would take too much memory.
    """
    inputs = module.graph.find_nodes(op="placeholder")
    outputs = module.graph.output_node().all_input_nodes
    moved = sum(value_bytes(fake_value(node)) for node in inputs)
    moved += sum(value_bytes(fake_value(node)) for node in outputs)
    moved_by_torch = sum(map(node_bytes, torch_module.graph.nodes))
    ratio, min_bytes = OBVIOUS_SAVINGS
    is_obvious = moved_by_torch >= ratio * moved and moved >= min_bytes
    return is_obvious or moved > MAX_EXAMPLE_BYTES


def _is_unbacked(node: fx.Node) -> bool:
    """Whether a node is, or has, a size that depends on data: the counts of a `tolist()`."""
    value = fake_value(node)
    sizes = [size for tensor in iter_tensors(value) for size in tensor.shape]
    return any(
        isinstance(size, torch.SymInt) and size.node.hint is None for size in (value, *sizes)
    )


def _divides_integers(node: fx.Node) -> bool:
    """Whether the node divides integers: a zero among its inputs would be an error."""
    name = str(getattr(node.target, "_opname", ""))
    value = fake_value(node)
    is_integer = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    return is_integer and name in ("div", "floor_divide", "remainder", "fmod")


def _sums_in_sequence(node: fx.Node) -> bool:
    """Whether torch computes a batch norm far less accurately than eager mode may.

    On CPUs torch adds the images of a channels-last tensor one after another in float32: errors are 10 to 50
    times those of contiguous tensors. A tensor may be channels-last only because we changed its layout.
    """
    name = str(getattr(node.target, "_opname", ""))
    if "batch_norm" not in name or name.endswith("no_training"):
        return False
    images = [x for source in node.all_input_nodes for x in iter_tensors(fake_value(source))]
    return any(x.device.type == "cpu" and _is_channels_last(x) for x in images)


def _is_channels_last(x: torch.Tensor) -> bool:
    if x.dim() not in (4, 5) or is_contiguous_or_false(x):
        return False
    memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    return is_contiguous_for_memory_format_or_false(x, memory_format=memory_format)


def _make_key(module: fx.GraphModule, eligible: Sequence[Executor], source: str) -> str:
    """Everything a decision depends on: ops and sizes, the generated code, the hardware."""
    devices = {str(t.device) for n in module.graph.nodes for t in iter_tensors(fake_value(n))}
    hardware = [torch.cuda.get_device_name(d) if "cuda" in d else d for d in sorted(devices)]
    hardware += [native.cpu_fingerprint(), str(torch.get_num_threads())]
    names = [executor.name for executor in eligible]
    signature = region_signature(module)
    return decision_key(VERSION, torch.__version__, *hardware, *names, signature, source)
