"""Lines that are not worth a comparison.

In: a line, its program, and the values before it in eager. Out: whether eager's result has no meaning that a
compiled program could keep: it depends on the order of a sum that overflows, on memory that no op has
written, on how a device rounds the smallest numbers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.program import Line, Program
from tests.fuzz.values import end_of, is_float, parts_of, storages

# ops that add or multiply many numbers, in an order that is theirs
SUMS = re.compile(r"sum|prod|mean|add|accumulate|trapezoid|@|dot|trace|kron|fold|dist|norm")
DIVISION = re.compile(r"//|%|fmod|remainder|div|gcd|lcm")
SQUARES = re.compile(
    r"\b(var|std|var_mean|std_mean|\w*norm|c?dist|normalize|\w*distance|\w+_loss|\w+_similarity)\("
)
UNSTABLE = re.compile(r"sort\(|topk|kthvalue|median|mode\(|quantile")
PRODUCT = re.compile(r"prod")
CROPPED_CIRCLE = re.compile(r"pad\(.*-.*circular")
# functions whose gradient at NaN differs between the vector and the scalar loops of eager's kernels
BENT = re.compile(
    r"\b(logit|elu|selu|celu|relu6|hardtanh|hardswish|hardshrink|softshrink)(_backward)?[.(]"
)
BENT_BACKWARD = re.compile(r"\b(hardtanh|hardswish|hardshrink|softshrink|elu)_backward\b")
REMAINDER = re.compile(r"%|remainder|fmod")
HARD_SIGMOID = re.compile(r"hardsigmoid|hardswish")
FLOAT_SUMS = re.compile(r"trapezoid|mean|dtype=torch.float")
AVERAGES = re.compile(r"interpolate|pool|softmax|conv|linear|einsum|mv\(|cumulative|diff")
# additions to memory, which GPUs run as atomics
ACCUMULATIONS = re.compile(r"accumulate=True|scatter_add|index_add|scatter_reduce|put_?\(")
RMS_NORM = re.compile(r"rms_norm")
DIVISOR = re.compile(r"avg_pool.*divisor_override")
Values = Mapping[str, Any]


def is_excluded(line: Line, program: Program, values: Values) -> bool:
    """Whether the line is not worth a comparison.

    Eager divides the smallest integer by -1, which ends the process; or squares overflow, which
    eager's CPU kernels compute in double; or it writes to memory that overlaps itself, which no
    functional form of a program describes.
    """
    text = line.text
    is_written = not line.target or "_scatter(" in text
    if is_written and any(_overlaps_itself(values.get(n), program, values) for n in line.used):
        return True
    used = [values[name] for name in line.used & values.keys()]
    pairs = itertools.combinations(used, 2)
    if not line.target and any(_overlap(one, two) for one, two in pairs):
        return True  # eager may read what it has just written
    if "as_strided" in text and not all(_is_covered(value, program, values) for value in used):
        return True
    if DIVISION.search(text) and any(map(has_smallest_integer, used)):
        return True
    if CROPPED_CIRCLE.search(text) and any(map(is_short, used)):
        return True  # eager pads with memory that it has not written
    if line.bitwise and any(_has_computed_nan(name, program, values) for name in line.used):
        return True  # the sign of NaN is that of no rule
    if program.gradient and BENT.search(text) and any(map(has_nan, used)):
        return True
    if BENT_BACKWARD.search(text) and any(map(has_nan, used)):
        return True
    if REMAINDER.search(text) and any(map(has_huge_float, used)):
        return True  # eager's vector loop divides by way of a quotient that overflows
    if "as_strided" in text and any(_keeps_offset(value, program, values) for value in used):
        return True
    if program.gradient and UNSTABLE.search(text) and "stable=True" not in text:
        return True  # the gradient of ties is any of them
    if "median(" in text and any(map(is_expanded, used)):
        return True  # eager reads past the end of a copy that keeps stride 0
    if HARD_SIGMOID.search(text) and any(map(is_float64, used)):
        return True  # eager multiplies by 1/6 in float32
    if PRODUCT.search(text) and any(map(may_overflow, used)):
        return True
    is_sum = SUMS.search(text) or AVERAGES.search(text)
    if is_sum and any(map(may_sum_overflow, used)):
        return True
    if FLOAT_SUMS.search(text) and any(map(has_huge_integer, used)):
        return True
    if RMS_NORM.search(text) and any(is_on_gpu(x) and has_infinity(x) for x in used):
        return True  # eager's kernel gives NaN for the whole row, its CPU kernel for infinity alone
    if program.gradient and DIVISOR.search(text) and any(map(is_on_gpu, used)):
        return True  # eager's kernel for channels_last takes the divisor for a count
    if program.gradient and "embedding_bag" in text and any(map(is_empty_on_gpu, used)):
        return True  # eager's gradient of weights without columns reads memory that is not its own
    if ACCUMULATIONS.search(text) and any(map(has_denormals, used)):
        return True  # atomics in a GPU's memory flush them to zero; eager adds some sums without atomics
    return SQUARES.search(text) is not None and any(map(has_huge_float, used))


def _overlaps_itself(value: Any, program: Program, values: Values) -> bool:
    """Whether a value is in the memory of an input whose elements overlap."""
    windows = [i.name for i in program.inputs if i.layout in ("windows", "expanded")]
    memory = set().union(*(storages(values[name]) for name in windows))
    return isinstance(value, Tensor) and bool(storages(value) & memory)


def _overlap(one: Any, two: Any) -> bool:
    """Whether two tensors are different views of one memory."""
    if not all(isinstance(x, Tensor) for x in (one, two)) or not storages(one) & storages(two):
        return False
    keys = [(x.storage_offset(), x.shape, x.stride()) for x in (one, two)]
    return keys[0] != keys[1]


def _is_covered(value: Any, program: Program, values: Values) -> bool:
    """Whether values or inputs cover a tensor's memory.

    A loss of torch allocates memory for all elements and returns their mean in the first of them:
    `as_strided` could read the others, which no op has written.
    """
    if not isinstance(value, Tensor):
        return True
    given = set().union(*(storages(values[name]) for name in program.arguments if name in values))
    tensors = [v for v in values.values() if isinstance(v, Tensor)]
    parts = [p for v in tensors for p in parts_of(v) if p.layout == torch.strided]
    return all(
        part.untyped_storage().nbytes()
        <= max(end_of(p) for p in parts if storages(p) & storages(part))
        for part in parts_of(value)
        if not storages(part) <= given
    )


def _keeps_offset(value: Any, program: Program, values: Values) -> bool:
    """Whether a tensor is a copy with the storage offset of what it copies, as of `select_scatter`."""
    given = set().union(*(storages(values[name]) for name in program.arguments if name in values))
    if not isinstance(value, Tensor) or storages(value) & given:
        return False
    same = [v for v in values.values() if isinstance(v, Tensor) and storages(v) & storages(value)]
    return all(part.storage_offset() > 0 for one in same for part in parts_of(one))


def _has_computed_nan(name: str, program: Program, values: Values) -> bool:
    """Whether a value that is no input has NaN: kernels differ in its sign and payload."""
    is_input = any(given.name == name for given in program.inputs)
    return not is_input and has_nan(values.get(name))


def has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and any(bool(p.isnan().any()) for p in parts_of(value))


def has_infinity(value: Any) -> bool:
    return isinstance(value, Tensor) and any(bool(p.isinf().any()) for p in parts_of(value))


def is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def is_empty_on_gpu(value: Any) -> bool:
    return is_on_gpu(value) and value.numel() == 0


def is_short(value: Any) -> bool:
    """Whether the last dimension has at most one element."""
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[-1] < 2


def has_denormals(value: Any) -> bool:
    parts = parts_of(value) if isinstance(value, Tensor) else []
    tiny = torch.finfo(torch.float32).tiny
    numbers = [p.double().abs() for p in parts if p.dtype in (torch.float32, torch.bfloat16)]
    return any(bool(((n > 0) & (n < tiny)).any()) for n in numbers)


def has_smallest_integer(value: Any) -> bool:
    if not isinstance(value, Tensor) or is_float(value) or value.dtype == torch.bool:
        return False
    smallest = torch.iinfo(value.dtype).min
    return smallest < 0 and any(bool((p == smallest).any()) for p in parts_of(value))


def is_expanded(value: Any) -> bool:
    """Whether elements share memory because a stride is 0."""
    parts = [part for part in parts_of(value) if part.layout == torch.strided]
    return any(s == 0 and n > 1 for p in parts for n, s in zip(p.shape, p.stride(), strict=True))


def is_float64(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def has_huge_integer(value: Any) -> bool:
    parts = parts_of(value) if isinstance(value, Tensor) else []
    return any(bool((p.double().abs() > 1 << 40).any()) for p in parts if not is_float(p))


def may_overflow(value: Any) -> bool:
    """Whether the product of all numbers overflows, so that a zero among them decides by its place."""
    parts = parts_of(value) if isinstance(value, Tensor) else []
    for part in parts:
        if part.is_floating_point():
            logs = part.double().abs().log2().clamp(min=0).nan_to_num(0, 0)
            if float(logs.sum()) > math.log2(torch.finfo(part.dtype).max) - 2:
                return True
    return False


def may_sum_overflow(value: Any) -> bool:
    """Whether a sum of some of these numbers is infinite or not by the order of its terms."""
    for part in parts_of(value) if isinstance(value, Tensor) else []:
        if part.is_floating_point():
            total = float(part.double().abs().nan_to_num(0, 0, 0).sum())
            if total > torch.finfo(part.dtype).max / 8:
                return True
    return False


def has_huge_float(value: Any) -> bool:
    parts = parts_of(value) if isinstance(value, Tensor) else []
    floats = [part.double() for part in parts if part.is_floating_point()]
    return any(bool((part.abs().nan_to_num(0, 0, 0) > 1e15).any()) for part in floats)
