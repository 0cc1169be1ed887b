"""A fused region as something to call: arguments in, a tuple of results out, one call into C++.

In: a region of the IR with its kernels' texts. Out: `FusedRegion`. Its `__call__` is a straight Python
function written for this region: it takes addresses, allocates results, packs them into one array of
integers and calls the library. Nothing is looked up at run time.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from fulgurite import device, replay
from fulgurite.config import environment
from fulgurite.errors import FusionError
from fulgurite.fuser.codegen.cpp.translation_unit import Unit
from fulgurite.fuser.frontend.random import SEED, draw_seed
from fulgurite.fuser.ir.index import Index, Quotient, Remainder, Symbol, product
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.fuser.runtime.kernel import Kernel, Library
from fulgurite.fuser.runtime.memory_pool import Lifetime, allocate, empty_strided, is_small, plan


def python_index(index: Index) -> str:
    """An index over symbols as Python text."""
    parts = []
    for monomial, coefficient in index.terms:
        factors = [str(coefficient)]
        for atom in monomial:
            if isinstance(atom, Quotient | Remainder):
                sign = "//" if isinstance(atom, Quotient) else "%"
                top, bottom = python_index(atom.numerator), python_index(atom.denominator)
                factors.append(f"(({top}) {sign} ({bottom}))")
            else:
                factors.append(str(atom))
        parts.append("*".join(factors))
    return " + ".join([*parts, str(index.constant)])


def symbol_sources(region: Region) -> dict[str, str]:
    """Python text that finds each symbol in the arguments."""
    found: dict[str, str] = {SEED.name: "draw_seed()"}

    def look(what: Index, text: str) -> None:
        if len(what.terms) != 1:
            return
        monomial, coefficient = what.terms[0]
        if len(monomial) == 1 and isinstance(monomial[0], Symbol) and coefficient > 0:
            less = f"({text} - {what.constant})" if what.constant else text
            found.setdefault(
                monomial[0].name, less if coefficient == 1 else f"{less} // {coefficient}"
            )

    for position, argument in enumerate(region.arguments):
        if isinstance(argument, Index):
            look(argument, f"a{position}")
    for position, argument in enumerate(region.arguments):
        if isinstance(argument, Tensor):
            for dim, size in enumerate(argument.sizes):
                look(size, f"a{position}.shape[{dim}]")
            for dim, stride in enumerate(argument.strides):
                look(stride, f"a{position}.stride({dim})")
    return found


class FusedRegion:
    """Calls the kernels of one region."""

    def __init__(
        self, region: Region, unit: Unit, kernels: tuple[Kernel, ...], library: Library | None
    ) -> None:
        self.region = region
        self.kernels = kernels
        self.unit = unit
        self.source = unit.text
        self.launcher = ""
        self._library = library
        self._call = self._first if library else self._prepare(None)

    def wait(self) -> None:
        """Until the compiler is done and the first call costs no more than any other."""
        if self._library is not None:
            self._call = self._prepare(self._library())

    def _first(self, *arguments: Any) -> tuple[Any, ...]:
        """The first call waits for the compiler, which has been at work since the region was lowered."""
        self.wait()
        return self._call(*arguments)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        return self._call(*arguments)

    @property
    def prepared(self) -> Callable[..., tuple[Any, ...]] | None:
        """The function that a call comes down to, once there is one."""
        return None if self._call == self._first else self._call

    def _prepare(self, library: ctypes.CDLL | None) -> Callable[..., tuple[Any, ...]]:
        scope: dict[str, Any] = {
            "as_strided": torch.as_strided,
            "view_as_real": torch.view_as_real,
            "view_as_complex": torch.view_as_complex,
            "allocate": allocate,
            "empty": empty_strided,
            "restride": restride,
            "draw_seed": draw_seed,
            "threads": _thread_count(),
        }
        if library is not None:
            name = " ".join(kernel.name for kernel in self.kernels)
            scope["run"] = replay.Kernel(library, "run", name, _problem).__call__
            scope["pack"] = struct.Struct(f"{len(self.unit.slots) + 1}q").pack
        self.launcher = self._text(scope)
        exec(compile(self.launcher, "<fused region>", "exec"), scope)  # our own text
        return scope["fused"]  # type: ignore[no-any-return]

    def _text(self, scope: dict[str, Any]) -> str:
        """The launcher: a function of the region's arguments."""
        region, unit = self.region, self.unit
        lines = [f"def fused({', '.join(f'a{k}' for k in range(len(region.arguments)))}):"]
        self._arguments(lines)
        address: dict[str, str] = {}
        for position, argument in enumerate(region.arguments):
            if isinstance(argument, Tensor) and argument.name in unit.slots:
                self._checked(lines, position, argument)
                address[argument.name] = f"a{position}.data_ptr()"
        order = {s.name: k for k, s in enumerate(region.statements)}
        made = self._made()
        held: dict[str, str] = {}
        shared = self._temporaries(made)
        places, total = plan(list(shared.values()))
        if total:
            scope["uint8"] = torch.uint8
            lines.append(
                f"    arena = allocate(({total},), (1,), uint8)  # of {len(shared)} values"
            )
            lines.append("    base = arena.data_ptr()")
        address.update({n: f"base + {place}" for n, place in zip(shared, places, strict=True)})
        for number, name in enumerate(sorted(made - set(shared), key=order.__getitem__)):
            tensor = region.tensors[name]
            whole = self._whole_output(name)
            layout = (tensor.sizes, tensor.strides) if whole is None else whole
            sizes, strides = (tuple_text([python_index(n) for n in part]) for part in layout)
            scope[f"dtype{number}"] = tensor.dtype
            make = "empty" if is_small(layout[0], layout[1], tensor.dtype) else "allocate"
            lines.append(f"    t{number} = {make}({sizes}, {strides}, dtype{number})")
            held[name] = f"t{number}"
            address[name] = f"t{number}.data_ptr()"
        if unit.slots:
            given = [address.get(name, name) for name in unit.slots]
            results = tuple_text(list(held.values()))  # a recording holds them
            lines.append(f"    run(pack({', '.join([*given, 'threads()'])}), {results})")
        self._writes(lines, held)
        lines.append(f"    return {tuple_text([self._result(o, held) for o in region.outputs])}")
        return "\n".join(lines) + "\n"

    def _arguments(self, lines: list[str]) -> None:
        """Complex arguments as real ones, and the sizes that arguments have."""
        for position, argument in enumerate(self.region.arguments):
            if isinstance(argument, Tensor) and argument.pairs:
                lines.append(f"    a{position} = view_as_real(a{position}.resolve_conj())")
        sources = symbol_sources(self.region)
        for name in sorted(self._symbols()):
            if name not in sources:
                raise FusionError(
                    f"the size {name} can't be found in the arguments of a fused region",
                    next="report this: the region's inputs have it only inside a larger expression",
                )
            lines.append(f"    {name} = {sources[name]}")

    @property
    def overwritten(self) -> tuple[int, ...]:
        """The arguments that results are stored in."""
        named = [a.name if isinstance(a, Tensor) else None for a in self.region.arguments]
        return tuple(k for k, name in enumerate(named) if name in self.region.lent)

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may hold it: a seed that the host draws would never change in a replay."""
        return SEED.name not in self._symbols()

    def _temporaries(self, made: set[str]) -> dict[str, Lifetime]:
        """Values of known size that live only between kernels of one call."""
        found: dict[str, Lifetime] = {}
        for name in sorted(made - self.region.results):
            tensor = self.region.tensors[name]
            layout = (*tensor.sizes, *tensor.strides)
            if not all(n.is_constant for n in layout):
                continue
            reach = 1
            for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
                reach += (size.constant - 1) * stride.constant
            kernels = self.unit.kernels
            uses = [k for k, part in enumerate(kernels) if name in (*part.reads, *part.writes)]
            found[name] = Lifetime(min(uses), max(uses), max(reach, 1) * tensor.itemsize)
        return found

    def _symbols(self) -> set[str]:
        region, found = self.region, set()
        for k in self.unit.kernels:
            found |= {symbol.name for symbol in k.symbols}
        wanted: list[Index] = []
        made = self._made()
        for tensor in region.tensors.values():
            if tensor.name in made:
                wanted += [*tensor.sizes, *tensor.strides]
        for argument in region.inputs:
            if argument.name in self.unit.slots:
                wanted += argument.strides
        for output in region.outputs:
            wanted += [*output.sizes, *output.strides, output.offset]
            if output.size is not None:
                wanted.append(output.size)
        for index in wanted:
            found |= {symbol.name for symbol in index.symbols()}
        return found

    def _whole_output(self, name: str) -> tuple[Any, Any] | None:
        """Sizes and strides of a result that is all of a statement's memory, or of a lent argument's."""
        lent = [a for a in self.region.inputs if a.name == name]
        if lent:
            return (lent[0].sizes, lent[0].strides) if name in self.region.lent else None
        tensor = self.region.tensors[name]
        for output in self.region.outputs:
            if output.name == name and output.offset == 0:
                if product(output.sizes) == product(tensor.sizes):
                    return output.sizes, output.strides
        return None

    def _checked(self, lines: list[str], position: int, tensor: Tensor) -> None:
        """An argument whose strides are not the promised ones is laid out again."""
        want = tuple_text([python_index(stride) for stride in tensor.strides])
        if tensor.name in {target for _, target in self.region.writes}:
            lines.append(f"    w{position} = a{position}")
        lines.append(f"    if a{position}.stride() != {want}:")
        lines.append(f"        a{position} = restride(a{position}, {want})")

    def _made(self) -> set[str]:
        """What kernels write, without the arguments that they write to, and results of no elements."""
        written = self._stored() - {argument.name for argument in self.region.inputs}
        nothing = {s.name for s in self.region.statements if s.tensor.is_empty}
        return written | (nothing & self.region.results)

    def _stored(self) -> set[str]:
        return {name for kernel in self.unit.kernels for name in kernel.writes}

    def _writes(self, lines: list[str], held: dict[str, str]) -> None:
        """Copies to arguments what no kernel could store there, and what it stored into a copy of one."""
        names = [a.name if isinstance(a, Tensor) else None for a in self.region.arguments]
        for name, target in self.region.writes:
            k = names.index(target)
            argument = self.region.arguments[k]
            assert isinstance(argument, Tensor), f"{target} is written to and not a tensor"
            given = f"w{k}" if target in self.unit.slots else f"a{k}"
            if target in self._stored():
                lines.append(f"    if {given} is not a{k}:")
                lines.append(f"        {given}.copy_(a{k})")
            else:
                strides = tuple_text([python_index(stride) for stride in argument.strides])
                lines.append(f"    {given}.copy_(as_strided({held[name]}, a{k}.shape, {strides}))")

    def _result(self, output: Any, held: dict[str, str]) -> str:
        text = self._real_result(output, held)
        return f"view_as_complex({text})" if output.pairs else text

    def _real_result(self, output: Any, held: dict[str, str]) -> str:
        if output.size is not None:
            return python_index(output.size)
        if output.name is None:
            return "None"
        base = held.get(output.name)
        if base is None:
            names = [a.name if isinstance(a, Tensor) else None for a in self.region.arguments]
            base = f"a{names.index(output.name)}"
        whole = self._whole_output(output.name)
        if whole == (output.sizes, output.strides):
            same = [o for o in self.region.outputs if o.name == output.name and o.offset == 0]
            if output is next(o for o in same if (o.sizes, o.strides) == whole):
                return base  # the others are views of it, and so is a view of an argument
        sizes = tuple_text([python_index(size) for size in output.sizes])
        strides = tuple_text([python_index(stride) for stride in output.strides])
        offset = python_index(output.offset)
        return f"as_strided({base}, {sizes}, {strides}, {base}.storage_offset() + {offset})"


def _thread_count() -> Callable[[], int]:
    """Asked at every call: torch's number, or the one the environment sets."""
    if environment("FULGURITE_THREADS") is None:
        return torch.get_num_threads
    number = device.cpu_threads()
    return lambda: number


def tuple_text(parts: list[str]) -> str:
    return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def restride(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """A copy with other strides; for sizes of 1 and empty tensors the strides mean nothing."""
    same = all(
        have == want or size == 1
        for size, have, want in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )
    if same or tensor.numel() == 0:
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _problem(status: int) -> Exception:
    """What a kernel reports, as torch says it."""
    if status == 2:
        return RuntimeError("ZeroDivisionError")
    return IndexError("index out of range in a fused gather, index or embedding")
