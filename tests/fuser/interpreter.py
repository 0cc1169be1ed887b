"""Triton's interpreter, with what it lacks: libdevice functions and quick reductions of our own.

`patch()` is called once in a process that was started with TRITON_INTERPRET=1, before any kernel runs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch

UNARY = (
    "exp expm1 log10 log1p tanh erfc tan asin acos atan sinh cosh asinh acosh atanh lgamma trunc"
).split()
BINARY = "fmod atan2 hypot pow copysign nextafter".split()


def wider(data: Any) -> Any:
    return numpy.float64 if data.dtype.kind == "f" else data.dtype


@functools.cache
def patch() -> None:
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    from fulgurite.fuser.codegen.triton import device_functions

    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, of NaN and infinity

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
    rough = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        """The interpreter rounds wrongly and knows no inf or NaN of float8; GPUs round to even, and saturate."""
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
        if source == tl.bfloat16 and target == tl.float32:  # denormals too
            return (numpy.array(data).view(numpy.uint16).astype(numpy.uint32) << 16).view(
                numpy.float32
            )
        return rough(data, source, target, rounding)

    interpreter._convert_float = convert

    builder = interpreter.InterpreterBuilder

    def as_bools(handle: Any) -> Any:
        """What comparisons of single numbers give is kept as a number of the type they have."""
        return interpreter.TensorHandle(numpy.asarray(handle.data).astype(bool), tl.int1)

    load, store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self: Any, at: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, at, as_bools(mask), *rest, **named)

    def create_masked_store(
        self: Any, at: Any, value: Any, mask: Any, *rest: Any, **named: Any
    ) -> Any:
        return store(self, at, value, as_bools(mask), *rest, **named)

    as_first_supported(tl)

    builder.create_masked_load, builder.create_masked_store = (
        create_masked_load,
        create_masked_store,
    )

    def of_bools(both: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, a: Any, b: Any) -> Any:
            floats = a.data.dtype.kind == "f" or b.data.dtype.kind == "f"
            return both(self, as_bools(a), as_bools(b)) if floats else both(self, a, b)

        return call

    for name in ("create_and", "create_or", "create_xor"):
        setattr(builder, name, of_bools(getattr(builder, name)))
    times = builder.create_fmul

    def create_fmul(self: Any, a: Any, b: Any) -> Any:
        """LLVM makes a change of sign of a product with -1, which NaN has, too."""
        return self.create_fneg(b) if (a.data == -1.0).all() else times(self, a, b)

    builder.create_fmul = create_fmul

    bits_dot = builder.create_dot

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """The interpreter takes bfloat16 for the integers that it keeps them in."""
        return bits_dot(self, widened(a), widened(b), *rest)

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        wide = (handle.data.astype(numpy.uint32) << 16).view(numpy.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    builder.create_dot = dot

    quick = {
        device_functions.nan_max: numpy.max,
        device_functions.nan_min: numpy.min,
        device_functions.product: numpy.prod,
        device_functions.log_add_exp: numpy.logaddexp.reduce,
    }
    # sums in double: a GPU adds in a tree, numpy often one after the other
    quick[tl.standard._sum_combine] = lambda data, axis, keepdims: numpy.sum(
        data, axis=axis, keepdims=keepdims, dtype=wider(data)
    )
    slow = interpreter.ReduceOps.apply_impl

    def apply(self: Any, inputs: Any) -> Any:
        function = quick.get(self.combine_fn)
        if function is None:
            return slow(self, inputs)
        data = inputs[0].handle.data
        result = function(data, axis=self.axis, keepdims=self.keep_dims).astype(data.dtype)
        return self.to_tensor(result, inputs[0].dtype)

    interpreter.ReduceOps.apply_impl = apply

    running = {
        device_functions.nan_max: numpy.maximum.accumulate,
        device_functions.nan_min: numpy.minimum.accumulate,
        device_functions.product: numpy.multiply.accumulate,
        device_functions.log_add_exp: lambda data, axis: numpy.logaddexp.accumulate(
            data.astype(wider(data)), axis=axis
        ),
    }
    running[tl.standard._sum_combine] = lambda data, axis: data.cumsum(axis, dtype=wider(data))
    slow_scan = interpreter.ScanOps.apply_impl

    def apply_scan(self: Any, inputs: Any) -> Any:
        function = running.get(self.combine_fn)
        if function is None:
            return slow_scan(self, inputs)
        data = inputs[0].handle.data
        return (self.to_tensor(function(data, axis=self.axis).astype(data.dtype), inputs[0].dtype),)

    interpreter.ScanOps.apply_impl = apply_scan


def as_first_supported(tl: Any) -> None:
    """Triton 3.9 as 3.6 is: minus subtracts from 0, literals of extremes are float32; stores don't convert."""
    from triton.language.semantic import TritonSemantic as Semantic

    def minus(self: Any, x: Any) -> Any:
        zero = self.builder.get_null_value(x.type.scalar.to_ir(self.builder))
        return self.sub(tl.core.tensor(zero, x.type.scalar), x, True)

    def extreme(newer: Callable[..., Any]) -> Callable[..., Any]:
        def older(self: Any, x: Any, y: Any, *rest: Any) -> Any:
            return newer(self, self.to_tensor(x), self.to_tensor(y), *rest)

        return older

    converting = Semantic.store

    def store(self: Any, at: Any, value: Any, *rest: Any) -> Any:
        """Floats may be rounded and integers cut on the way to memory; other conversions there are not torch's."""
        have, want = value.type.scalar, at.type.scalar.element_ty
        rounded = have == tl.float32 and want.is_floating()
        cut = have.is_int() and want.is_int() and want != tl.int1
        truth = have.is_int() and numpy.isin(value.handle.data, (0, 1)).all()
        assert have == want or rounded or cut or truth, f"a store makes {want} of {have}"
        return converting(self, at, value, *rest)

    Semantic.minus, Semantic.store = minus, store
    Semantic.maximum, Semantic.minimum = extreme(Semantic.maximum), extreme(Semantic.minimum)
