"""The roofline model: bytes and flops of a kernel, and its predicted time.

In: statements and tensors of the IR. Out: bytes, flops, seconds. Each distinct element counts once
as read and once as written. A dynamic size counts as `DEFAULT_SIZE_HINT`.
"""

from __future__ import annotations

from fulgurite.device import DeviceInfo
from fulgurite.fuser.ir.expression import Load, Operation, walk
from fulgurite.fuser.ir.host_symbols import evaluate_symbol
from fulgurite.fuser.ir.index import Atom, Index, Symbol
from fulgurite.fuser.ir.primitives import PRIMITIVES
from fulgurite.fuser.ir.statement import Statement, Tensor

DEFAULT_SIZE_HINT = 512
LAUNCH_SECONDS = 2e-6  # an empty parallel loop of two threads, measured


def atom_hint(atom: Atom) -> int:
    """Returns a likely value of a dynamic size, or of an int argument.

    It is within the atom's bounds. A symbol that the launcher computes follows from the others.
    """
    if isinstance(atom, Symbol) and atom.definition is not None and not atom.is_64_bit:
        inner = {symbol.name: atom_hint(symbol) for symbol in atom.definition.symbols}
        try:
            return evaluate_symbol(atom, inner)
        except (ArithmeticError, IndexError, ValueError):  # the hints don't fit together
            pass
    low, high = atom.bounds()
    likely = 1 if low is None or low < 0 else DEFAULT_SIZE_HINT
    likely = likely if high is None else min(likely, high)
    return likely if low is None else max(likely, low)


def size_hint(size: Index) -> int:
    """Returns a size as an int, with the default hint for dynamic sizes."""
    return size.constant if size.is_constant else max(size.evaluate(atom_hint), 0)


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
    total = 1 if s.reduction or s.scan or s.scatter else 0
    stored = s.expressions[:-1] if s.scatter else s.expressions
    for part in (part for expression in stored for part in walk(expression)):
        if isinstance(part, Operation):
            total += PRIMITIVES[part.name].flops
        elif isinstance(part, Load):
            total += sum(not i.is_constant and i.single_axis is None for i in part.index)
    return total


def predict_seconds(device: DeviceInfo, bytes_moved: int, flops: int) -> float:
    """Returns max(memory time, compute time) plus the launch overhead."""
    return max(bytes_moved / device.copy_bandwidth, flops / device.flops) + LAUNCH_SECONDS
