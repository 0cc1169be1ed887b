"""Float32 matmuls of training graphs on the CPU: ours or torch's, the faster by measurement.

In: a functional training graph. Out: the same, where `mm` and `addmm` are `fulgurite::matmul` if its kernel is
faster on this machine. torch's library does not use all vector instructions of every CPU; our kernel packs one
operand at each call. Each combination of sizes and strides is timed once, a few milliseconds, and the decision is
stored in the cache folder. Nothing is replaced without autotuning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import native, timing
from fulgurite.kernels.conv import cpu
from fulgurite.kernels.conv.matmul import matmul
from fulgurite.native import find_compiler
from fulgurite.trace import Trace
from fulgurite.trace.decisions import Decision, decision_key, read_decision, write_decision
from fulgurite.trace.node_meta import fake_value
from fulgurite.version import VERSION

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default)
MIN_WORK = 1 << 19  # products: a smaller matmul costs little more than its call
MIN_ROWS = 16  # fewer don't pay for packing
MAX_TIMED_BYTES = 256 << 20  # of the operands that are made for a timing
MIN_GAIN = 1.1  # times faster than torch's, or it stays


def has_matmuls(trace: Trace) -> bool:
    """Whether the step applies: a training graph with float32 matmuls on the CPU."""
    if trace.kind == "inference" or find_compiler() is None:
        return False
    return any(_match(node) is not None for node in trace.graph.nodes)


def use_own_matmuls(trace: Trace) -> Trace:
    """Replace the matmuls for which our kernel is faster."""

    def change(graph: fx.Graph) -> None:
        for node in graph.nodes:
            operands = _match(node)
            if operands is None or not _is_ours_faster(*(_layout(x) for x in operands)):
                continue
            a, b, bias = operands
            node.target, node.args = matmul.overload, (a, b, bias)

    return trace.edit(change)


Layout = tuple[tuple[int, ...], tuple[int, ...]] | None  # sizes and strides


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """The operands a, b and bias of a matmul that our kernel computes."""
    if node.op != "call_function" or node.target not in MATMULS or node.kwargs:
        return None
    bias, a, b = (None, *node.args) if node.target is aten.mm.default else node.args
    tensors = [fake_value(x) for x in (a, b, bias) if x is not None]  # type: ignore[arg-type]
    if not all(map(_is_plain, tensors)) or not fake_value(node).is_contiguous():
        return None
    rows, depth = tensors[0].shape
    columns = tensors[1].shape[1]
    if bias is not None and tuple(tensors[2].shape) != (columns,):
        return None
    if rows < MIN_ROWS or rows * depth * columns < MIN_WORK:
        return None
    return a, b, bias  # type: ignore[return-value]


def _is_plain(value: Any) -> bool:
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.device.type != "cpu":
        return False
    return all(isinstance(n, int) and n > 0 for n in (*value.shape, *value.stride()))


def _layout(node: fx.Node | None) -> Layout:
    return (
        None if node is None else (tuple(fake_value(node).shape), tuple(fake_value(node).stride()))
    )


def _is_ours_faster(a: Layout, b: Layout, bias: Layout) -> bool:
    """Whether our kernel is faster than torch's for these operands; stored after the first timing."""
    key = decision_key(
        VERSION, torch.__version__, native.cpu_fingerprint(), str(torch.get_num_threads()),
        "matmul", str(a), str(b), str(bias),
    )  # fmt: skip
    decision = read_decision(key, "matmul", {"torch", "fulgurite"})
    if decision is None:
        with _disable_current_modes(), torch._C._DisablePythonDispatcher():  # capture's FakeTensors
            seconds = _time_matmuls(a, b, bias)
        if seconds is None:
            return False
        is_ours = MIN_GAIN * seconds["fulgurite"] < seconds["torch"]
        decision = Decision("matmul", "fulgurite" if is_ours else "torch", seconds, cached=False)
        write_decision(key, decision)
    return decision.winner == "fulgurite"


def _time_matmuls(a: Layout, b: Layout, bias: Layout) -> dict[str, float] | None:
    layouts = [layout for layout in (a, b, bias) if layout is not None]
    spans = [sum((n - 1) * s for n, s in zip(*layout, strict=True)) + 1 for layout in layouts]
    if 4 * sum(spans) > MAX_TIMED_BYTES:
        return None
    operands = [
        torch.ones(span).as_strided(*layout) for span, layout in zip(spans, layouts, strict=True)
    ]

    def run_torch(a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        return torch.addmm(*bias, a, b) if bias else torch.mm(a, b)

    def run_ours(a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        return cpu.matmul(a, b, *bias or (None,))  # type: ignore[no-any-return]

    return timing.best_times_on({"torch": run_torch, "fulgurite": run_ours}, *operands)
