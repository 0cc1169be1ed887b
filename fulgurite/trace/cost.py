"""The cost of one node: bytes it moves and floating-point operations it does.

In: a node with metadata. Out: numbers for comments, tables and heuristics. A symbolic size counts as its
hint (the size seen at capture).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from fulgurite.trace.node_meta import aten_op, fake_value


def size_hint(value: Any) -> int:
    """An int for an int or a SymInt, without adding a guard. An unbacked symbol counts as 1."""
    if isinstance(value, torch.SymInt):
        hint = value.node.hint
        return int(hint) if hint is not None else _hint_of_unbacked(value)
    return int(value)


def _hint_of_unbacked(value: torch.SymInt) -> int:
    """The value of an expression such as `32*u0`, with 1 for its unbacked symbols."""
    environment = value.node.shape_env
    known = getattr(environment, "backed_var_to_val", None)  # torch 2.11: var_to_val
    expression = value.node.expr.xreplace(environment.var_to_val if known is None else known)
    return int(expression.xreplace(dict.fromkeys(expression.free_symbols, sympy.S.One)))


def iter_tensors(value: Any) -> Iterable[torch.Tensor]:
    """The tensors inside a metadata value."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from iter_tensors(item)


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements a tensor addresses. An expanded axis (stride 0) counts once."""
    count = 1
    for size, stride in zip(tensor.shape, strides_or_ones(tensor), strict=True):
        length = size_hint(size)
        count *= 1 if size_hint(stride) == 0 and length > 0 else length
    return count * tensor.dtype.itemsize


def strides_or_ones(tensor: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's strides; ones for a layout without strides."""
    if tensor.layout is torch.strided:
        return tensor.stride()
    return tuple(1 for _ in tensor.shape)


def value_bytes(value: Any) -> int:
    """Bytes of all tensors inside a metadata value."""
    return sum(tensor_bytes(tensor) for tensor in iter_tensors(value))


def is_view(node: fx.Node) -> bool:
    """Whether a node moves no data: a view op, or `getitem` of a tuple."""
    if node.target is operator.getitem:
        return True
    if aten_op(node) is torch.ops.aten._unsafe_view.default:
        return True  # a view, although its schema doesn't say so
    schema = getattr(aten_op(node), "_schema", None)
    if schema is None:
        return False
    returns = schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def view_base(node: fx.Node) -> fx.Node:
    """The node whose memory a view refers to; the node itself if it is no view.

    An item of a tuple has memory of its own, unless the tuple's op is a view (`split`).
    """
    while node.op == "call_function" and is_view(node):
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and not (
            source.op == "call_function" and is_view(source)
        ):
            break
        node = source
    return node


def node_bytes(node: fx.Node) -> int:
    """Bytes read and written if the node runs as its own kernel."""
    if node.op != "call_function" or is_view(node):
        return 0
    read = sum(value_bytes(fake_value(source)) for source in node.all_input_nodes)
    return read + value_bytes(fake_value(node))


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of matmuls, convolutions and attention; 0 for everything else."""
    packet = getattr(aten_op(node), "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0

    def concrete(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return concrete(fake_value(value))
        if isinstance(value, torch.Tensor):
            shape = tuple(size_hint(size) for size in value.shape)
            return torch.empty(shape, dtype=value.dtype, device="meta")
        if isinstance(value, (list, tuple)):
            return type(value)(concrete(item) for item in value)
        return size_hint(value) if isinstance(value, torch.SymInt) else value

    arguments = [concrete(argument) for argument in node.args]
    keywords = {key: concrete(argument) for key, argument in node.kwargs.items()}
    return int(formula(*arguments, **keywords, out_val=concrete(fake_value(node))))


def format_flops(count: float) -> str:
    """`275.0 GFLOP`."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "FLOP" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} PFLOP"


def format_seconds(seconds: float) -> str:
    """`41 ms`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_count(number: int, thing: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
