"""Find the op that made the first NaN or infinity.

In: a claimed Trace. Out: the same with a check behind every call: a NaN where no input had one, or an infinity
where every input was finite, raises NonFiniteError with the op and the user's line. An op that is *given* an
infinity (a mask) may hand it on.

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
from fulgurite.transforms.base import transform
from fulgurite.transforms.observe import add_effect, label, place


@transform(phase="after_claim")
def find_nonfinite(trace: Trace) -> Trace:
    """Check every floating-point value as it is made."""

    def change(graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            if node.op != "call_function" or not _can_be_nonfinite(node.meta.get("val")):
                continue
            if _has_infinite_literal(node):
                continue
            maker = _maker(node)
            inputs = tuple(s for s in maker.all_input_nodes if _can_be_nonfinite(s.meta.get("val")))
            with graph.inserting_after(node):
                add_effect(
                    graph, check_finite, node, inputs, f"{node.name} = {label(maker)}", place(node)
                )

    return trace.edited(change)


def _maker(node: fx.Node) -> fx.Node:
    """The call a value comes out of, where it is one item of several."""
    picked = node.target is operator.getitem and isinstance(node.args[0], fx.Node)
    return _maker(node.args[0]) if picked else node  # type: ignore[arg-type]


def check_finite(
    value: torch.Tensor, inputs: tuple[torch.Tensor, ...], op: str, where: str
) -> None:
    """Raise if `value` holds a NaN or infinity that `inputs` can't account for."""
    value, inputs = _readable(value), tuple(map(_readable, inputs))
    if bool(torch.isfinite(value).all()):
        return
    has_nan = bool(torch.isnan(value).any())
    innocent = [
        bool(torch.isnan(i).any()) if has_nan else not bool(torch.isfinite(i).all()) for i in inputs
    ]
    if any(innocent):
        return
    count = int((~torch.isfinite(value)).sum())
    raise NonFiniteError(
        f"{op} made {'NaN' if has_nan else 'an infinity'} ({count} of {value.numel()} values)",
        where=where,
        input="\n".join(map(_statistics, inputs)),
        next="look at the inputs' ranges above; clamp, shift or rescale before this op",
    )


def _statistics(value: torch.Tensor) -> str:
    if value.numel() == 0 or value.is_complex():
        return describe(value)
    low, high = value.double().aminmax()
    return f"{describe(value)} from {low.item():.4g} to {high.item():.4g}"


def _readable(value: torch.Tensor) -> torch.Tensor:
    """In a dtype that torch can look for NaN in: it can't in one-byte floats."""
    return value.float() if value.dtype.itemsize == 1 else value


def _can_be_nonfinite(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or value.dtype == torch.float4_e2m1fn_x2:
        return False
    return value.is_floating_point() or value.is_complex()


def _has_infinite_literal(node: fx.Node) -> bool:
    """The program asks for an infinity by name (a mask, the start of a maximum)."""
    literals = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, float)]
    return any(not math.isfinite(number) for number in literals)
