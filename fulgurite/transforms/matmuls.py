"""Float32 matmuls of training graphs on the CPU: ours or torch's, the faster by measurement.

In: a functional training graph. Out: the same, where `mm` and `addmm` are `fulgurite::matmul` if its kernel is
faster on this machine. torch's library does not use all vector instructions of every CPU; our kernel packs one
operand at each call. Each combination of sizes and strides is timed once, a few milliseconds, and the decision is
stored in the cache folder. Nothing is replaced without autotuning.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from fulgurite.kernels.conv import cpu
from fulgurite.kernels.conv.matmul import matmul
from fulgurite.native import find_compiler
from fulgurite.trace import Trace
from fulgurite.trace.node_meta import fake_value
from fulgurite.transforms.measured import Comparison, is_ours_faster, is_plain, layout_of

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default)
MIN_WORK = 1 << 19  # products: a smaller matmul costs little more than its call
MIN_ROWS = 16  # fewer don't pay for packing


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
            if operands is not None and is_ours_faster(_compare(*operands)):
                node.target, node.args = matmul.overload, operands

    return trace.edit(change)


def _match(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """The operands a, b and bias of a matmul that our kernel computes."""
    if node.op != "call_function" or node.target not in MATMULS or node.kwargs:
        return None
    bias, a, b = (None, *node.args) if node.target is aten.mm.default else node.args
    if not all(is_plain(x) for x in (a, b, bias) if x is not None):
        return None
    rows, depth = fake_value(a).shape  # type: ignore[arg-type]
    columns = fake_value(b).shape[1]  # type: ignore[arg-type]
    if bias is not None and tuple(fake_value(bias).shape) != (columns,):  # type: ignore[arg-type]
        return None
    if rows < MIN_ROWS or rows * depth * columns < MIN_WORK or not fake_value(node).is_contiguous():
        return None
    return a, b, bias  # type: ignore[return-value]


def _compare(a: fx.Node, b: fx.Node, bias: fx.Node | None) -> Comparison:
    def run_torch(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        return torch.mm(a, b) if bias is None else torch.addmm(bias, a, b)

    operands = (layout_of(a), layout_of(b), layout_of(bias))
    return Comparison("matmul", operands, (), run_torch, cpu.matmul)
