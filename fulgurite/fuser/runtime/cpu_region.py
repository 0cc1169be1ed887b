"""A fused region as a callable: arguments in, a tuple of outputs out, one call into C++.

In: a region of the IR with the source of its kernels. Out: `FusedRegion`. Its `__call__` is a Python function that is
generated for this region: it takes addresses, allocates outputs, packs them into one array of integers and calls the
library. Nothing is looked up at run time.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import torch

from fulgurite import device, replay
from fulgurite.config import read_env
from fulgurite.errors import FusionError
from fulgurite.fuser.codegen.cpp.translation_unit import TranslationUnit
from fulgurite.fuser.ir.host_symbols import (
    HOST_SCOPE,
    index_to_python,
    order_definitions,
    solve_for_symbol,
)
from fulgurite.fuser.ir.index import Index, Symbol, product
from fulgurite.fuser.ir.random_seed import SEED, SEED_ADDRESS, draw_seed
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.fuser.runtime.kernel import Kernel, Library
from fulgurite.fuser.runtime.memory_pool import (
    Lifetime,
    allocate,
    assign_offsets,
    empty_strided,
    is_small,
)

LAUNCHER_FILE = "<fused region>"  # file name of generated launchers in tracebacks


def find_symbol_sources(region: Region) -> dict[str, str]:
    """For each symbol that an argument, or a size or stride of one, gives: its Python expression."""
    sources = {SEED.name: "draw_seed()", SEED_ADDRESS.name: "seed_address()"}

    def add_source(size: Index, text: str) -> None:
        solved = solve_for_symbol(size)
        if solved is not None:
            symbol, solve = solved
            sources.setdefault(symbol.name, solve(text))

    for position, argument in enumerate(region.arguments):
        if isinstance(argument, Index):
            add_source(argument, f"a{position}")
    for position, argument in enumerate(region.arguments):
        if isinstance(argument, Tensor):
            for dim, size in enumerate(argument.sizes):
                add_source(size, f"a{position}.shape[{dim}]")
            for dim, stride in enumerate(argument.strides):
                add_source(stride, f"a{position}.stride({dim})")
    return sources


class FusedRegion:
    """Calls the kernels of one region."""

    def __init__(
        self,
        region: Region,
        unit: TranslationUnit,
        kernels: tuple[Kernel, ...],
        library: Library | None,
    ) -> None:
        self.region = region
        self.kernels = kernels
        self.unit = unit
        self.source = unit.text
        self.launcher = ""
        self.reference: Callable[..., Any] | None = (
            None  # the region as torch runs it, for its errors
        )
        self.kernel_address = 0  # of the compiled function, once it is built
        self._first_launch_line = 0  # of the launcher's text; 0: it launches nothing
        self._library = library
        self._call = self._first_call if library else self._build_launcher(None)

    def wait(self) -> None:
        """Wait until the kernels are compiled."""
        if self._library is not None:
            self._call = self._build_launcher(self._library())

    def _first_call(self, *arguments: Any) -> tuple[Any, ...]:
        """Wait for the compiler, which started when the region was lowered; then call."""
        self.wait()
        return self._call(*arguments)

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        return self._call(*arguments)

    @property
    def cached_launch(self) -> Callable[..., tuple[Any, ...]] | None:
        """The generated function, once the kernels are compiled."""
        return None if self._call == self._first_call else self._call

    @property
    def may_fail_later(self) -> bool:
        """Whether a later call may find that its kernels can't be built or launched."""
        return False

    def can_rerun(self, error: Exception) -> bool:
        """Whether a failed call has run nothing yet, so that torch can run the region instead.

        A kernel that ran may have written to an input, or have reported an error of the program. An
        IndexError is one too: a position out of range, which the launcher has found.
        """
        if isinstance(error, IndexError):
            return False
        return not 0 < self._first_launch_line <= self._failed_line(error)

    def next_schedule(self, error: Exception) -> FusedRegion | None:
        """The region with other schedules for what failed; None if there are none."""
        return None

    def _failed_line(self, error: Exception) -> int:
        """The line of the launcher that raised the error; 0 if it was not the launcher."""
        line, traceback = 0, error.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == LAUNCHER_FILE:
                line = traceback.tb_lineno
            traceback = traceback.tb_next
        return line

    def _build_launcher(self, library: ctypes.CDLL | None) -> Callable[..., tuple[Any, ...]]:
        scope: dict[str, Any] = {
            **HOST_SCOPE,
            "as_strided": torch.as_strided,
            "view_as_real": torch.view_as_real,
            "view_as_complex": torch.view_as_complex,
            "allocate": allocate,
            "empty": empty_strided,
            "restride": restride,
            "draw_seed": draw_seed,
            "threads": _thread_count_getter(),
        }
        if library is not None:
            name = " ".join(kernel.name for kernel in self.kernels)
            kernel = replay.NativeKernel(library, "run", name, _make_kernel_error)
            scope["run"], self.kernel_address = kernel.__call__, kernel.address
            scope["pack"] = struct.Struct(f"{len(self.unit.slots) + 1}q").pack
        self.launcher = self._launcher_source(scope)
        exec(compile(self.launcher, LAUNCHER_FILE, "exec"), scope)  # generated above
        return scope["fused"]  # type: ignore[no-any-return]

    def _launcher_source(self, scope: dict[str, Any]) -> str:
        """The source of the launcher, a function of the region's arguments."""
        region, unit = self.region, self.unit
        lines = [f"def fused({', '.join(f'a{k}' for k in range(len(region.arguments)))}):"]
        self._write_argument_setup(lines)
        address: dict[str, str] = {}
        for position, argument in enumerate(region.arguments):
            if isinstance(argument, Tensor) and argument.name in unit.slots:
                self._write_stride_check(lines, position, argument)
                address[argument.name] = f"a{position}.data_ptr()"
        order = {name: k for k, name in enumerate(region.tensors)}
        allocated = self.allocated_tensors()
        variables: dict[str, str] = {}
        temporaries = self.find_temporaries(allocated)
        offsets, total = assign_offsets(list(temporaries.values()))
        if total:
            scope["uint8"] = torch.uint8
            lines.append(
                f"    arena = allocate(({total},), (1,), uint8)  # of {len(temporaries)} values"
            )
            lines.append("    base = arena.data_ptr()")
        pairs = zip(temporaries, offsets, strict=True)
        address.update({name: f"base + {offset}" for name, offset in pairs})
        outputs = sorted(allocated - set(temporaries), key=order.__getitem__)
        for number, name in enumerate(outputs):
            tensor = region.tensors[name]
            layout = self.full_buffer_layout(name) or (tensor.sizes, tensor.strides)
            sizes, strides = (format_tuple([index_to_python(n) for n in part]) for part in layout)
            scope[f"dtype{number}"] = tensor.dtype
            function = "empty" if is_small(layout[0], layout[1], tensor.dtype) else "allocate"
            lines.append(f"    t{number} = {function}({sizes}, {strides}, dtype{number})")
            variables[name] = f"t{number}"
            address[name] = f"t{number}.data_ptr()"
        if unit.slots:
            given = [address.get(name, name) for name in unit.slots]
            results = format_tuple(list(variables.values()))  # a recording keeps them alive
            lines.append(f"    packed = pack({', '.join([*given, 'threads()'])})")
            self._write_run(lines, scope, f"run(packed, {results})")
        self._write_input_copies(lines, variables)
        lines.append(
            f"    return {format_tuple([self._result_expression(o, variables) for o in region.outputs])}"
        )
        return "\n".join(lines) + "\n"

    @property
    def has_lookups(self) -> bool:
        """Whether a kernel checks indices that it reads."""
        return "check_index(" in self.unit.text or "wrap_index(" in self.unit.text

    def raise_kernel_error(self, status: int, arguments: tuple[Any, ...]) -> None:
        """Raise the error that a kernel reported by its status, as the launcher does."""
        if status < 0:
            raise RuntimeError(f"Triton Error [CUDA]: a launch failed with error {-status}")
        error = _make_kernel_error(status)
        if self.has_lookups and isinstance(error, IndexError):
            self._raise_eager_error(error, arguments)
        raise error

    def _write_run(self, lines: list[str], scope: dict[str, Any], call: str) -> None:
        """Run the kernels. For an index out of range, torch raises its own error."""
        if not self.has_lookups:
            lines.append(f"    {call}")
            self._first_launch_line = len(lines)
            return
        scope["raise_eager_error"] = self._raise_eager_error
        arguments = format_tuple([f"a{k}" for k in range(len(self.region.arguments))])
        lines += ["    try:", f"        {call}"]
        self._first_launch_line = len(lines)
        lines.append("    except IndexError as error:")
        lines.append(f"        raise_eager_error(error, {arguments})")

    def _raise_eager_error(self, error: IndexError, arguments: tuple[Any, ...]) -> None:
        """Raise what torch raises for these arguments: its own type and text; else `error`."""
        is_converted = any(t.is_view_as_real for t in self.region.inputs)
        if self.reference is not None and not is_converted:
            # not its __call__: a GraphModule prints the traceback of what it raises
            getattr(self.reference, "forward", self.reference)(*arguments)
        raise error

    def _write_argument_setup(self, lines: list[str]) -> None:
        """View complex arguments as real ones, and read the symbols from the arguments."""
        for position, argument in enumerate(self.region.arguments):
            if isinstance(argument, Tensor) and argument.is_negated:
                lines.append(f"    a{position} = a{position}.resolve_neg()")
            if isinstance(argument, Tensor) and argument.is_view_as_real:
                lines.append(f"    a{position} = view_as_real(a{position}.resolve_conj())")
        sources = find_symbol_sources(self.region)
        for name, text in order_definitions(self.needed_symbols(), sources).items():
            if text is None:
                raise FusionError(
                    f"the size {name} can't be derived from the arguments of a fused region",
                    next="report this: the region's inputs have it only in a larger expression",
                )
            lines.append(f"    {name} = {text}")

    @property
    def overwritten_inputs(self) -> tuple[int, ...]:
        """Positions of the arguments that outputs are stored in (donated buffers)."""
        named = [a.name if isinstance(a, Tensor) else None for a in self.region.arguments]
        return tuple(k for k, name in enumerate(named) if name in self.region.donated)

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can capture it: a seed drawn by the host would be constant in replays."""
        return SEED not in self.needed_symbols()

    def find_temporaries(self, allocated: set[str]) -> dict[str, Lifetime]:
        """Values of static size that live only between kernels of one call."""
        temporaries: dict[str, Lifetime] = {}
        for name in sorted(allocated - self.region.results):
            tensor = self.region.tensors[name]
            layout = (*tensor.sizes, *tensor.strides)
            if not all(n.is_constant for n in layout):
                continue
            extent = 1
            for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
                extent += (size.constant - 1) * stride.constant
            kernels = self.unit.kernels
            uses = [k for k, part in enumerate(kernels) if name in (*part.reads, *part.writes)]
            temporaries[name] = Lifetime(min(uses), max(uses), max(extent, 1) * tensor.itemsize)
        return temporaries

    def needed_symbols(self) -> set[Symbol]:
        region = self.region
        needed = {symbol for kernel in self.unit.kernels for symbol in kernel.symbols}
        indices: list[Index] = []
        allocated = self.allocated_tensors()
        for tensor in region.tensors.values():
            if tensor.name in allocated:
                indices += [*tensor.sizes, *tensor.strides]
        for argument in region.inputs:
            if argument.name in self.unit.slots:
                indices += argument.strides
        for output in region.outputs:
            indices += [*output.sizes, *output.strides, output.offset]
            if output.size is not None:
                indices.append(output.size)
        return needed.union(*(index.symbols() for index in indices))

    def full_buffer_layout(self, name: str) -> tuple[Any, Any] | None:
        """Sizes and strides of an output that is all of a buffer: a statement's or a donated one."""
        arguments = [a for a in self.region.inputs if a.name == name]
        if arguments:
            return (
                (arguments[0].sizes, arguments[0].strides) if name in self.region.donated else None
            )
        tensor = self.region.tensors[name]
        for output in self.region.outputs:
            if output.name == name and output.offset == 0:
                if product(output.sizes) == product(tensor.sizes):
                    return output.sizes, output.strides
        return None

    def _write_stride_check(self, lines: list[str], position: int, tensor: Tensor) -> None:
        """Copy an argument whose strides are not the expected ones."""
        expected = format_tuple([index_to_python(stride) for stride in tensor.strides])
        if tensor.name in {target for _, target in self.region.writes}:
            lines.append(f"    w{position} = a{position}")
        lines.append(f"    if a{position}.stride() != {expected}:")
        lines.append(f"        a{position} = restride(a{position}, {expected})")

    def allocated_tensors(self) -> set[str]:
        """What kernels write, without mutated arguments, and outputs without elements."""
        written = self.stored_tensors() - {argument.name for argument in self.region.inputs}
        empty = {s.name for s in self.region.statements if s.tensor.is_empty}
        return written | (empty & self.region.results)

    def stored_tensors(self) -> set[str]:
        return {name for kernel in self.unit.kernels for name in kernel.writes}

    def _write_input_copies(self, lines: list[str], variables: dict[str, str]) -> None:
        """Copy into mutated arguments what no kernel stored there, or stored into a copy."""
        names = [a.name if isinstance(a, Tensor) else None for a in self.region.arguments]
        for name, target in self.region.writes:
            k = names.index(target)
            argument = self.region.arguments[k]
            assert isinstance(argument, Tensor), f"{target} is written to and not a tensor"
            target_name = f"w{k}" if target in self.unit.slots else f"a{k}"
            if target in self.stored_tensors():
                lines.append(f"    if {target_name} is not a{k}:")
                lines.append(f"        {target_name}.copy_(a{k})")
            else:
                strides = format_tuple([index_to_python(stride) for stride in argument.strides])
                lines.append(
                    f"    {target_name}.copy_(as_strided({variables[name]}, a{k}.shape, {strides}))"
                )

    def _result_expression(self, output: Any, variables: dict[str, str]) -> str:
        text = self._real_result_expression(output, variables)
        # detached: AOTAutograd replays the views of an output's base, which is real here
        text = f"view_as_complex({text}).detach()" if output.is_view_as_real else text
        text = f"torch.conj({text})" if output.is_conj else text
        return f"torch._neg_view({text})" if output.is_neg else text

    def is_whole_buffer(self, output: Any) -> bool:
        """Whether an output is the first one that is all of its buffer: it is the buffer itself."""
        layout = self.full_buffer_layout(output.name)
        if layout != (output.sizes, output.strides):
            return False
        same = [o for o in self.region.outputs if o.name == output.name and o.offset == 0]
        return output is next((o for o in same if (o.sizes, o.strides) == layout), None)

    def _real_result_expression(self, output: Any, variables: dict[str, str]) -> str:
        if output.size is not None:
            return index_to_python(output.size)
        if output.name is None:
            return "None"
        base = variables.get(output.name)
        if base is None:
            names = [a.name if isinstance(a, Tensor) else None for a in self.region.arguments]
            base = f"a{names.index(output.name)}"
        if self.is_whole_buffer(output):
            return base  # other outputs are views of it, as are views of an argument
        sizes = format_tuple([index_to_python(size) for size in output.sizes])
        strides = format_tuple([index_to_python(stride) for stride in output.strides])
        offset = index_to_python(output.offset)
        return f"as_strided({base}, {sizes}, {strides}, {base}.storage_offset() + {offset})"


def _thread_count_getter() -> Callable[[], int]:
    """A function that returns the number of threads: torch's, or that of the environment."""
    if read_env("FULGURITE_NUM_THREADS") is None:
        return torch.get_num_threads
    number = device.num_cpu_threads()
    return lambda: number


def format_tuple(parts: list[str]) -> str:
    return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"


def restride(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Copy a tensor to other strides; those of size-1 dimensions and empty tensors don't matter."""
    is_same = all(
        actual == expected or size == 1
        for size, actual, expected in zip(tensor.shape, tensor.stride(), strides, strict=True)
    )
    if is_same or tensor.numel() == 0:
        return tensor
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _make_kernel_error(status: int) -> Exception:
    """The error that torch raises for what a kernel reports."""
    if status == 2:
        return RuntimeError("ZeroDivisionError")
    return IndexError("index out of range in a fused gather, index or embedding")
