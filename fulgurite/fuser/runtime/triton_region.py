"""A fused region on a GPU as a callable: a generated launcher of compiled Triton kernels.

In: a region of the IR with its kernel module. Out: `TritonRegion`. Its call is a Python function that is generated for
this region: it allocates outputs, checks whether all addresses are multiples of 16, and passes them to compiled
kernels. Nothing is specialized at a call. Variants for unaligned addresses, and for sizes that need 64-bit indices, are
compiled when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fulgurite.fuser.codegen.cpp.translation_unit import CppKernelSource, TranslationUnit
from fulgurite.fuser.ir import index as indices
from fulgurite.fuser.ir.errors import KernelBuildError
from fulgurite.fuser.ir.host_symbols import HOST_SCOPE, index_to_python
from fulgurite.fuser.ir.index import Index, Symbol
from fulgurite.fuser.ir.random_seed import draw_seed, seed_address
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.fuser.runtime.compile_triton import (
    ALIGNED,
    DIVISIBLE,
    INT64_INDICES,
    CompiledVariants,
    KernelModule,
    WriteModule,
    ensure_scratch_allocator,
    is_interpreted,
)
from fulgurite.fuser.runtime.cpu_region import (
    LAUNCHER_FILE,
    FusedRegion,
    format_tuple,
    restride,
)
from fulgurite.fuser.runtime.kernel import Kernel
from fulgurite.fuser.runtime.memory_pool import Lifetime, assign_offsets

# name of a kernel that can't be built or launched → the region with another schedule for it
Reschedule = Callable[[str], FusedRegion | None]


class TritonRegion(FusedRegion):
    """Calls the Triton kernels of one region."""

    def __init__(
        self,
        region: Region,
        write: WriteModule,
        kernels: tuple[Kernel, ...],
        device: torch.device,
        int64_indices: bool | None,
        reschedule: Reschedule = lambda kernel: None,
    ) -> None:
        self.device = device
        self._reschedule = reschedule
        self._launch_lines: list[int] = []  # of the launcher's text, one per kernel
        self.int64_indices = int64_indices  # None: sizes are dynamic, and each call checks
        self.kernel_module = write(bool(int64_indices), True)
        self.variants = CompiledVariants(write)
        super().__init__(region, _as_translation_unit(self.kernel_module), kernels, None)
        if not is_interpreted() and int64_indices is not None:
            self.variants.start_compile(ALIGNED | (INT64_INDICES if int64_indices else 0))

    @property
    def may_fail_later(self) -> bool:
        """Other addresses and sizes need other variants, which are compiled when they are needed."""
        return True

    @property
    def is_capturable(self) -> bool:
        """Captured kernels read their seed from memory that every replay writes."""
        return True

    def can_rerun(self, error: Exception) -> bool:
        """Whether inputs are as they were before the failed call, and the program is right."""
        if isinstance(error, IndexError):  # a position that is out of range
            return False
        line = self._failed_line(error)
        if not self._launch_lines or line < self._launch_lines[0]:
            return True
        if self.device.type != "cuda":  # in the interpreter, a kernel fails while it runs
            return False
        has_launched = line > self._launch_lines[0]  # a launch that fails has run nothing
        return not has_launched or not (self.region.writes or self.region.donated)

    def next_schedule(self, error: Exception) -> FusedRegion | None:
        """The region with another schedule for the kernel that can't be built or launched."""
        if isinstance(error, KernelBuildError):
            return self._reschedule(error.kernel)
        line = self._failed_line(error)
        if line not in self._launch_lines:
            return None
        kernel = self.kernel_module.kernels[self._launch_lines.index(line)]
        return self._reschedule(kernel.name)

    def _build_launcher(self, library: Any) -> Callable[..., tuple[Any, ...]]:
        scope: dict[str, Any] = {
            **HOST_SCOPE,
            "as_strided": torch.as_strided,
            "view_as_real": torch.view_as_real,
            "view_as_complex": torch.view_as_complex,
            "allocate": get_allocator(self.device),
            "empty": torch.empty,
            "device": self.device,
            "restride": restride,
            "draw_seed": draw_seed,
            "seed_address": seed_address,
            "variants": self.variants,
            "ensure_scratch_allocator": ensure_scratch_allocator,
        }
        if self.device.type == "cuda":
            scope["current_stream"] = torch._C._cuda_getCurrentRawStream
            scope["current_device"] = torch._C._cuda_getDevice
            scope["on_device"] = torch.cuda.device
        self.launcher = self._launcher_source(scope)
        exec(compile(self.launcher, LAUNCHER_FILE, "exec"), scope)  # generated above
        return scope["fused"]  # type: ignore[no-any-return]

    def _launcher_source(self, scope: dict[str, Any]) -> str:
        region = self.region
        arguments = ", ".join(f"a{k}" for k in range(len(region.arguments)))
        lines = [f"def fused({arguments}):"]
        is_on_gpu = self.device.type == "cuda"
        if is_on_gpu:
            lines.append(f"    if current_device() != {self.device.index}:")
            lines.append(f"        with on_device({self.device.index}):")
            lines.append(f"            return fused({arguments})")
        self._write_argument_setup(lines)
        address: dict[str, str] = {}
        used = {t.name for kernel in self.kernel_module.kernels for t in kernel.tensors}
        address_of = "{}.data_ptr()" if is_on_gpu else "{}"
        for position, argument in enumerate(region.arguments):
            if isinstance(argument, Tensor) and argument.name in used:
                self._write_stride_check(lines, position, argument)
                lines.append(f"    p{position} = {address_of.format(f'a{position}')}")
                address[argument.name] = f"p{position}"
        variables = self._write_allocations(lines, scope, address, address_of)
        self._write_launches(lines, address, is_on_gpu)
        self._write_input_copies(lines, variables)
        results = [self._result_expression(output, variables) for output in region.outputs]
        lines.append(f"    return {format_tuple(results)}")
        return "\n".join(lines) + "\n"

    def _write_allocations(
        self, lines: list[str], scope: dict[str, Any], address: dict[str, str], address_of: str
    ) -> dict[str, str]:
        """Allocate outputs and temporaries; temporaries of static size share one arena."""
        region = self.region
        order = {name: k for k, name in enumerate(region.tensors)}
        allocated = self.allocated_tensors()
        in_arena = self._write_arena(lines, scope, address, address_of)
        variables: dict[str, str] = {}
        for number, name in enumerate(sorted(allocated - in_arena, key=order.__getitem__)):
            tensor = region.tensors[name]
            layout = self.full_buffer_layout(name) or (tensor.sizes, tensor.strides)
            sizes, strides = (format_tuple([index_to_python(n) for n in part]) for part in layout)
            scope[f"dtype{number}"] = tensor.dtype
            lines.append(f"    t{number} = allocate({sizes}, {strides}, dtype{number})")
            lines.append(f"    q{number} = {address_of.format(f't{number}')}")
            variables[name] = f"t{number}"
            address[name] = f"q{number}"
        partials = [p for kernel in self.kernel_module.kernels for p in kernel.partials]
        for number, partial in enumerate(p for p in partials if p.name not in in_arena):
            count = index_to_python(partial.sizes[0] * partial.sizes[1])
            scope[f"partial_dtype{number}"] = partial.dtype
            options = f"dtype=partial_dtype{number}, device=device"
            lines.append(f"    s{number}_ = empty({count}, {options})")
            lines.append(f"    r{number} = {address_of.format(f's{number}_')}")
            address[partial.name] = f"r{number}"
        return variables

    def _write_arena(
        self, lines: list[str], scope: dict[str, Any], address: dict[str, str], address_of: str
    ) -> set[str]:
        """Allocate one arena for all temporaries of a call: an allocation takes the host 4 µs."""
        lifetimes = self.find_temporaries(self.allocated_tensors())
        dtypes = {name: self.region.tensors[name].dtype for name in lifetimes}
        lifetimes |= self.find_partials()
        dtypes |= {
            p.name: p.dtype for kernel in self.kernel_module.kernels for p in kernel.partials
        }
        offsets, total = assign_offsets(list(lifetimes.values()))
        if not total:
            return set()
        scope["uint8"] = torch.uint8
        lines.append(f"    arena = allocate(({total},), (1,), uint8)  # of {len(lifetimes)} values")
        lines.append(f"    base = {address_of.format('arena')}")
        for number, (name, offset) in enumerate(zip(lifetimes, offsets, strict=True)):
            address[name] = f"base + {offset}"
            if self.device.type != "cuda":  # the interpreter takes tensors
                scope[f"arena_dtype{number}"] = dtypes[name]
                end = offset + lifetimes[name].bytes
                address[name] = f"base[{offset}:{end}].view(arena_dtype{number})"
        return set(lifetimes)

    def find_partials(self) -> dict[str, Lifetime]:
        """Partial results of static size, which one kernel leaves for the next."""
        found: dict[str, Lifetime] = {}
        for position, kernel in enumerate(self.kernel_module.kernels):
            for partial in kernel.partials:
                count = partial.sizes[0] * partial.sizes[1]
                if count.is_constant:
                    last = self._last_use(partial.name, position)
                    size = count.constant * partial.dtype.itemsize
                    found[partial.name] = Lifetime(position, last, size)
        return found

    def _last_use(self, name: str, first: int) -> int:
        kernels = self.kernel_module.kernels
        uses = [
            k for k, kernel in enumerate(kernels) if any(t.name == name for t in kernel.tensors)
        ]
        return max([first, *uses])

    def _write_launches(self, lines: list[str], address: dict[str, str], is_on_gpu: bool) -> None:
        kernels = self.kernel_module.kernels
        if not kernels:
            return
        sizes = dict.fromkeys(s for kernel in kernels for s in kernel.symbols if not s.is_64_bit)
        wide = f" | ({INT64_INDICES} if {self.wide_condition(list(sizes))} else 0)"
        if self.int64_indices is not None:
            wide = f" | {INT64_INDICES}" if self.int64_indices else ""
        if is_on_gpu:
            pointers = {address[t.name]: None for kernel in kernels for t in kernel.tensors}
            inputs = [p for p in pointers if p.startswith("p")]  # our own memory is aligned
            variant = f"(0 if ({' | '.join(inputs) or '0'}) & 15 else {ALIGNED})"
            if sizes and self.int64_indices is None:
                either = " | ".join(size.name for size in sizes)
                variant += f" | (0 if ({either}) & 15 else {DIVISIBLE})"
            lines.append(f"    kernels = variants[{variant}{wide}]")
            lines.append(f"    stream = current_stream({self.device.index})")
            if any("tl.make_tensor_descriptor" in kernel.text for kernel in kernels):
                lines.append("    ensure_scratch_allocator()")
        else:
            lines.append(f"    kernels = variants[{ALIGNED}{wide}]")
        for number, kernel in enumerate(kernels):
            first, second = (index_to_python(n) for n in kernel.grid)
            values = [address[t.name] for t in kernel.tensors] + [s.name for s in kernel.symbols]
            indent = "    "
            if not kernel.grid[0].is_constant:
                lines.append(f"    if {first}:")
                indent += "    "
            if is_on_gpu:
                lines.append(f"{indent}run, function, metadata = kernels[{number}]")
                fixed = f"{first}, {second}, 1, stream, function, metadata, None, None, None"
                lines.append(f"{indent}run({', '.join([fixed, *values])})")
            else:
                lines.append(
                    f"{indent}kernels[{number}][0][({first}, {second})]({', '.join(values)})"
                )
            self._launch_lines.append(len(lines))

    def needed_symbols(self) -> set[Symbol]:
        extents = [_extent(t) for kernel in self.kernel_module.kernels for t in kernel.tensors]
        return super().needed_symbols().union(*(extent.symbols() for extent in extents))

    def wide_condition(self, symbols: list[Symbol]) -> str:
        """The condition for 64-bit indices: a tensor's extent or a symbol needs more than 32 bits."""
        tensors = [t for kernel in self.kernel_module.kernels for t in kernel.tensors]
        extents = [extent for extent in map(_extent, tensors) if not extent.is_constant]
        large = [index_to_python(extent) for extent in extents]
        large += [s.name for s in symbols if s.high is None or s.high >= 1 << 31]
        low = [s.name for s in symbols if s.low is None or s.low < -(1 << 31)]
        condition = f"max({', '.join(dict.fromkeys(large))}, 0) >= {1 << 31}" if large else "False"
        return f"{condition} or min({', '.join(low)}, 0) < {-(1 << 31)}" if low else condition


