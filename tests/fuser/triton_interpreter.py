"""Patches for Triton's interpreter: libdevice functions, fast reductions, correct conversions.

`patch()` is called in a process that was started with TRITON_INTERPRET=1, before any kernel runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import torch

UNARY = (
    "exp expm1 log10 log1p tanh erfc tan asin acos atan sinh cosh asinh acosh atanh lgamma trunc"
).split()
BINARY = "fmod atan2 hypot pow copysign nextafter".split()


def accumulation_dtype(data: Any) -> Any:
    """float64 for floats: a GPU adds in a tree, NumPy often sequentially."""
    return numpy.float64 if data.dtype.kind == "f" else data.dtype


@functools.cache
def patch() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    from fulgurite.fuser.codegen.triton import device_functions

    warnings.filterwarnings("ignore", category=RuntimeWarning)  # of NumPy, for NaN and infinity

    def elementwise(function: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        def call(*arguments: Any, **_: Any) -> Any:
            dtype = arguments[-1].dtype.scalar
            kind = arguments[-1].handle.data.dtype
            given = [a if isinstance(a, float) else a.handle.data for a in arguments]
            data = [torch.from_numpy(numpy.array(a, kind)) for a in given]
            result = function(*torch.broadcast_tensors(*data)).numpy()
            shape = [tl.constexpr(n) for n in result.shape]
            block = shape and any(not isinstance(a, float) and a.type.is_block() for a in arguments)
            kind = tl.core.block_type(dtype, shape) if block else dtype
            return tl.core.tensor(interpreter.TensorHandle(result, dtype), kind)

        return call

    for name in (*UNARY, *BINARY):
        setattr(libdevice, name, elementwise(getattr(torch, name)))
    libdevice.rint = elementwise(torch.round)
    libdevice.fast_expf = elementwise(torch.exp)
    libdevice.fast_dividef = elementwise(torch.div)

    float8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}
    original_convert = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """As GPUs do: rounds to even and saturates, knows inf and NaN of float8."""
        if source in float8 and target == tl.float32:
            codes = torch.from_numpy(numpy.array(data).view(numpy.uint8))
            return codes.view(float8[source]).float().numpy()
        if source == tl.float32 and target in float8:
            largest = torch.finfo(float8[target]).max
            values = torch.from_numpy(numpy.array(data).view(numpy.float32)).clamp(
                -largest, largest
            )
            return values.to(float8[target]).view(torch.uint8).numpy()
        if source == tl.float32 and target == tl.bfloat16:
            values = torch.from_numpy(numpy.array(data).view(numpy.float32))
            return values.to(torch.bfloat16).view(torch.uint16).numpy()
        if source == tl.bfloat16 and target == tl.float32:  # also denormals
            return (numpy.array(data).view(numpy.uint16).astype(numpy.uint32) << 16).view(
                numpy.float32
            )
        return original_convert(data, source, target, rounding)

    interpreter._convert_float = convert

    builder = interpreter.InterpreterBuilder

    def as_bools(handle: Any) -> Any:
        """The interpreter keeps comparisons of scalars in the type of their operands."""
        return interpreter.TensorHandle(numpy.asarray(handle.data).astype(bool), tl.int1)

    load, store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self: Any, at: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, at, as_bools(mask), *rest, **named)

    def create_masked_store(
        self: Any, at: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        return store(self, at, value, as_bools(mask), *rest, **named)

    emulate_triton_3_6(tl)

    def create_assert(self: Any, condition: Any, message: str) -> None:
        """A failed check of an index, as launchers report it; the interpreter tests the handle itself."""
        if not numpy.asarray(condition.data).all():
            raise IndexError(message)

    builder.create_assert = create_assert
    # without `debug` kernels have no asserts; integers overflow in hashes
    options = replace(interpreter.interpreter_builder.options, debug=True, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options

    builder.create_masked_load, builder.create_masked_store = (
        create_masked_load,
        create_masked_store,
    )

    def on_bools(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, a: Any, b: Any) -> Any:
            floats = a.data.dtype.kind == "f" or b.data.dtype.kind == "f"
            if floats:
                return original(self, as_bools(a), as_bools(b))
            return original(self, a, b)

        return call

    for name in ("create_and", "create_or", "create_xor"):
        setattr(builder, name, on_bools(getattr(builder, name)))
    original_fmul = builder.create_fmul

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        """LLVM turns a product with -1 into a negation, which also flips the sign of NaN."""
        return self.create_fneg(b) if (a.data == -1.0).all() else original_fmul(self, a, b)

    builder.create_fmul = create_fmul

    original_dot = builder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter would multiply the integers that it keeps bfloat16 in."""
        return original_dot(self, widened(a), widened(b), *rest)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    builder.create_dot = dot

    fast_reductions = {
        device_functions.nan_max: numpy.max,
        device_functions.nan_min: numpy.min,
        device_functions.prod_combine: numpy.prod,
        device_functions.logaddexp: numpy.logaddexp.reduce,
    }
    fast_reductions[tl.standard._sum_combine] = lambda data, axis, keepdims: numpy.sum(
        data, axis=axis, keepdims=keepdims, dtype=accumulation_dtype(data)
    )
    fast_reductions[tl.standard._xor_combine] = numpy.bitwise_xor.reduce  # of tl.sort
    original_reduce = interpreter.ReduceOps.apply_impl

    def apply(self: Any, inputs: Any) -> Any:
        function = fast_reductions.get(self.combine_fn)
        if function is None:
            return original_reduce(self, inputs)
        data = inputs[0].handle.data
        result = function(data, axis=self.axis, keepdims=self.keep_dims).astype(data.dtype)
        return self.to_tensor(result, inputs[0].dtype)

    interpreter.ReduceOps.apply_impl = apply

    fast_scans = {
        device_functions.nan_max: numpy.maximum.accumulate,
        device_functions.nan_min: numpy.minimum.accumulate,
        device_functions.prod_combine: numpy.multiply.accumulate,
        device_functions.logaddexp: lambda data, axis: numpy.logaddexp.accumulate(
            data.astype(accumulation_dtype(data)), axis=axis
        ),
    }
    fast_scans[tl.standard._sum_combine] = lambda data, axis: data.cumsum(
        axis, dtype=accumulation_dtype(data)
    )
    original_scan = interpreter.ScanOps.apply_impl

    def apply_scan(self: Any, inputs: Any) -> Any:
        function = fast_scans.get(self.combine_fn)
        if function is None:
            return original_scan(self, inputs)
        data = inputs[0].handle.data
        return (self.to_tensor(function(data, axis=self.axis).astype(data.dtype), inputs[0].dtype),)

    interpreter.ScanOps.apply_impl = apply_scan


