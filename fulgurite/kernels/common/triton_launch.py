"""Cached kernel launches: `@triton.jit` kernels whose repeated launches skip Triton's host code.

    @cached_launch                              instead of @triton.jit, for launched kernels
    kernel[grid](x, 7, BLOCK=64, num_warps=4)   as always

In: a kernel function. Out: a kernel that is launched like any Triton kernel. Triton binds,
specializes and looks up the compiled kernel at every launch, which takes longer than many kernels
run. Here the first launch's compiled kernel is cached, and later launches pass raw addresses and
numbers to its launcher. The key is everything that Triton compiles a kernel for:

    constants     launch options and `tl.constexpr` arguments, with their names and positions
    dtypes        of the tensors
    alignment     which addresses are multiples of 16
    integers      by Triton's specialization classes: 1, multiples of 16, others, beyond 32 bits

A launch with other argument types (tensor descriptors, tensor subclasses) or with a callable grid
goes through Triton. Cached launches call no Triton launch hooks. In Triton's interpreter, and on
AMD GPUs, where Triton also specializes on tensor sizes, `cached_launch` is `triton.jit`. Inside
`compile_ahead` a launch compiles its kernel and does not run it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulgurite.kernels.common.compile_ahead import COMPILE_AHEAD
from fulgurite.kernels.common.native_plan import find_parameter_types
from fulgurite.kernels.common.triton_import import HAS_TRITON, INTERPRETED, triton
from fulgurite.kernels.registry import RECORDING

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
Args = tuple[Any, ...]
POINTERS = (Tensor, nn.Parameter)
SCALARS = (int, float, bool, type(None))
INT32_LIMIT = 1 << 31
MAX_RECENT_LAUNCHES = 512  # of a signature; lengths of sequences change all the time


class CompiledLaunch(NamedTuple):
    """A compiled kernel: launcher, handle, metadata, and the constants after the arguments."""

    run: Callable[..., None]
    function: int
    packed_metadata: Any
    constants: Args
    types: Sequence[str] | None  # Triton's type of each parameter


class CallSignature(NamedTuple):
    """How a call with certain argument types and names is keyed: which arguments are what."""

    tensor_positions: tuple[int, ...]
    select_tensors: Callable[[Args], Args]
    select_integers: Callable[[Args], Args]
    select_constants: Callable[[Args], Args]
    launches: dict[Args, CompiledLaunch]
    recent: dict[Args, CompiledLaunch]  # by the integers themselves: their classes take 2 µs


class CachedKernel(triton.JITFunction):  # type: ignore[misc]
    """A Triton kernel with a cache of compiled launches."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self.signatures: dict[Args, CallSignature | None] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return lambda *args, **named: self._launch(grid, args, named)

    def _launch(self, grid: Grid, args: Args, named: dict[str, Any]) -> None:
        if COMPILE_AHEAD.is_active:
            self._run_uncached(grid, args, named)
            return
        values = (*args, *named.values())
        types = (*map(type, values), *named)
        signature = self.signatures.get(types, _UNKNOWN)
        if signature is _UNKNOWN:
            signature = self.signatures[types] = self._build_signature(args, named)
        if signature is None or callable(grid):
            self._run_uncached(grid, args, named)
            return
        device = current_device()
        tensors, integers = signature.select_tensors(values), signature.select_integers(values)
        addresses = [tensor.data_ptr() for tensor in tensors]
        constants = signature.select_constants(values)
        types_key = (device, constants, *[tensor.dtype for tensor in tensors])
        recent_key = (types_key, _alignment_key(addresses), integers)
        compiled = signature.recent.get(recent_key)
        if compiled is None:
            key = (types_key, recent_key[1], _integer_key(integers))
            compiled = signature.launches.get(key)
            if compiled is None:
                kernel = self._run_uncached(grid, args, named)
                signature.launches[key] = self._compiled_launch(kernel, len(args), named)
                return
            if len(signature.recent) >= MAX_RECENT_LAUNCHES:
                signature.recent.clear()
            signature.recent[recent_key] = compiled
        raw = list(args)
        for position, address in zip(signature.tensor_positions, addresses, strict=True):
            raw[position] = address
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run, function, metadata, constants, types = compiled
        run(x, y, z, current_stream(device), function, metadata, None, None, None, *raw, *constants)
        if RECORDING.recorder is not None:
            tail = (function, metadata, None, None, None)
            given = list(zip(signature.tensor_positions, tensors, strict=True))
            RECORDING.recorder.add_launch(run, (x, y, z), tail, [*raw, *constants], given, types)

    def _run_uncached(self, grid: Grid, args: Args, named: dict[str, Any]) -> Any:
        if RECORDING.recorder is not None:
            RECORDING.recorder.fail()
        return self.run(*args, grid=grid, warmup=COMPILE_AHEAD.is_active, **named)

    def _build_signature(self, args: Args, named: dict[str, Any]) -> CallSignature | None:
        """None where an argument can't be part of a cache key."""
        integers: list[int] = []
        tensors, constants = [], list(range(len(args), len(args) + len(named)))
        for position, (parameter, value) in enumerate(zip(self.params, args, strict=False)):
            if parameter.is_constexpr:
                constants.append(position)
            elif type(value) in POINTERS:
                tensors.append(position)
            elif type(value) in SCALARS:
                (integers if type(value) is int else []).append(position)
            else:
                return None
        if any(not p.is_constexpr for p in self.params[len(args) :]):
            return None
        select_constants = _select(constants)
        if not all(_is_hashable(value) for value in select_constants((*args, *named.values()))):
            return None
        return CallSignature(
            tuple(tensors), _select(tensors), _select(integers), select_constants, {}, {}
        )

    def _compiled_launch(self, kernel: Any, count: int, named: dict[str, Any]) -> CompiledLaunch:
        constants = (named.get(p.name, p.default) for p in self.params[count:])
        types = find_parameter_types(kernel)
        return CompiledLaunch(
            kernel.run, kernel.function, kernel.packed_metadata, tuple(constants), types
        )


def cached_launch(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorate a Triton kernel; `options` are those of `triton.jit`."""
    if function is None:
        return partial(cached_launch, **options)
    plain = not HAS_TRITON or INTERPRETED or torch.version.hip
    return (triton.jit if plain else CachedKernel)(function, **options)


_UNKNOWN: Any = object()


def current_device() -> int:
    return torch._C._cuda_getDevice()


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _alignment_key(addresses: list[int]) -> tuple[bool, ...]:
    """Which addresses are multiples of 16; empty where all are, the common case."""
    bits = 0
    for address in addresses:
        bits |= address
    return tuple([not address & 15 for address in addresses]) if bits & 15 else ()


def _integer_key(integers: Args) -> Args:
    """Triton's specialization class of each integer; the integers themselves beyond 32 bits."""
    if integers and (max(integers) >= INT32_LIMIT or min(integers) < -INT32_LIMIT):
        return integers
    return tuple([1 if number == 1 else 0 if number & 15 else 16 for number in integers])


def _select(positions: Sequence[int]) -> Callable[[Args], Args]:
    """A function that returns the arguments at these positions."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    if not positions:
        return lambda values: ()
    only = positions[0]
    return lambda values: (values[only],)


def _is_hashable(value: Any) -> bool:
    return value.__hash__ is not None
