"""Kernel registries: from an operator and a device to the function that runs there.

In: an operator's table {device type: kernel function}, a device, a reference function and the
arguments. Out: the kernel's result, or the reference's where no kernel supports the call.

A kernel function returns `NotImplemented` for a case it does not support (a format, a shape, a
dtype). The operator then runs its plain-torch reference, which supports all of them. Each such case
is recorded once, with its arguments: `fallbacks()` lists them and `explain()` shows them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack

Kernel = Callable[..., Any]
PLAIN_TENSORS = (Tensor, nn.Parameter)


class _Recording(threading.local):
    """The recorder of this thread's call, while a launch plan is recorded (`common/launch_plan.py`)."""

    recorder: Any = None


RECORDING = _Recording()

MAX_FALLBACKS = 200  # distinct cases recorded; more come from a loop over shapes and add nothing


@dataclass(frozen=True)
class Fallback:
    """A call that no kernel supports, so the plain-torch reference ran it."""

    operator: str
    device: str
    reason: str
    arguments: str

    def __str__(self) -> str:
        return f"{self.operator} on {self.device}: {self.reason} ({self.arguments})"


_fallbacks: Counter[Fallback] = Counter()


def fallbacks() -> dict[Fallback, int]:
    """The fallbacks of this process, with their counts."""
    return dict(_fallbacks)


def find_kernel(table: Mapping[str, Kernel], device: torch.device) -> Kernel | None:
    """The kernel function for a device, None where the table has none."""
    return table.get(device.type)


def can_skip_dispatcher(*tensors: Tensor | None) -> bool:
    """Whether a kernel may be called directly: no capture, dispatch mode, subclass or gradient.

    Skipping torch's dispatcher saves tens of microseconds for an operator in Python.
    """
    # a captured call has a dispatch mode or tensors of another type; TorchDynamo has neither
    if torch.compiler.is_dynamo_compiling():
        return False
    if _len_torch_dispatch_stack() and RECORDING.recorder is None:
        return False
    records = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in PLAIN_TENSORS or (records and tensor.requires_grad):
            return False
    return True


def dispatch(
    table: Mapping[str, Kernel], device: torch.device, reference: Kernel, *arguments: Any
) -> Any:
    """Call the device's kernel, or the reference where no kernel supports the call."""
    kernel = find_kernel(table, device)
    result = NotImplemented if kernel is None else kernel(*arguments)
    if result is not NotImplemented:
        return result
    reason = "no kernel for this device"
    if kernel is not None:
        reason = f"{kernel.__module__}.{kernel.__qualname__} does not support these arguments"
    _record_fallback(reference, device, reason, arguments)
    return reference(*arguments)


def _record_fallback(
    reference: Kernel, device: torch.device, reason: str, arguments: Sequence[Any]
) -> None:
    case = Fallback(_operator_name(reference), device.type, reason, describe_arguments(arguments))
    if case in _fallbacks or len(_fallbacks) < MAX_FALLBACKS:
        _fallbacks[case] += 1


def _operator_name(reference: Kernel) -> str:
    """`attention.paged_attention` of `kernels.attention.reference.paged_attention`, for example."""
    module = reference.__module__.removeprefix("fulgurite.kernels.")
    module = module.removesuffix(".ops").removesuffix(".reference")
    name = reference.__name__.removesuffix("reference").strip("_")
    return f"{module}.{name}" if name else module


def describe_arguments(value: Any) -> str:
    """`float32[2, 256], 'q4_k', None`: what a kernel checks before it supports a call."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, list | tuple):
        return ", ".join(map(describe_arguments, value))
    if is_dataclass(value):
        return describe_arguments([getattr(value, field.name) for field in fields(value)])
    return repr(value)
