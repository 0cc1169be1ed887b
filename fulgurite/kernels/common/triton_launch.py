# mypy: allow-untyped-defs, allow-incomplete-defs
"""Launches that are prepared once: kernels as ever, called with addresses from the second time on.

    @prepared                               instead of @triton.jit, for kernels (not for what they call)
    kernel[grid](x, 7, BLOCK=64, num_warps=4)

In: a kernel's function. Out: a kernel that is launched as Triton's are. Triton binds, specialises and looks up
with every launch, which takes longer than many kernels run. Here the compiled kernel that a first launch gave is kept
by all that it was compiled for, and later ones hand their numbers straight to its launcher:

    constants     the options and `tl.constexpr`s, and where they stand
    dtypes        of the tensors
    alignment     which addresses are multiples of 16
    numbers       whole ones by what Triton tells apart: 1, multiples of 16, those past 32 bits

A launch with anything else among its arguments (descriptors, tensors of a subclass) goes Triton's way, and so
does one whose grid is a function. Kept launches call none of Triton's launch hooks. In Triton's interpreter and on AMD's
GPUs, whose kernels are also compiled for how large tensors are, a kernel is Triton's own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

Grid = tuple[int, ...] | Callable[[dict[str, Any]], tuple[int, ...]]
Given = tuple[Any, ...]
POINTERS = (Tensor, nn.Parameter)
PLAIN = (int, float, bool, type(None))
BEYOND = 1 << 31  # numbers that take 64 bits


class Launch(NamedTuple):
    """A compiled kernel: what runs it, its handle, its metadata, and the constants behind its arguments."""

    run: Callable[..., None]
    function: int
    packed: Any
    constants: Given


class Form(NamedTuple):
    """Arguments of certain types and names: which are tensors, which whole numbers, which constants."""

    places: tuple[int, ...]  # of the tensors
    tensors: Callable[[Given], Given]
    numbers: Callable[[Given], Given]
    constants: Callable[[Given], Given]
    launches: dict[Given, Launch]


class Prepared(triton.JITFunction):  # type: ignore[misc]
    """A kernel whose launches are kept."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        super().__init__(function, **options)
        self.forms: dict[Given, Form | None] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return lambda *args, **named: self._launch(grid, args, named)

    def _launch(self, grid: Grid, args: Given, named: dict[str, Any]) -> None:
        given = (*args, *named.values())
        kind = (*map(type, given), *named)
        form = self.forms.get(kind, _UNSEEN)
        if form is _UNSEEN:
            form = self.forms[kind] = self._form(args, named)
        if form is None or callable(grid):
            self.run(*args, grid=grid, warmup=False, **named)
            return
        device = current_device()
        tensors, numbers = form.tensors(given), form.numbers(given)
        addresses = [tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            *form.constants(given),
            *[tensor.dtype for tensor in tensors],
            *_alignments(addresses),
            *_classes(numbers),
        )
        found = form.launches.get(key)
        if found is None:
            kernel = self.run(*args, grid=grid, warmup=False, **named)
            form.launches[key] = self._kept(kernel, len(args), named)
            return
        values = list(args)
        for place, address in zip(form.places, addresses, strict=True):
            values[place] = address
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        run, function, packed, constants = found
        run(
            x, y, z, current_stream(device), function, packed, None, None, None, *values, *constants
        )

    def _form(self, args: Given, named: dict[str, Any]) -> Form | None:
        """None where some argument is nothing that a launch can be kept by."""
        numbers: list[int] = []
        places, constants = [], list(range(len(args), len(args) + len(named)))
        for place, (parameter, value) in enumerate(zip(self.params, args, strict=False)):
            if parameter.is_constexpr:
                constants.append(place)
            elif type(value) in POINTERS:
                places.append(place)
            elif type(value) in PLAIN:
                (numbers if type(value) is int else []).append(place)
            else:
                return None
        if any(not p.is_constexpr for p in self.params[len(args) :]):
            return None
        constant = _take(constants)
        if not all(_is_hashable(value) for value in constant((*args, *named.values()))):
            return None
        return Form(tuple(places), _take(places), _take(numbers), constant, {})

    def _kept(self, kernel: Any, count: int, named: dict[str, Any]) -> Launch:
        constants = (named.get(p.name, p.default) for p in self.params[count:])
        return Launch(kernel.run, kernel.function, kernel.packed_metadata, tuple(constants))


def prepared(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """The kernel of a function; `options` are those of `triton.jit`."""
    if function is None:
        return partial(prepared, **options)
    made = triton.jit if triton.knobs.runtime.interpret or torch.version.hip else Prepared
    return made(function, **options)


_UNSEEN: Any = object()


def current_device() -> int:
    return torch._C._cuda_getDevice()


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def _alignments(addresses: list[int]) -> Sequence[bool]:
    """Which addresses are multiples of 16; of many that all are, one word."""
    if not reduce(operator.or_, addresses, 0) & 15:
        return (True,)
    return [not address & 15 for address in addresses]


def _classes(numbers: Given) -> Given:
    """What Triton compiles a kernel anew for: numbers of 64 bits are told apart one by one."""
    if numbers and (max(numbers) >= BEYOND or min(numbers) < -BEYOND):
        return numbers
    return tuple([1 if number == 1 else 0 if number & 15 else 16 for number in numbers])


def _take(places: Sequence[int]) -> Callable[[Given], Given]:
    """Those of the arguments that stand at these places."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    if not places:
        return lambda given: ()
    only = places[0]
    return lambda given: (given[only],)


def _is_hashable(value: Any) -> bool:
    return value.__hash__ is not None
