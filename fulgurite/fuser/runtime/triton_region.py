"""A region on the GPU as something to call: a straight launcher over compiled Triton kernels.

In: a region of the IR with its program. Out: `TritonRegion`. Its call is a Python function written for this
region: it allocates results, looks whether every address is a multiple of 16, and hands addresses to
compiled kernels. Nothing is specialised at a call; variants for addresses that are not aligned, and for
sizes that need 64-bit indices, are compiled when they first come up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fulgurite.fuser.codegen.cpp.translation_unit import KernelText, Unit
from fulgurite.fuser.frontend.random import SEED, draw_seed
from fulgurite.fuser.ir.index import Index
from fulgurite.fuser.ir.statement import Region, Tensor
from fulgurite.fuser.runtime.compile_triton import (
    ALIGNED,
    DIVISIBLE,
    WIDE,
    Program,
    Variants,
    Write,
    give_scratch,
    interpreting,
)
from fulgurite.fuser.runtime.cpu_region import FusedRegion, python_index, restride, tuple_text
from fulgurite.fuser.runtime.kernel import Kernel
from fulgurite.fuser.runtime.memory_pool import Lifetime, plan


class TritonRegion(FusedRegion):
    """Calls the Triton kernels of one region."""

    def __init__(
        self,
        region: Region,
        write: Write,
        kernels: tuple[Kernel, ...],
        device: torch.device,
        wide: bool | None,
    ) -> None:
        self.device = device
        self.wide = wide  # None: sizes are dynamic, and each call looks
        self.program = write(bool(wide), True)
        self.variants = Variants(write)
        super().__init__(region, _unit(self.program), kernels, None)
        if not interpreting() and wide is not None:
            self.variants.begin(ALIGNED | (WIDE if wide else 0))

    def _prepare(self, library: Any) -> Callable[..., tuple[Any, ...]]:
        scope: dict[str, Any] = {
            "as_strided": torch.as_strided,
            "view_as_real": torch.view_as_real,
            "view_as_complex": torch.view_as_complex,
            "allocate": allocator(self.device),
            "empty": torch.empty,
            "device": self.device,
            "restride": restride,
            "draw_seed": draw_seed,
            "variants": self.variants,
            "give_scratch": give_scratch,
        }
        if self.device.type == "cuda":
            scope["current_stream"] = torch._C._cuda_getCurrentRawStream
            scope["current_device"] = torch._C._cuda_getDevice
            scope["on_device"] = torch.cuda.device
        self.launcher = self._text(scope)
        exec(compile(self.launcher, "<fused region>", "exec"), scope)  # our own text
        return scope["fused"]  # type: ignore[no-any-return]

    def _text(self, scope: dict[str, Any]) -> str:
        region = self.region
        arguments = ", ".join(f"a{k}" for k in range(len(region.arguments)))
        lines = [f"def fused({arguments}):"]
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            lines.append(f"    if current_device() != {self.device.index}:")
            lines.append(f"        with on_device({self.device.index}):")
            lines.append(f"            return fused({arguments})")
        self._arguments(lines)
        address: dict[str, str] = {}
        used = {t.name for stage in self.program.stages for t in stage.tensors}
        take = "{}.data_ptr()" if on_gpu else "{}"
        for position, argument in enumerate(region.arguments):
            if isinstance(argument, Tensor) and argument.name in used:
                self._checked(lines, position, argument)
                lines.append(f"    p{position} = {take.format(f'a{position}')}")
                address[argument.name] = f"p{position}"
        held = self._allocations(lines, scope, address, take)
        self._launches(lines, address, on_gpu)
        self._writes(lines, held)
        lines.append(f"    return {tuple_text([self._result(o, held) for o in region.outputs])}")
        return "\n".join(lines) + "\n"

    def _allocations(
        self, lines: list[str], scope: dict[str, Any], address: dict[str, str], take: str
    ) -> dict[str, str]:
        """Results, and the memory between two stages: what of it has a known size is one block."""
        region = self.region
        order = {s.name: k for k, s in enumerate(region.statements)}
        made = self._made()
        shared = self._shared(lines, scope, address, take)
        held: dict[str, str] = {}
        for number, name in enumerate(sorted(made - shared, key=order.__getitem__)):
            tensor = region.tensors[name]
            whole = self._whole_output(name)
            layout = (tensor.sizes, tensor.strides) if whole is None else whole
            sizes, strides = (tuple_text([python_index(n) for n in part]) for part in layout)
            scope[f"dtype{number}"] = tensor.dtype
            lines.append(f"    t{number} = allocate({sizes}, {strides}, dtype{number})")
            lines.append(f"    q{number} = {take.format(f't{number}')}")
            held[name] = f"t{number}"
            address[name] = f"q{number}"
        parts = [part for stage in self.program.stages for part in stage.parts]
        for number, part in enumerate(part for part in parts if part.name not in shared):
            count = python_index(part.sizes[0] * part.sizes[1])
            scope[f"kind{number}"] = part.dtype
            lines.append(f"    s{number}_ = empty({count}, dtype=kind{number}, device=device)")
            lines.append(f"    r{number} = {take.format(f's{number}_')}")
            address[part.name] = f"r{number}"
        return held

    def _shared(
        self, lines: list[str], scope: dict[str, Any], address: dict[str, str], take: str
    ) -> set[str]:
        """One block for all that only stages of this call see: an allocation takes the host 4 µs."""
        lifetimes = self._temporaries(self._made())
        kinds = {name: self.region.tensors[name].dtype for name in lifetimes}
        for position, stage in enumerate(self.program.stages):
            for part in stage.parts:
                count = part.sizes[0] * part.sizes[1]
                if count.is_constant:
                    last = self._last_use(part.name, position)
                    size = count.constant * part.dtype.itemsize
                    lifetimes[part.name] = Lifetime(position, last, size)
                    kinds[part.name] = part.dtype
        places, total = plan(list(lifetimes.values()))
        if not total:
            return set()
        scope["uint8"] = torch.uint8
        lines.append(f"    arena = allocate(({total},), (1,), uint8)  # of {len(lifetimes)} values")
        lines.append(f"    base = {take.format('arena')}")
        for number, (name, place) in enumerate(zip(lifetimes, places, strict=True)):
            address[name] = f"base + {place}"
            if self.device.type != "cuda":  # the interpreter takes tensors
                scope[f"shared{number}"] = kinds[name]
                end = place + lifetimes[name].bytes
                address[name] = f"base[{place}:{end}].view(shared{number})"
        return set(lifetimes)

    def _last_use(self, name: str, first: int) -> int:
        stages = self.program.stages
        reading = [
            k for k, stage in enumerate(stages) if any(t.name == name for t in stage.tensors)
        ]
        return max([first, *reading])

    def _launches(self, lines: list[str], address: dict[str, str], on_gpu: bool) -> None:
        stages = self.program.stages
        if not stages:
            return
        sizes = dict.fromkeys(s for stage in stages for s in stage.symbols if s != SEED)
        symbols = [size.name for size in sizes]
        if on_gpu:
            places = {address[t.name]: None for stage in stages for t in stage.tensors}
            given = [place for place in places if place.startswith("p")]  # ours are aligned
            variant = f"(0 if ({' | '.join(given) or '0'}) & 15 else {ALIGNED})"
            if symbols and self.wide is None:
                variant += f" | (0 if ({' | '.join(symbols)}) & 15 else {DIVISIBLE})"
                variant += f" | ({WIDE} if {self._reach()} >= 2147483648 else 0)"
            elif self.wide:
                variant += f" | {WIDE}"
            lines.append(f"    kernels = variants[{variant}]")
            lines.append(f"    stream = current_stream({self.device.index})")
            if any("tl.make_tensor_descriptor" in stage.text for stage in stages):
                lines.append("    give_scratch()")
        else:
            lines.append(f"    kernels = variants[{ALIGNED}]")
        for number, stage in enumerate(stages):
            first, second = (python_index(n) for n in stage.grid)
            values = [address[t.name] for t in stage.tensors] + [s.name for s in stage.symbols]
            indent = "    "
            if not stage.grid[0].is_constant:
                lines.append(f"    if {first}:")
                indent += "    "
            if on_gpu:
                lines.append(f"{indent}run, function, packed = kernels[{number}]")
                fixed = f"{first}, {second}, 1, stream, function, packed, None, None, None"
                lines.append(f"{indent}run({', '.join([fixed, *values])})")
            else:
                lines.append(
                    f"{indent}kernels[{number}][0][({first}, {second})]({', '.join(values)})"
                )

    def _reach(self) -> str:
        """The most elements of any tensor, as text: past 2**31 indices need 64 bits."""
        sizes = []
        for stage in self.program.stages:
            for tensor in stage.tensors:
                reach = Index(1)
                for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
                    reach = reach + size * stride
                if not reach.is_constant:
                    sizes.append(python_index(reach))
        distinct = list(dict.fromkeys(sizes))
        return f"max({', '.join(distinct)}, 0)" if distinct else "0"


def allocator(device: torch.device) -> Callable[..., torch.Tensor]:
    """Sizes, strides, dtype → memory on the current device, by the shortest way."""
    if device.type == "cuda":
        return torch._C._dynamo.guards._empty_strided_cuda
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype)


def _unit(program: Program) -> Unit:
    """The program as the launcher's base class sees kernels."""
    kernels = []
    for stage in program.stages:
        writes = tuple(t.name for t in stage.tensors if t.name in stage.writes)
        reads = tuple(t.name for t in stage.tensors if t.name not in stage.writes)
        kernels.append(KernelText(stage.name, stage.text, reads, writes, stage.symbols))
    slots = tuple(dict.fromkeys(t.name for stage in program.stages for t in stage.tensors))
    return Unit(tuple(kernels), slots, program.text)


def needs_wide(region: Region) -> bool | None:
    """Do indices need 64 bits? None where only a call can tell."""
    dynamic = False
    for tensor in region.tensors.values():
        reach = Index(1)
        for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
            reach = reach + size * stride
        if not reach.is_constant:
            dynamic = True
        elif reach.constant >= 1 << 31:
            return True
    return None if dynamic else False
