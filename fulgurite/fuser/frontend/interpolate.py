"""Lowerings of `F.interpolate` and its gradients. Same calling convention as `views.py`.

A result position reads one (nearest), two (linear) or four (cubic) source positions a dimension:

    real(o) = scale * (o + 0.5) - 0.5      align_corners: scale * o      scale = source size / result size
    nearest: floor(scale * o)              linear: floor(real), weights 1 - t and t, t the fraction
    cubic:   floor(real) - 1 ... + 2, convolution with a = -0.75

The gradient of position i sums the results that read it: a window of `count` results from `start(i)`.
The window is found from the source positions of all results, so it is exact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite.fuser.frontend.axis_taps import (
    IDENTITY,
    AxisTaps,
    add_position_table,
    clamp_position,
    integer,
    lower_taps,
    to_float,
)
from fulgurite.fuser.frontend.lowering_context import LoweringContext
from fulgurite.fuser.frontend.symbolic_sizes import size_to_index
from fulgurite.fuser.frontend.tensor_value import TensorValue
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.build_expression import (
    add,
    apply,
    constant_like,
    mul,
    one_minus,
    sub,
    where,
)
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import Constant, Expression, Operation, opmath_dtype
from fulgurite.fuser.ir.index import Axis, Index
from fulgurite.fuser.ir.interpreter import StatementEvaluator
from fulgurite.trace.node_meta import fake_value

CUBIC_A = -0.75
MAX_WINDOW_POSITIONS = 1 << 24  # results whose source positions are enumerated for a gradient


@dataclass(frozen=True)
class Resampling:
    """How one dimension is resampled."""

    mode: str  # nearest, nearest_exact, linear or cubic
    source: Index  # sizes
    result: Index
    align_corners: bool
    scale: float | None  # the factor that the caller gave: result / source
    dtype: torch.dtype  # of real positions and weights
    is_cpu: bool
    is_copy: bool  # torch copies this dimension without looking at `scale`

    def step(self) -> Expression:
        """Source positions per result position, computed in `dtype` as torch does."""
        source, result = self.source, self.result
        if self.align_corners:
            if result == 1:
                return Constant(0.0, self.dtype)
            source, result = source - 1, result - 1
        elif self.scale is not None and self.scale > 0:
            return Constant(1.0 / self.scale, self.dtype)
        if source.is_constant and result.is_constant:
            return Constant(source.constant / result.constant, self.dtype)
        return apply("div", to_float(source, self.dtype), to_float(result, self.dtype))

    def real_position(self, at: Expression) -> Expression:
        """The source position of a result position, before rounding; from 0 on for linear."""
        number = Operation("cast", (at,), self.dtype)
        if self.align_corners:
            return mul(self.step(), number)
        half = constant_like(0.5, number)
        real = sub(mul(self.step(), add(number, half)), half)
        return real if self.mode == "cubic" else apply("maximum", real, constant_like(0, real))

    def base(self, at: Expression) -> Expression:
        """The source position, rounded down; below the source's size."""
        if self.is_copy:
            return at
        if self.mode == "nearest" and self.is_cpu and self.result == self.source * 2:
            return apply("shift_right", at, constant_like(1, at))  # torch ignores `scale` here
        if self.mode.startswith("nearest"):
            offset = 0.5 if self.mode == "nearest_exact" else 0.0
            number = Operation("cast", (at,), self.dtype)
            real = mul(add(number, constant_like(offset, number)), self.step())
        else:
            real = self.real_position(at)
        whole = Operation("cast", (apply("floor", real),), torch.int64)
        return apply("minimum", whole, integer(self.source - 1))

    def fraction(self, at: Expression) -> Expression:
        """How far the real position is past its base: 0 to 1."""
        real = self.real_position(at)
        past = sub(real, Operation("cast", (self.base(at),), self.dtype))
        low, high = constant_like(0, past), constant_like(1, past)
        return apply("minimum", apply("maximum", past, low), high)

    # taps

    @property
    def count(self) -> int:
        return {"linear": 2, "cubic": 4}.get(self.mode, 1)

    def position(self, at: Expression, tap: int) -> Expression:
        """The source position of a tap."""
        if self.mode.startswith("nearest") or self.is_copy:
            return self.base(at)
        if self.mode == "linear":
            later = apply("minimum", add(self.base(at), integer(1)), integer(self.source - 1))
            return later if tap else self.base(at)
        return clamp_position(add(self.base(at), integer(tap - 1)), self.source)

    def weight(self, at: Expression, tap: int) -> Expression:
        t = self.fraction(at)
        if self.mode == "linear":
            return one_minus(t) if tap == 0 else t
        distance = [add(t, constant_like(1, t)), t, one_minus(t), sub(constant_like(2, t), t)][tap]
        return _cubic_outer(distance) if tap in (0, 3) else _cubic_inner(distance)


