"""Windows of pooling: which input positions a result reads, and which results read an input position.

    o reads  o * stride - padding + k * dilation                 pooling
    o reads  floor(o * n / m) to ceil((o + 1) * n / m)           adaptive pooling, n positions to m results

In: the arguments of a pooling op. Out: one `Windows` or `AdaptiveWindows` a dimension, which make the
taps of `axis_taps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from fulgurite.fuser.frontend.axis_taps import AxisTaps, clamp_position, integer
from fulgurite.fuser.frontend.lowering_context import convert_dtype
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import add, apply, mul, sub
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression
from fulgurite.fuser.ir.index import Index


@dataclass(frozen=True)
class Windows:
    """The windows of one dimension: o reads `start(o) + k * dilation` for k below `count`."""

    source: Index  # sizes
    result: Index
    count: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @property
    def span(self) -> int:
        return (self.count - 1) * self.dilation + 1

    def start(self, at: Expression) -> Expression:
        first = mul(at, integer(self.stride)) if self.stride != 1 else at
        return sub(first, integer(self.padding)) if self.padding else first

    def is_inside(self) -> bool:
        """Whether all windows are certainly inside the source."""
        if self.padding or not (self.source.is_constant and self.result.is_constant):
            return False
        return (self.result.constant - 1) * self.stride + self.span <= self.source.constant

    def taps(self) -> AxisTaps:
        """The positions that a window reads."""

        def place(at: Index, tap: Index) -> Index:
            return at * self.stride + tap * self.dilation - self.padding

        if self.is_inside():
            return AxisTaps(self.count, place)
        return AxisTaps(
            self.count,
            lambda at, tap: clamp_position(integer(place(at, tap)), self.source),
            is_used=lambda at, tap: in_range(integer(place(at, tap)), self.source),
        )

    # the windows that contain a position

    @property
    def num_readers(self) -> int:
        """The most windows that contain one position."""
        most = -(-self.span // self.stride)
        return min(most, self.result.constant) if self.result.is_constant else most

    def reader(self, at: Index, tap: Index) -> Expression:
        """The tap-th window that may contain a position; any one if there are fewer."""
        first = indices.floordiv(at + (self.padding - self.span), Index(self.stride)) + 1
        if self.result.is_constant:
            begin = clamp_position(integer(first), self.result - self.num_readers + 1)
            return add(begin, integer(tap))
        return integer(first + tap)

    def reader_taps(self, weight: Callable[[Expression], Expression] | None) -> AxisTaps:
        """The windows that contain a position, each with the `weight` of the window."""

        def used(at: Index, tap: Index) -> Expression:
            reader = self.reader(at, tap)
            offset = sub(integer(at), self.start(reader))
            is_inside = apply("and", in_range(offset, Index(self.span)), _is_valid(self, reader))
            if self.dilation == 1:
                return is_inside
            rest = apply("remainder", offset, integer(self.dilation))
            return apply("and", is_inside, apply("eq", rest, integer(0)))

        return AxisTaps(
            max(self.num_readers, 1),
            lambda at, tap: clamp_position(self.reader(at, tap), self.result),
            None if weight is None else lambda at, tap: weight(self.reader(at, tap)),
            used,
        )


def in_range(value: Expression, size: Index) -> Expression:
    above = apply("ge", value, integer(0))
    return apply("and", above, apply("lt", value, integer(size)))


def _is_valid(windows: Windows, reader: Expression) -> Expression:
    if windows.result.is_constant:
        return Constant(True, torch.bool)
    return in_range(reader, windows.result)


def window_size(
    windows: Windows, at: Expression, include_pad: bool, dtype: torch.dtype
) -> Expression:
    """The number of positions that torch divides by, along one dimension."""
    if windows.is_inside():
        return Constant(float(windows.count), dtype)
    start = windows.start(at)
    end = add(start, integer(windows.count))
    last = windows.source + windows.padding if include_pad else windows.source
    end = apply("minimum", end, integer(last))
    first = start if include_pad else apply("maximum", start, integer(0))
    return convert_dtype(sub(end, first), dtype)


@dataclass(frozen=True)
class AdaptiveWindows:
    """Windows that cover n input positions with m results."""

    n: int
    m: int

    def start(self, at: Expression) -> Expression:
        return apply("floor_divide", mul(at, integer(self.n)), integer(self.m))

    def end(self, at: Expression) -> Expression:
        covered = mul(add(at, integer(1)), integer(self.n))
        return apply("floor_divide", add(covered, integer(self.m - 1)), integer(self.m))

    def size(self, at: Expression) -> Expression:
        return sub(self.end(at), self.start(at))

    @property
    def count(self) -> int:
        """The length of the longest window."""
        n, m = self.n, self.m
        return max(-(-(o + 1) * n // m) - o * n // m for o in range(m // math.gcd(n, m)))

    @property
    def num_readers(self) -> int:
        """The most windows that contain one position."""
        n, m = self.n, self.m
        return max(-(-(i + 1) * m // n) - i * m // n for i in range(n // math.gcd(n, m)))

    def taps(self) -> AxisTaps:
        if self.n % self.m == 0:
            step = self.n // self.m
            return AxisTaps(step, lambda at, tap: at * step + tap)

        def place(at: Index, tap: Index) -> Expression:
            return add(self.start(integer(at)), integer(tap))

        return AxisTaps(
            self.count,
            lambda at, tap: clamp_position(place(at, tap), Index(self.n)),
            is_used=lambda at, tap: apply("lt", integer(tap), self.size(integer(at))),
        )

    def reader(self, at: Index, tap: Index) -> Expression:
        first = indices.floordiv(at * self.m, Index(self.n))
        return integer(first + tap)

    def reader_taps(self, weight: Callable[[Expression], Expression] | None) -> AxisTaps:
        def used(at: Index, tap: Index) -> Expression:
            reader = self.reader(at, tap)
            is_window = apply("lt", reader, integer(self.m))
            begins = apply("le", self.start(reader), integer(at))
            return apply("and", is_window, begins)

        return AxisTaps(
            self.num_readers,
            lambda at, tap: clamp_position(self.reader(at, tap), Index(self.m)),
            None if weight is None else lambda at, tap: weight(self.reader(at, tap)),
            used,
        )


# ---- arguments -----------------------------------------------------------------------------------


def _repeat(argument: Sequence[int] | int | None, rank: int, default: Sequence[int]) -> list[int]:
    """An argument for each dimension. One number is for all of them; none is the default."""
    numbers = [argument] if isinstance(argument, int) else list(argument or default)
    if any(not isinstance(n, int) for n in numbers):
        raise Unsupported("pooling with symbolic windows")
    return numbers * rank if len(numbers) == 1 else numbers


def make_windows(
    rank: int,
    source: Sequence[Index],
    result: Sequence[Index],
    kernel_size: Sequence[int],
    stride: Sequence[int] | None,
    padding: Sequence[int] | int,
    dilation: Sequence[int] | int = 1,
) -> list[Windows]:
    kernel = _repeat(kernel_size, rank, ())
    return [
        Windows(*each)
        for each in zip(
            source[-rank:],
            result[-rank:],
            kernel,
            _repeat(stride, rank, kernel),
            _repeat(padding, rank, (0,)),
            _repeat(dilation, rank, (1,)),
            strict=True,
        )
    ]


def make_adaptive_windows(
    rank: int, source: Sequence[Index], result: Sequence[Index]
) -> list[AdaptiveWindows]:
    sizes = [*source[-rank:], *result[-rank:]]
    if not all(size.is_constant and size.constant > 0 for size in sizes):
        raise Unsupported("adaptive pooling with dynamic or empty image sizes")
    return [
        AdaptiveWindows(s.constant, r.constant)
        for s, r in zip(source[-rank:], result[-rank:], strict=True)
    ]


def sizes_of(fake: torch.Tensor) -> list[Index]:
    return [size_to_index(size) for size in fake.shape]


def check_float(fake: torch.Tensor) -> None:
    if not fake.dtype.is_floating_point or fake.dtype.itemsize == 1:
        raise Unsupported(f"pooling of {fake.dtype}")
