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
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.random_seed import SEED, draw_seed
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
from fulgurite.fuser.runtime.cpu_region import FusedRegion, format_tuple, index_to_python, restride
from fulgurite.fuser.runtime.kernel import Kernel
from fulgurite.fuser.runtime.memory_pool import Lifetime, assign_offsets


class TritonRegion(FusedRegion):
    """Calls the Triton kernels of one region."""

    def __init__(
        self,
        region: Region,
        write: WriteModule,
        kernels: tuple[Kernel, ...],
        device: torch.device,
        int64_indices: bool | None,
    ) -> None:
        self.device = device
        self.int64_indices = int64_indices  # None: sizes are dynamic, and each call checks
        self.kernel_module = write(bool(int64_indices), True)
        self.variants = CompiledVariants(write)
        super().__init__(region, _as_translation_unit(self.kernel_module), kernels, None)
        if not is_interpreted() and int64_indices is not None:
            self.variants.start_compile(ALIGNED | (INT64_INDICES if int64_indices else 0))

    def _build_launcher(self, library: Any) -> Callable[..., tuple[Any, ...]]:
        scope: dict[str, Any] = {
            "as_strided": torch.as_strided,
            "view_as_real": torch.view_as_real,
            "view_as_complex": torch.view_as_complex,
            "allocate": get_allocator(self.device),
            "empty": torch.empty,
            "device": self.device,
            "restride": restride,
            "draw_seed": draw_seed,
            "variants": self.variants,
            "ensure_scratch_allocator": ensure_scratch_allocator,
        }
        if self.device.type == "cuda":
            scope["current_stream"] = torch._C._cuda_getCurrentRawStream
            scope["current_device"] = torch._C._cuda_getDevice
            scope["on_device"] = torch.cuda.device
        self.launcher = self._launcher_source(scope)
        exec(compile(self.launcher, "<fused region>", "exec"), scope)  # generated above
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
        order = {s.name: k for k, s in enumerate(region.statements)}
        allocated = self._allocated_tensors()
        in_arena = self._write_arena(lines, scope, address, address_of)
        variables: dict[str, str] = {}
        for number, name in enumerate(sorted(allocated - in_arena, key=order.__getitem__)):
            tensor = region.tensors[name]
            layout = self._full_buffer_layout(name) or (tensor.sizes, tensor.strides)
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
        lifetimes = self._find_temporaries(self._allocated_tensors())
        dtypes = {name: self.region.tensors[name].dtype for name in lifetimes}
        for position, kernel in enumerate(self.kernel_module.kernels):
            for partial in kernel.partials:
                count = partial.sizes[0] * partial.sizes[1]
                if count.is_constant:
                    last = self._last_use(partial.name, position)
                    size = count.constant * partial.dtype.itemsize
                    lifetimes[partial.name] = Lifetime(position, last, size)
                    dtypes[partial.name] = partial.dtype
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
        sizes = dict.fromkeys(s for kernel in kernels for s in kernel.symbols if s != SEED)
        symbols = [size.name for size in sizes]
        if is_on_gpu:
            pointers = {address[t.name]: None for kernel in kernels for t in kernel.tensors}
            inputs = [p for p in pointers if p.startswith("p")]  # our own memory is aligned
            variant = f"(0 if ({' | '.join(inputs) or '0'}) & 15 else {ALIGNED})"
            if symbols and self.int64_indices is None:
                variant += f" | (0 if ({' | '.join(symbols)}) & 15 else {DIVISIBLE})"
                variant += f" | ({INT64_INDICES} if {self._max_extent()} >= 2147483648 else 0)"
            elif self.int64_indices:
                variant += f" | {INT64_INDICES}"
            lines.append(f"    kernels = variants[{variant}]")
            lines.append(f"    stream = current_stream({self.device.index})")
            if any("tl.make_tensor_descriptor" in kernel.text for kernel in kernels):
                lines.append("    ensure_scratch_allocator()")
        else:
            lines.append(f"    kernels = variants[{ALIGNED}]")
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

    def _max_extent(self) -> str:
        """An expression for the largest extent of any tensor; from 2**31 on indices need 64 bits."""
        tensors = [t for kernel in self.kernel_module.kernels for t in kernel.tensors]
        extents = [extent for extent in map(_extent, tensors) if not extent.is_constant]
        distinct = list(dict.fromkeys(index_to_python(extent) for extent in extents))
        return f"max({', '.join(distinct)}, 0)" if distinct else "0"


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
    """An upper bound of the elements from the first to the last one."""
    extent = Index(1)
    for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
        extent = extent + size * stride
    return extent


def needs_int64_indices(region: Region) -> bool | None:
    """Whether indices need 64 bits; None if that depends on dynamic sizes."""
    extents = [_extent(tensor) for tensor in region.tensors.values()]
    if any(extent.is_constant and extent.constant >= 1 << 31 for extent in extents):
        return True
    return None if any(not extent.is_constant for extent in extents) else False