def _cubic_inner(x: Expression) -> Expression:
    """((a + 2) x - (a + 3)) x^2 + 1, for distances up to 1."""
    first = sub(mul(constant_like(CUBIC_A + 2, x), x), constant_like(CUBIC_A + 3, x))
    return add(mul(mul(first, x), x), constant_like(1, x))


def _cubic_outer(x: Expression) -> Expression:
    """((a x - 5a) x + 8a) x - 4a, for distances from 1 to 2."""
    first = sub(mul(constant_like(CUBIC_A, x), x), constant_like(5 * CUBIC_A, x))
    second = add(mul(first, x), constant_like(8 * CUBIC_A, x))
    return sub(mul(second, x), constant_like(4 * CUBIC_A, x))


# ---- forward -------------------------------------------------------------------------------------


def make_forward_taps(r: Resampling) -> AxisTaps:
    """The source positions and weights of every result position."""
    if r.is_copy and r.is_cpu and r.mode == "linear":  # torch adds 0 times infinity, too
        return AxisTaps(2, lambda at, _: at, lambda _, tap: Constant(1.0 - tap.constant, r.dtype))
    if r.is_copy:
        return IDENTITY

    def position(at: Index, tap: Index) -> Expression:
        return r.position(integer(at), tap.constant)

    def weight(at: Index, tap: Index) -> Expression:
        return r.weight(integer(at), tap.constant)

    return AxisTaps(r.count, position, weight if r.count > 1 else None)


def make_upsample_lowering(mode: str) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext,
        node: Node,
        source: Any = None,
        input: Any = None,
        output_size: Any = None,
        align_corners: bool = False,
        **options: Any,
    ) -> TensorValue:
        value = ctx.get_value(source if source is not None else input)
        result = [size_to_index(size) for size in fake_value(node).shape]
        resamplings = _describe(node, mode, value.sizes[2:], result[2:], align_corners, options)
        return lower_taps(ctx, node, value, [make_forward_taps(r) for r in resamplings])

    return lower


def _describe(
    node: Node,
    mode: str,
    source: Sequence[Index],
    result: Sequence[Index],
    align_corners: bool,
    options: dict[str, Any],
) -> list[Resampling]:
    """The resampling of each dimension. `options` has the scale factors, one argument each."""
    fake = fake_value(node)
    is_nearest = mode.startswith("nearest")
    if not (fake.dtype.is_floating_point or (is_nearest and fake.dtype == torch.uint8)):
        raise Unsupported(f"{mode} interpolation of {fake.dtype}")
    if fake.dtype.itemsize == 1 and fake.dtype.is_floating_point:
        raise Unsupported(f"interpolation of {fake.dtype}")
    if any(size == 0 for size in source):
        raise Unsupported("interpolation of an empty image")
    dtype = torch.float32 if is_nearest else opmath_dtype(fake.dtype)
    names = ["scales"] if "scales" in options else []
    names += [f"scales_{axis}" for axis in "dhw" if f"scales_{axis}" in options]
    scales = [options[name] for name in names]
    if any(not isinstance(scale, float | int | None) for scale in scales):
        raise Unsupported("a symbolic scale factor")
    is_cpu = fake.device.type == "cpu"
    unchanged = [s == r for s, r in zip(source, result, strict=True)]
    if is_cpu:  # each dimension for itself
        copied = [same and mode in ("nearest", "linear") for same in unchanged]
    else:  # GPU kernels copy whole images
        copied = [all(unchanged) and mode != "nearest_exact"] * len(unchanged)
    return [
        Resampling(mode, s, r, align_corners, scale, dtype, is_cpu, is_copy)
        for s, r, scale, is_copy in zip(source, result, scales, copied, strict=True)
    ]


