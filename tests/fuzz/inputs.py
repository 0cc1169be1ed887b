"""The tensors of a program, from their descriptions.

In: an `Input` and a call's numbers. Out: a tensor, the same at every call: odd strides and offsets,
NaN, infinity, -0, denormals, limits of integers, ties, boundary indices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from tests.fuzz.program import Input, Number

WIDE = {torch.complex64: torch.complex128}


def widen_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for floats, complex128 for complex dtypes."""
    return torch.float64 if dtype.is_floating_point else WIDE.get(dtype, dtype)


def draw_numbers(given: Input, count: int) -> Tensor:
    """`count` numbers in the dtype of an input.

    quarters  multiples of 1/4 between -4 and 4: sums and products are exact
    positive  multiples of 1/4 between 1/4 and 4
    unit      multiples of 1/16 between -1 and 1
    normal    normally distributed
    odd       quarters, and NaN, infinities, -0.0 and denormals
    extreme   the limits of the dtype
    index     low <= i < high, with both ends and duplicates
    unique    the same, each at most once
    """
    dtype: torch.dtype = getattr(torch, given.dtype)
    generator = torch.Generator().manual_seed(given.seed)
    small = torch.randint(-16, 17, (count,), generator=generator)
    hit = torch.rand(count, generator=generator)
    if given.values in ("index", "unique"):
        return draw_indices(given, count, generator).to(dtype)
    if dtype == torch.bool:
        return small > 0
    if given.values == "positive":
        small = small.abs().clamp(min=1)
    if not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        whole = (small.abs() if info.min == 0 else small).to(dtype)
        if given.values == "extreme":
            whole = whole.masked_fill(hit < 0.2, info.min).masked_fill(hit > 0.8, info.max)
        return whole
    if dtype.is_complex:
        imaginary = torch.randint(-16, 17, (count,), generator=generator) / 4
        return torch.complex(small / 4, imaginary).to(dtype)
    data = small.double() / (16 if given.values == "unit" else 4)
    if given.values == "normal":
        data = torch.randn(count, generator=generator, dtype=torch.float64)
    info = torch.finfo(dtype)
    special = [math.nan, -0.0, info.tiny, math.inf, -math.inf, info.tiny / 4]
    if given.values == "extreme":
        special = [info.max, info.min, info.tiny, -0.0]
    if given.values in ("odd", "extreme"):
        special = [v for v in special if has_value(v, dtype)]
        choice = torch.tensor(special, dtype=torch.float64)[small % len(special)]
        data = torch.where(hit < 0.2, choice, data)
    return data.to(dtype)


def has_value(value: float, dtype: torch.dtype) -> bool:
    """Whether a float dtype has this infinity, or a finite number near the value."""
    number = float(torch.tensor(value, dtype=torch.float64).to(dtype).double())
    return math.isinf(number) == math.isinf(value) and math.isnan(number) == math.isnan(value)


def draw_indices(given: Input, count: int, generator: torch.Generator) -> Tensor:
    """Positions from `low` to `high` - 1."""
    if given.values == "unique":
        return given.low + torch.randperm(given.high - given.low, generator=generator)[:count]
    if given.high <= given.low:
        return torch.zeros(count, dtype=torch.int64)
    numbers = torch.randint(given.low, given.high, (count,), generator=generator)
    ends = torch.tensor([given.low, given.high - 1])[:count]
    numbers[: len(ends)] = ends
    return numbers[torch.randperm(count, generator=generator)]


def has_windows(shape: list[int]) -> bool:
    """Whether the last two dimensions may be overlapping windows of one."""
    return len(shape) >= 2 and min(shape[-2:]) >= 1


def shape_of(given: Input, call: Mapping[str, Number]) -> list[int]:
    return [int(call[size]) if isinstance(size, str) else size for size in given.shape]


def make_memory(
    given: Input, inputs: Sequence[Input], call: Mapping[str, Number], device: str, wide: bool
) -> Tensor:
    """The memory of which this input, and others, are views."""
    sharing = [i for i in inputs if (i.memory, i.dtype) == (given.memory, given.dtype)]
    count = max(i.low + math.prod(shape_of(i, call)) for i in sharing)
    numbers = draw_numbers(replace(given, values="quarters"), count)
    return (numbers.to(widen_dtype(numbers.dtype)) if wide else numbers).to(device)


def make_view(given: Input, memory: Tensor, call: Mapping[str, Number]) -> Tensor:
    """A contiguous or transposed view of memory."""
    shape = shape_of(given, call)
    flat = memory[given.low :][: math.prod(shape)]
    if given.layout == "transposed":
        return flat.view(shape[::-1]).permute(tuple(range(len(shape)))[::-1])
    return flat.view(shape)


def make_tensor(given: Input, call: Mapping[str, Number], device: str, wide: bool = False) -> Any:
    """The tensor of an input. `wide` makes it float64 or complex128, with the same strides."""
    shape = shape_of(given, call)
    layout = given.layout if shape or given.layout == "two" else "plain"
    stored = list(shape)
    if layout == "transposed":
        stored = stored[::-1]
    elif layout == "stepped":
        stored[-1] *= 2
    elif layout == "expanded":
        stored[0] = 1
    elif layout == "windows" and has_windows(shape):
        stored[-2:] = [shape[-2] + shape[-1] - 1]
    offset = {"offset": 3, "odd_offset": 1}.get(layout, 0)
    numbers = draw_numbers(given, math.prod(stored) + offset)
    if wide:
        numbers = numbers.to(widen_dtype(numbers.dtype))
    data = numbers.to(device)[offset:].view(stored)
    if layout == "transposed":
        data = data.permute(*range(len(shape))[::-1])
    elif layout == "stepped":
        data = data[..., ::2]
    elif layout == "windows" and has_windows(shape):
        data = data.unfold(-1, shape[-1], 1)
    elif layout == "last_channel" and len(shape) >= 3:
        data = data.movedim(1, -1).contiguous().movedim(-1, 1)
    data = data.expand(shape)
    if layout == "two":
        data = TwoTensor(data, data.clone().mul_(2))
    return data.requires_grad_() if given.requires_grad else data


def make_arguments(
    inputs: tuple[Input, ...],
    call: Mapping[str, Number],
    scalars: tuple[str, ...],
    device: str,
    wide: bool = False,
) -> list[Any]:
    """The arguments of one call."""
    memories: dict[tuple[str, str], Tensor] = {}
    tensors = []
    for given in inputs:
        if not given.memory:
            tensors.append(make_tensor(given, call, device, wide))
            continue
        key = given.memory, given.dtype
        if key not in memories:
            memories[key] = make_memory(given, inputs, call, device, wide)
        tensors.append(make_view(given, memories[key], call))
    return [*tensors, *(call[name] for name in scalars)]
