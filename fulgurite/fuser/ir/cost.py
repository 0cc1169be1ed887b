"""The roofline model: bytes and flops of a kernel, and its predicted time.

In: statements and tensors of the IR. Out: bytes, flops, seconds. Each distinct element counts once
as read and once as written. A dynamic size counts as `DEFAULT_SIZE_HINT`.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.expression import Load, Operation, walk
from fulgurite.fuser.ir.index import Atom, Index
from fulgurite.fuser.ir.primitives import PRIMITIVES
from fulgurite.fuser.ir.statement import Statement, Tensor

DEFAULT_SIZE_HINT = 512
LAUNCH_SECONDS = 2e-6  # an empty parallel loop of two threads, measured


def _default_hint(atom: Atom) -> int:
    return DEFAULT_SIZE_HINT


def size_hint(size: Index) -> int:
    """Returns a size as an int, with the default hint for dynamic sizes."""
    return size.constant if size.is_constant else max(size.evaluate(_default_hint), 0)


def count_elements(sizes: tuple[Index, ...]) -> int:
    """Multiplies the hints of all sizes."""
    total = 1
    for size in sizes:
        total *= size_hint(size)
    return total


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's distinct elements. Expanded dimensions count once."""
    total = tensor.itemsize
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        if stride != 0:
            total *= size_hint(size)
    return total


def count_flops(s: Statement) -> int:
    """Returns the operations per point of the statement's loops."""
    total = 1 if s.reduction or s.scan else 0
    for part in walk(s.expression):
        if isinstance(part, Operation):
            total += PRIMITIVES[part.name].flops
        elif isinstance(part, Load):
            total += sum(not i.is_constant and i.single_axis is None for i in part.index)
    return total


def predict_seconds(device: DeviceInfo, bytes_moved: int, flops: int) -> float:
    """Returns max(memory time, compute time) plus the launch overhead."""
    return max(bytes_moved / device.copy_bandwidth, flops / device.flops) + LAUNCH_SECONDS