# ---- gradients -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """The results that read source position i: `count` of them from `start(i)` on."""

    numerator: int
    denominator: int
    shift: int
    count: int
    result: int

    def start(self, at: Index) -> Expression:
        """floor(i * numerator / denominator) + shift, so that the window is inside the result."""
        first = indices.floordiv(at * self.numerator, Index(self.denominator)) + self.shift
        return clamp_position(integer(first), Index(self.result - self.count + 1))


@functools.cache
def find_window(r: Resampling) -> Window:
    """Enumerates which results read each source position, and finds the smallest window."""
    if not (r.source.is_constant and r.result.is_constant):
        raise Unsupported("the gradient of an interpolation with dynamic image sizes")
    source, result = r.source.constant, r.result.constant
    if max(source, result) > MAX_WINDOW_POSITIONS:
        raise Unsupported("the gradient of an interpolation of very long dimensions")
    axis = Axis("o", r.result)
    with _disable_current_modes():
        evaluator = StatementEvaluator([axis], {}, {})
        at = integer(indices.from_atom(axis))
        reads = [evaluator.evaluate(r.position(at, k)).expand(result) for k in range(r.count)]
        readers = torch.arange(result)
        first = torch.full([source], result)
        last = torch.full([source], -1)
        for read in reads:
            first = first.scatter_reduce(0, read, readers, "amin")
            last = last.scatter_reduce(0, read, readers, "amax")
        numerator, denominator = result, source
        if r.align_corners and source > 1:
            numerator, denominator = result - 1, source - 1
        guess = torch.arange(source) * numerator // denominator
        is_read = last >= 0
        shift = int((first - guess)[is_read].min())
        count = int((last - guess - shift)[is_read].max()) + 1
    return Window(numerator, denominator, shift, min(count, result), result)


def make_gradient_taps(ctx: LoweringContext, name: str, r: Resampling) -> AxisTaps:
    """For every source position, the results that read it, and with which weights."""
    if r.is_copy:
        return IDENTITY
    window = find_window(r)
    lookup = add_position_table(
        ctx, f"{name}_start", r.source, r.result - window.count + 1, window.start
    )

    def reads(at: Index, tap: Index) -> list[tuple[Expression, Expression]]:
        """For each tap of the result: whether it reads position `at`, and its weight."""
        reader = add(window.start(at), integer(tap))
        weights = [r.weight(reader, k) if r.count > 1 else None for k in range(r.count)]
        return [
            (apply("eq", r.position(reader, k), integer(at)), weight or Constant(1.0, r.dtype))
            for k, weight in enumerate(weights)
        ]

    def weight(at: Index, tap: Index) -> Expression:
        parts = [where(is_read, w, constant_like(0, w)) for is_read, w in reads(at, tap)]
        return functools.reduce(add, parts)

    def is_used(at: Index, tap: Index) -> Expression:
        return functools.reduce(_or, (is_read for is_read, _ in reads(at, tap)))

    return AxisTaps(
        window.count, lambda at, tap: lookup(at) + tap, weight if r.count > 1 else None, is_used
    )


def _or(a: Expression, b: Expression) -> Expression:
    return apply("or", a, b)


def make_gradient_lowering(mode: str) -> Callable[..., TensorValue]:
    def lower(
        ctx: LoweringContext,
        node: Node,
        grad_output: Any,
        output_size: Any = None,
        input_size: Any = None,
        align_corners: bool = False,
        **options: Any,
    ) -> TensorValue:
        grad = ctx.get_value(grad_output)
        source = [size_to_index(size) for size in fake_value(node).shape]
        resamplings = _describe(node, mode, source[2:], grad.sizes[2:], align_corners, options)
        taps = [make_gradient_taps(ctx, f"{node.name}_d{d}", r) for d, r in enumerate(resamplings)]
        return lower_taps(ctx, node, grad, taps)

    return lower


INTERPOLATE_LOWERINGS: dict[str, Callable[..., Any]] = {
    f"{op}{suffix}": make(mode)
    for ops, mode in (
        (("upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"), "nearest"),
        (
            (
                "_upsample_nearest_exact1d",
                "_upsample_nearest_exact2d",
                "_upsample_nearest_exact3d",
            ),
            "nearest_exact",
        ),
        (("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), "linear"),
        (("upsample_bicubic2d",), "cubic"),
    )
    for op in ops
    for suffix, make in (("", make_upsample_lowering), ("_backward", make_gradient_lowering))
}
