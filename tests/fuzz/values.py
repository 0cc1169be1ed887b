"""The numbers of a program's values, and how they are compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor


def parts_of(value: Any) -> list[Tensor]:
    """The plain tensors of a value."""
    if isinstance(value, TwoTensor):
        return [*parts_of(value.a), *parts_of(value.b)]
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, bool | int | float):
        return [torch.tensor(value)]
    return [part for item in value for part in parts_of(item)]


def as_real(x: Tensor) -> Tensor:
    """Complex as real. If one part is NaN, both are: torch multiplies by 1 + 0j on the way."""
    if not x.is_complex():
        return x.resolve_neg()
    nan = complex(math.nan, math.nan)
    x = x.resolve_conj().resolve_neg()
    return torch.view_as_real(x.masked_fill(x.isnan(), nan))


def is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def comparable(x: Tensor) -> Tensor:
    """The tensor as real numbers in float64, or unchanged if it has whole numbers."""
    x = as_real(x)
    return x.double() if x.is_floating_point() else x


def is_same(a: Any, b: Any) -> bool:
    """Whether all numbers are equal; NaN equals NaN."""
    ours, theirs = parts_of(a), parts_of(b)
    if len(ours) != len(theirs):
        return False
    for one, two in zip(ours, theirs, strict=True):
        one, two = comparable(one), comparable(two)
        if one.shape != two.shape or not bool(((one == two) | ((one != one) & (two != two))).all()):
            return False
    return True


def fits_float32(value: Any) -> bool:
    """float64 is its own reference, so that it counts as exact only if float32 can hold it."""
    real = [torch.view_as_real(p) if p.is_complex() else p for p in parts_of(value)]
    return all(p.dtype != torch.float64 or is_same(p.float(), p) for p in real)


def is_tame(value: Any, whole: bool = False) -> bool:
    """Whether sums of these numbers are exact in any order: small multiples of 1/16, NaN, infinity.

    Whole numbers are always exact, unless their sum is a float: `whole` looks at them, too.
    """
    for part in parts_of(value):
        if whole or is_float(part):
            numbers = comparable(part).double() * 16
            finite = numbers.isfinite()
            is_small = (numbers == numbers.round()) & (numbers.abs() < 1 << 24)
            if not bool((is_small | ~finite).all()):
                return False
    return True


def eps_of(dtype: torch.dtype) -> float:
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.finfo(real).eps if real.is_floating_point else 0.0


def value_eps(value: Any) -> float:
    return max((eps_of(part.dtype) for part in parts_of(value)), default=0.0)


def storages(value: Any) -> set[int]:
    return {p.untyped_storage()._cdata for p in parts_of(value) if p.layout == torch.strided}


def end_of(x: Tensor) -> int:
    """The byte after the last element of a tensor, in its storage."""
    span = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + span + 1) * x.itemsize if x.numel() else 0
