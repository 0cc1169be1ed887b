"""A Python value → the Python expression that makes it.

In: arguments of fx nodes. Out: text, or None where a value has no text (a process group, a user's object);
the printer then binds it by name.
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

Name = Callable[[fx.Node], str]
SMALL_CONSTANT = 64  # elements; above this a constant is printed as compressed bytes


def literal(value: Any, name: Name) -> str | None:
    """The expression for `value`, where `name` spells nodes. None: there is none."""
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
            return _float(value)
        case complex():
            return f"complex({_float(value.real)}, {_float(value.imag)})"
        case torch.SymInt() | torch.SymFloat() | torch.SymBool():
            return _symbolic(value)
        case torch.dtype() | torch.memory_format() | torch.layout():
            return str(value)
        case torch.device():
            return f"torch.device({str(value)!r})"
        case torch._ops.OpOverload() | torch._ops.OpOverloadPacket():
            return f"torch.ops.{value!s}"
        case torch._ops.HigherOrderOperator():
            return f"torch.ops.higher_order.{value.name()}"
        case slice():
            return _call("slice", (value.start, value.stop, value.step), name)
        case tuple():
            inner = _items(value, name)
            return None if inner is None else f"({inner},)" if len(value) == 1 else f"({inner})"
        case list():
            inner = _items(value, name)
            return None if inner is None else f"[{inner}]"
        case dict():
            pairs = [(literal(k, name), literal(v, name)) for k, v in value.items()]
            if any(k is None or v is None for k, v in pairs):
                return None
            return "{" + ", ".join(f"{k}: {v}" for k, v in pairs) + "}"
    return "..." if value is Ellipsis else None


def _items(values: Any, name: Name) -> str | None:
    parts = [literal(item, name) for item in values]
    return None if any(part is None for part in parts) else ", ".join(part or "" for part in parts)


def _call(function: str, arguments: tuple[Any, ...], name: Name) -> str | None:
    inner = _items(arguments, name)
    return None if inner is None else f"{function}({inner})"


def _symbolic(value: Any) -> str | None:
    """A symbolic number that has become a constant prints as it; a free one must come in as an input."""
    known = value.node.maybe_as_int() if isinstance(value, torch.SymInt) else None
    return None if known is None else repr(known)


def _float(value: float) -> str:
    if math.isnan(value):
        return "math.nan"
    if math.isinf(value):
        return "math.inf" if value > 0 else "-math.inf"
    return repr(float(value))


def constant(tensor: torch.Tensor) -> str | None:
    """The expression that rebuilds a constant tensor bit for bit, or None (a subclass, a sparse tensor)."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout is not torch.strided or tensor.device.type == "meta":
        return None
    data = tensor.detach().cpu().contiguous()
    shape = list(data.shape)
    if data.numel() <= SMALL_CONSTANT and _prints_exactly(data):
        numbers = literal(data.tolist(), lambda node: node.name)
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


def _prints_exactly(data: torch.Tensor) -> bool:
    """Whether tolist() and torch.tensor() give the same bits back."""
    if data.dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        return not bool(data.isnan().any())  # NaN payloads and signs would be lost
    integers = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    return data.dtype in integers
