"""From an operator's table and a device to the function that runs there.

In: a table device type -> "module:function", and a device. Out: the function, or None where the
table has no line for the device. The module is imported when its line is first used, so a machine
without Triton or a compiler never asks for them.

A function may return `NotImplemented` for a case it does not take (a format, a shape, a dtype); the
operator then runs its reference, which takes all of them. Each such case is noted once, with the
arguments that it was about: `handovers()` lists them and `explain()` shows them.
"""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

MOST_NOTED = 200  # different cases; more would be a loop over shapes, of which these tell enough


@dataclass(frozen=True)
class Handover:
    """A case that no kernel takes, so that plain torch runs it."""

    operator: str
    device: str
    reason: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.operator} on {self.device}: {self.reason} ({self.arguments})"


_handovers: Counter[Handover] = Counter()


def handovers() -> dict[Handover, int]:
    """What was handed over to plain torch in this process, and how often."""
    return dict(_handovers)


def find(table: Mapping[str, str], device: torch.device) -> Callable[..., Any] | None:
    """The function of a device's line."""
    place = table.get(device.type)
    return None if place is None else _load(place)


@functools.cache
def _load(place: str) -> Callable[..., Any]:
    module, name = place.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def is_plain_call(*tensors: Tensor | None) -> bool:
    """Whether nobody looks on: no capture, no dispatch mode, no subclass, no gradient to record.

    An operator's function may then be called without going through torch's dispatcher, which costs
    tens of microseconds for an operator in Python.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return all(type(tensor) in (Tensor, nn.Parameter) for tensor in given)


def run(
    table: Mapping[str, str],
    device: torch.device,
    reference: Callable[..., Any],
    *arguments: Any,
) -> Any:
    """What the device's function gives, or else the reference."""
    function = find(table, device)
    result = NotImplemented if function is None else function(*arguments)
    if result is not NotImplemented:
        return result
    place = table.get(device.type)
    reason = f"{place} does not take these" if place else "there is no kernel for this device"
    _note(reference, device, reason, arguments)
    return reference(*arguments)


def _note(
    reference: Callable[..., Any], device: torch.device, reason: str, arguments: Sequence[Any]
) -> None:
    module = reference.__module__.removeprefix("fulgurite.kernels.")
    name = module if reference.__name__ == "reference" else f"{module}.{reference.__name__}"
    case = Handover(name, device.type, reason, describe(arguments))
    if case in _handovers or len(_handovers) < MOST_NOTED:
        _handovers[case] += 1


def describe(value: Any) -> str:
    """`float32[2, 256], 'q4_k', None`: what a kernel looks at before it takes a case."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return ", ".join(map(describe, value))
    return repr(value)
