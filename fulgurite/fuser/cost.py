"""The roofline model: what a kernel moves and computes, and how long that should take.

In: statements and tensors of the IR. Out: bytes, flops, seconds. Bytes are each distinct element that
is touched, once in and once out. A dynamic size counts as `ASSUMED_SIZE` until it is known.
"""

from __future__ import annotations

from fulgurite.device import Device
from fulgurite.fuser.ir.expression import Load, Operation, walk
from fulgurite.fuser.ir.index import Atom, Index
from fulgurite.fuser.ir.primitives import PRIMITIVES
from fulgurite.fuser.ir.statement import Statement, Tensor

ASSUMED_SIZE = 512
LAUNCH_SECONDS = 2e-6  # one parallel loop of two threads, measured with an empty body


def _assumed(atom: Atom) -> int:
    return ASSUMED_SIZE


def number(size: Index) -> int:
    """A size as a number, dynamic ones by assumption."""
    return size.constant if size.is_constant else max(size.evaluate(_assumed), 0)


def elements(sizes: tuple[Index, ...]) -> int:
    total = 1
    for size in sizes:
        total *= number(size)
    return total


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements: a dimension that is expanded is there once."""
    total = tensor.itemsize
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        if stride != 0:
            total *= number(size)
    return total


def flops(s: Statement) -> int:
    """Operations per element of the statement's loops."""
    total = 1 if s.reduction or s.scan else 0
    for part in walk(s.expression):
        if isinstance(part, Operation):
            total += PRIMITIVES[part.name].flops
        elif isinstance(part, Load):
            total += sum(not i.is_constant and i.plain is None for i in part.index)
    return total


def seconds(device: Device, moved: int, operations: int) -> float:
    return max(moved / device.copy_bandwidth, operations / device.flops) + LAUNCH_SECONDS
