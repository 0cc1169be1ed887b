"""Find the op that produced the first NaN or infinity.

In: a claimed Trace. Out: the same with a check after every call. A NaN if no input had one, or an infinity
if every input was finite, raises NonFiniteError with the op and the user's line. An op whose *input* is
infinite (a mask) may pass it on, and a fused region may compute one from an infinite literal.

    compiled = fulgurite.compile(model, transforms=[fulgurite.transforms.find_nonfinite])
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from fulgurite.errors import NonFiniteError
from fulgurite.trace import Trace, describe
from fulgurite.trace.node_meta import fake_value
from fulgurite.trace.region import Region
from fulgurite.transforms.base import transform
from fulgurite.transforms.instrument import add_effect, op_label, source_label


@transform(phase="after_claim")
def find_nonfinite(trace: Trace) -> Trace:
    """Check every floating-point value when it is computed."""

    def change(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function" or not _can_be_nonfinite(fake_value(node)):
                continue
            if _has_infinite_literal(node):
                continue
            producer = _producer(node)
            inputs = tuple(s for s in producer.all_input_nodes if _can_be_nonfinite(fake_value(s)))
            with graph.inserting_after(node):
                add_effect(
                    graph,
                    check_finite,
                    node,
                    inputs,
                    f"{node.name} = {op_label(producer)}",
                    source_label(node),
                    _reads_infinite_literal(node, producer),
                )

    return trace.edit(change)


def _producer(node: fx.Node) -> fx.Node:
    """The call that computed a value: for an item of a tuple, the call that returned the tuple."""
    is_item = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
    return _producer(node.args[0]) if is_item else node  # type: ignore[arg-type]


def check_finite(
    value: torch.Tensor,
    inputs: tuple[torch.Tensor, ...],
    op: str,
    where: str,
    may_be_infinite: bool = False,
) -> None:
    """Raise if `value` has a NaN or infinity that does not come from `inputs`."""
    value, inputs = _widen(value), tuple(map(_widen, inputs))
    if bool(torch.isfinite(value).all()):
        return
    has_nan = bool(torch.isnan(value).any())
    if may_be_infinite and not has_nan:
        return
    explained = [
        bool(torch.isnan(i).any()) if has_nan else not bool(torch.isfinite(i).all()) for i in inputs
    ]
    if any(explained):
        return
    count = int((~torch.isfinite(value)).sum())
    raise NonFiniteError(
        f"{op} produced {'NaN' if has_nan else 'an infinity'} ({count} of {value.numel()} values)",
        where=where,
        input="\n".join(map(_describe_range, inputs)),
        next="check the ranges of the inputs above; clamp, shift or rescale before this op",
    )


def _describe_range(value: torch.Tensor) -> str:
    if value.numel() == 0 or value.is_complex():
        return describe(value)
    low, high = value.double().aminmax()
    return f"{describe(value)} from {low.item():.4g} to {high.item():.4g}"


def _widen(value: torch.Tensor) -> torch.Tensor:
    """Cast one-byte floats, in which torch can't look for NaN."""
    return value.float() if value.dtype.itemsize == 1 else value


def _can_be_nonfinite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.float4_e2m1fn_x2:
        return False
    return value.is_floating_point() or value.is_complex()


def _has_infinite_literal(node: fx.Node) -> bool:
    """Whether the op has an infinite literal argument (a mask, the initial value of a maximum)."""
    literals = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    return any(not math.isfinite(number) for number in literals)


def _reads_infinite_literal(node: fx.Node, producer: fx.Node) -> bool:
    """Whether a value of a fused region is computed from an infinite literal (a mask)."""
    if not isinstance(producer.target, Region):
        return False
    outputs: Any = producer.target.module.graph.output_node().args[0]
    if node is not producer and isinstance(outputs, (tuple, list)):
        outputs = outputs[int(node.args[1])]  # type: ignore[arg-type]
    found = _list_nodes(outputs)
    seen: set[fx.Node] = set()
    while found:
        one = found.pop()
        if one in seen:
            continue
        seen.add(one)
        if _has_infinite_literal(one):
            return True
        found += one.all_input_nodes
    return False


def _list_nodes(outputs: Any) -> list[fx.Node]:
    parts = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [part for part in parts if isinstance(part, fx.Node)]