def get_allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """The fastest function (sizes, strides, dtype) → tensor on the current device."""
    if device.type == "cuda":
        return torch._C._dynamo.guards._empty_strided_cuda
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype)


def _as_translation_unit(module: KernelModule) -> TranslationUnit:
    """The kernel module as the base class sees kernels."""
    kernels = []
    for kernel in module.kernels:
        writes = tuple(t.name for t in kernel.tensors if t.name in kernel.writes)
        reads = tuple(t.name for t in kernel.tensors if t.name not in kernel.writes)
        kernels.append(CppKernelSource(kernel.name, kernel.text, reads, writes, kernel.symbols))
    slots = tuple(dict.fromkeys(t.name for kernel in module.kernels for t in kernel.tensors))
    return TranslationUnit(tuple(kernels), slots, module.text)


def _extent(tensor: Tensor) -> Index:
    """An upper bound of the elements from the first to the last one, and of every size."""
    extent = Index(1)
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        extent = extent + size * (indices.ONE if stride == 0 else stride)
    return extent


def needs_int64_indices(region: Region) -> bool | None:
    """Whether indices need 64 bits; None if that depends on dynamic sizes."""
    extents = [_extent(tensor) for tensor in region.tensors.values()]
    if any(extent.is_constant and extent.constant >= 1 << 31 for extent in extents):
        return True
    symbols = {n for s in region.statements for e in s.expressions for n in e.symbols()}
    is_dynamic = any(not extent.is_constant for extent in extents)
    return None if is_dynamic or any(not symbol.is_64_bit for symbol in symbols) else False
