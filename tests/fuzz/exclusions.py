"""Lines that say nothing about a compiled program.

In: a line, and the values before it. Out: whether it is left out: eager's result is not defined, or
depends on the order of sums, or the line writes to memory that no functional program describes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.fuzz import oracle
from tests.fuzz.program import Input, Line

DIVISION = re.compile(r"//|%|fmod|remainder|div|gcd|lcm")
SQUARES = re.compile(
    r"\b(var|std|var_mean|std_mean|\w*norm|c?dist|normalize|\w*distance|\w+_loss|\w+_similarity)\("
)
UNSTABLE = re.compile(r"sort\(|topk|kthvalue|median|mode\(|quantile")
PRODUCT = re.compile(r"prod")
CROPPED_CIRCLE = re.compile(r"pad\(.*-.*circular")
HARD_SIGMOID = re.compile(r"hardsigmoid|hardswish")
# functions whose gradient at NaN differs between the vector and the scalar loops of eager's kernels
BENT = re.compile(
    r"\b(logit|elu|selu|celu|relu6|hardtanh|hardswish|hardshrink|softshrink)(_backward)?[.(]"
)
FLOAT_SUMS = re.compile(r"trapezoid|mean|dtype=torch.float")
AVERAGES = re.compile(r"interpolate|pool|softmax|conv|linear|einsum|mv\(|cumulative|diff")


@dataclass(frozen=True)
class Exclusions:
    """The lines that are left out after those so far.

    values   by name, in eager
    inputs   of the program so far
    """

    values: Mapping[str, Any]
    inputs: Sequence[Input]
    has_gradient: bool

    def has(self, line: Line) -> bool:
        """Whether the line is not worth a comparison.

        Eager divides the smallest integer by -1, which ends the process; or squares overflow, which
        eager's CPU kernels compute in double; or it writes to memory that overlaps itself, which no
        functional form of a program describes.
        """
        is_written = not line.target or "_scatter(" in line.text
        if is_written and any(map(self._overlaps_itself, line.used)):
            return True
        used = [self.values[name] for name in line.used & self.values.keys()]
        if DIVISION.search(line.text) and any(map(has_smallest_integer, used)):
            return True
        if CROPPED_CIRCLE.search(line.text) and any(map(is_short, used)):
            return True  # eager pads with memory that it has not written
        if "as_strided(" in line.text and any(map(self._has_hidden_memory, line.used)):
            return True  # what an op of eager left in the memory of its result
        if line.bitwise and any(self._has_computed_nan(name) for name in line.used):
            return True  # the sign of NaN is that of no rule
        if self.has_gradient and UNSTABLE.search(line.text) and "stable=True" not in line.text:
            return True  # the gradient of ties is any of them
        if self.has_gradient and BENT.search(line.text) and any(map(has_nan, used)):
            return True
        if "median(" in line.text and any(map(is_expanded, used)):
            return True  # eager reads past the end of a copy that keeps stride 0
        if HARD_SIGMOID.search(line.text) and any(map(is_float64, used)):
            return True  # eager multiplies by 1/6 in float32
        if PRODUCT.search(line.text) and any(map(may_overflow, used)):
            return True
        is_sum = oracle.SUMS.search(line.text) or AVERAGES.search(line.text)
        if is_sum and any(map(may_sum_overflow, used)):
            return True
        if FLOAT_SUMS.search(line.text) and any(map(has_huge_integer, used)):
            return True
        return SQUARES.search(line.text) is not None and any(map(has_huge_float, used))

    def _has_computed_nan(self, name: str) -> bool:
        """Whether a value that is no input has NaN: kernels differ in its sign and payload."""
        value = self.values.get(name)
        is_input = any(given.name == name for given in self.inputs)
        parts = oracle.parts_of(value) if isinstance(value, Tensor) and not is_input else []
        return any(bool(part.isnan().any()) for part in parts)

    def _has_hidden_memory(self, name: str) -> bool:
        """Whether a value is in memory that is larger than any value there, and no input's."""
        values = {n: v for n, v in self.values.items() if isinstance(v, Tensor)}
        memory = oracle.storages(values[name]) if name in values else set()
        shared = {n: v for n, v in values.items() if oracle.storages(v) & memory}
        if any(given.name in shared for given in self.inputs):
            return False
        parts = [part for value in shared.values() for part in oracle.parts_of(value)]
        largest = max((part.numel() * part.itemsize for part in parts), default=0)
        return any(part.untyped_storage().nbytes() > largest for part in parts)

    def _overlaps_itself(self, name: str) -> bool:
        """Whether a value is in the memory of an input whose elements overlap."""
        windows = [i.name for i in self.inputs if i.layout in ("windows", "expanded")]
        values = self.values
        memory = set().union(*(oracle.storages(values[w]) for w in windows))
        value = values.get(name)
        return isinstance(value, Tensor) and bool(oracle.storages(value) & memory)


def has_smallest_integer(value: Any) -> bool:
    if not isinstance(value, Tensor) or oracle.is_float(value) or value.dtype == torch.bool:
        return False
    smallest = torch.iinfo(value.dtype).min
    return smallest < 0 and any(bool((p == smallest).any()) for p in oracle.parts_of(value))


def is_expanded(value: Any) -> bool:
    """Whether elements share memory because a stride is 0."""
    parts = [part for part in oracle.parts_of(value) if part.layout == torch.strided]
    return any(s == 0 and n > 1 for p in parts for n, s in zip(p.shape, p.stride(), strict=True))


def is_short(value: Any) -> bool:
    """Whether the last dimension has at most one element."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] < 2


def has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and any(bool(p.isnan().any()) for p in oracle.parts_of(value))


def is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def has_huge_integer(value: Any) -> bool:
    parts = oracle.parts_of(value) if isinstance(value, Tensor) else []
    return any(bool((p.double().abs() > 1 << 40).any()) for p in parts if not oracle.is_float(p))


def may_overflow(value: Any) -> bool:
    """Whether the product of all numbers overflows, so that a zero among them decides by its place."""
    parts = oracle.parts_of(value) if isinstance(value, Tensor) else []
    for part in parts:
        if part.is_floating_point():
            logs = part.double().abs().log2().clamp(min=0).nan_to_num(0, 0)
            if float(logs.sum()) > math.log2(torch.finfo(part.dtype).max) - 2:
                return True
    return False


def may_sum_overflow(value: Any) -> bool:
    """Whether a sum of some of these numbers is infinite or not by the order of its terms."""
    for part in oracle.parts_of(value) if isinstance(value, Tensor) else []:
        if part.is_floating_point():
            total = float(part.double().abs().nan_to_num(0, 0, 0).sum())
            if total > torch.finfo(part.dtype).max / 8:
                return True
    return False


def has_huge_float(value: Any) -> bool:
    parts = oracle.parts_of(value) if isinstance(value, Tensor) else []
    floats = [part.double() for part in parts if part.is_floating_point()]
    return any(bool((part.abs().nan_to_num(0, 0, 0) > 1e15).any()) for part in floats)