def emulate_triton_3_6(tl: Any) -> None:
    """Makes later versions behave like the oldest supported one.

    Negation subtracts from 0, literals of tl.maximum are float32, and stores don't convert.
    """
    from triton.language.semantic import TritonSemantic as Semantic

    def minus(self: Any, x: Any) -> Any:
        zero = self.builder.get_null_value(x.type.scalar.to_ir(self.builder))
        return self.sub(tl.core.tensor(zero, x.type.scalar), x, True)

    def with_tensors(newer: Callable[..., Any]) -> Callable[..., Any]:
        def older(self: Any, x: Any, y: Any, *rest: Any) -> Any:
            return newer(self, self.to_tensor(x), self.to_tensor(y), *rest)

        return older

    original_store = Semantic.store

    def store(self: Any, at: Any, value: Any, *rest: Any) -> Any:
        """A store may round floats and truncate integers; its other conversions differ from torch's."""
        have, want = value.type.scalar, at.type.scalar.element_ty
        rounds = have == tl.float32 and want.is_floating()
        truncates = have.is_int() and want.is_int() and want != tl.int1
        is_bool = have.is_int() and numpy.isin(value.handle.data, (0, 1)).all()
        allowed = have == want or rounds or truncates or is_bool
        assert allowed, f"a store converts {have} to {want}"
        return original_store(self, at, value, *rest)

    Semantic.minus, Semantic.store = minus, store
    Semantic.maximum, Semantic.minimum = (
        with_tensors(Semantic.maximum),
        with_tensors(Semantic.minimum),
    )
