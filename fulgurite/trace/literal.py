"""A Python value → a Python expression that evaluates to it.

In: arguments of fx nodes. Out: text, or None for a value that can't be written down (a process group, a
user's object). The printer then binds that value to a name.
"""

from __future__ import annotations

import base64
import enum
import math
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

NameNode = Callable[[fx.Node], str]
MAX_LITERAL_ELEMENTS = 64  # larger constants are printed as compressed bytes


def format_literal(value: Any, name: NameNode) -> str | None:
    """The expression for `value`; `name` gives the names of nodes. None: there is no expression."""
    match value:
        case fx.Node():
            return name(value)
        case None | bool() | str() | bytes():
            return repr(value)
        case enum.Enum():
            return None
        case int():
            return repr(int(value))
        case float():
            return _format_float(value)
        case complex():
            return f"complex({_format_float(value.real)}, {_format_float(value.imag)})"
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return _format_symbolic(value)
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
            return f"torch.ops.{value!s}"
        case torch._ops.HigherOrderOperator():
            return f"torch.ops.higher_order.{value.name()}"
        case slice():
            return _format_call("slice", (value.start, value.stop, value.step), name)
        case tuple():
            inner = _format_items(value, name)
            return None if inner is None else f"({inner},)" if len(value) == 1 else f"({inner})"
        case list():
            inner = _format_items(value, name)
            return None if inner is None else f"[{inner}]"
        case dict():
            pairs = [(format_literal(k, name), format_literal(v, name)) for k, v in value.items()]
            if any(k is None or v is None for k, v in pairs):
                return None
            return "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    return "..." if value is Ellipsis else None


def _format_items(values: Any, name: NameNode) -> str | None:
    parts = [format_literal(item, name) for item in values]
    return None if any(part is None for part in parts) else ", ".join(part or "" for part in parts)


def _format_call(function: str, arguments: tuple[Any, ...], name: NameNode) -> str | None:
    inner = _format_items(arguments, name)
    return None if inner is None else f"{function}({inner})"


def _format_symbolic(value: Any) -> str | None:
    """A symbolic number prints only if it is a known constant; otherwise it must be an input."""
    known = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
    return None if known is None else repr(known)


def _format_float(value: float) -> str:
    if math.isnan(value):
        return "math.nan"
    if math.isinf(value):
        return "math.inf" if value > 0 else "-math.inf"
    return repr(float(value))


def format_constant(tensor: torch.Tensor) -> str | None:
    """An expression that rebuilds a constant tensor bit for bit. None for subclasses and sparse tensors."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not is_plain or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    data = tensor.detach().cpu().contiguous()
    shape = list(data.shape)
    if data.numel() <= MAX_LITERAL_ELEMENTS and _round_trips_as_list(data):
        numbers = format_literal(data.tolist(), lambda node: node.name)
        text = f"torch.tensor({numbers}, dtype={data.dtype})"
        text += f".reshape({shape})" if data.numel() == 0 else ""
    else:
        raw = bytes(data.reshape(-1).view(torch.uint8).numpy()) if data.numel() else b""
        packed = base64.b85encode(zlib.compress(raw)).decode()
        unpacked = f"zlib.decompress(base64.b85decode({packed!r}))"
        text = f"torch.frombuffer(bytearray({unpacked}), dtype={data.dtype}).reshape({shape})"
    if tensor.device.type != "cpu":
        text += f".to({str(tensor.device)!r})"
    strides = list(tensor.stride())
    if strides != list(data.stride()) and data.numel():
        text = f"torch.empty_strided({shape}, {strides}, dtype={data.dtype}).copy_({text})"
    return text


def _round_trips_as_list(data: torch.Tensor) -> bool:
    """Whether `torch.tensor(data.tolist())` gives the same bits."""
    if data.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return not bool(data.isnan().any())  # a list loses NaN payloads and signs
    integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return data.dtype in integers
