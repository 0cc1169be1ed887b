"""Triton kernels from text to something to run: modules in the kernel cache, compiled side by side, kept.

In: stages. Out: a `Program`, and for each variant of it (aligned addresses, divisible sizes, 64-bit indices) what
launches its stages. Compilation starts when a region is lowered and runs in threads, which ask other processes where
there are many kernels (`compile_processes`); Triton keeps what it built in our cache folder, so a warm process
compiles nothing. With TRITON_INTERPRET=1 the same kernels run on CPU tensors, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fulgurite import cache
from fulgurite.config import settings
from fulgurite.fuser import cost
from fulgurite.fuser.codegen.triton.module import Stage, argument_types, write_module
from fulgurite.fuser.frontend.random import SEED
from fulgurite.fuser.runtime import compile_pool, compile_worker
from fulgurite.fuser.runtime.compile_worker import Recipe

ALIGNED, DIVISIBLE, WIDE = 1, 2, 4  # bits of a variant
Runnable = tuple[Any, Any, Any]  # what runs a stage, its handle on the device, its packed metadata


def interpreting() -> bool:
    """Do kernels run in Triton's interpreter?"""
    return os.environ.get("TRITON_INTERPRET") == "1"


def may_specialize() -> bool:
    """Is a loop whose warps go apart compiled right? Not before Triton 3.7: such loops are not written for it.

    3.6 leaves barriers in memory that tiles are then copied to (triton-lang/triton#9592 gives them memory of their
    own). On an H200 the first columns of tiles were NaN: what a barrier is when it is read as numbers.
    """
    import triton

    major, minor = map(int, triton.__version__.split(".")[:2])
    return (major, minor) >= (3, 7)


def load_module(text: str) -> ModuleType:
    """The module, from a file of the kernel cache: Triton reads the source of what it compiles."""
    key = cache.digest(text)
    path = cache.entry("triton", key, lambda place: _put(place, text), ".py")
    return compile_worker.load(str(path))


def _put(place: Path, text: str) -> None:
    place.write_text(text)


class _OurFolder:
    """Triton's own cache inside ours, as long as any of our kernels is being compiled."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0

    def __enter__(self) -> None:
        import triton

        with self.lock:
            if self.users == 0:
                self.scope = triton.knobs.cache.scope()
                self.scope.__enter__()
                triton.knobs.cache.dir = str(_built())
            self.users += 1

    def __exit__(self, *problem: Any) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.scope.__exit__(None, None, None)


our_folder = _OurFolder()


def _built() -> Path:
    return settings().cache_folder / "triton" / "built"


@functools.cache
def threads() -> ThreadPoolExecutor:
    """Threads that compile, or wait for processes that do."""
    return ThreadPoolExecutor(compile_pool.count(), thread_name_prefix="fulgurite-triton")


os.register_at_fork(after_in_child=threads.cache_clear)  # threads don't survive a fork


@dataclass(frozen=True)
class Program:
    """The stages of a region for one width of indices, and the module they are in."""

    stages: tuple[Stage, ...]
    text: str

    def begin(self, variant: int) -> list[Future[Any]]:
        """Starts compiling every stage."""
        module = load_module(self.text)
        return [
            threads().submit(prepare_stage, getattr(module, stage.name), stage, variant)
            for stage in self.stages
        ]

    def functions(self) -> list[Runnable]:
        """Every stage as the interpreter runs it."""
        module = load_module(self.text)
        return [(getattr(module, stage.name), None, None) for stage in self.stages]

    def compile(self, variant: int) -> list[Runnable]:
        return ready(self.begin(variant))


def make_program(stages: Sequence[Stage]) -> Program:
    return Program(tuple(stages), write_module(stages))


def ready(jobs: list[Future[Any]]) -> list[Runnable]:
    """Kernels on the device, once they are compiled."""
    kernels = [job.result() for job in jobs]
    with our_folder:  # it has what calls them, too
        for kernel in kernels:
            kernel._init_handles()
    return [(kernel.run, kernel.function, kernel.packed_metadata) for kernel in kernels]


def prepare_stage(function: Any, stage: Stage, variant: int) -> Any:
    """The compiled kernel for this device, and what will launch it, in Triton's cache."""
    import triton

    active = triton.runtime.driver.active
    recipe = recipe_of(function, stage, variant, active.get_current_target())
    known = cache.digest(triton.__version__, recipe.message(0))
    with our_folder:
        if cache.read_text("triton", known) is None:
            with compile_pool.compilers().beside(recipe):
                kernel = compile_worker.build(function, recipe)
            active.launcher_cls(kernel.src, kernel.metadata)  # Triton 3.6 runs a C compiler for it
            cache.write_text("triton", known, stage.name)
            return kernel
        return compile_worker.build(function, recipe)


def compile_stage(function: Any, stage: Stage, variant: int, target: Any) -> Any:
    """The compiled kernel for a device that need not be there, from Triton's cache where it is there."""
    with our_folder:
        return compile_worker.build(function, recipe_of(function, stage, variant, target))


def recipe_of(function: Any, stage: Stage, variant: int, target: Any) -> Recipe:
    """What compiling a stage takes, in any process."""
    count = len(stage.tensors)
    even = list(range(count)) if variant & ALIGNED else []
    if variant & DIVISIBLE:
        even += [count + k for k, symbol in enumerate(stage.symbols) if symbol != SEED]
    options = {
        "num_warps": stage.warps,
        "num_stages": stage.stages,
        "debug": stage.asserts,
        "sanitize_overflow": False,
        "enable_fp_fusion": True,
        "enable_reflect_ftz": stage.flushes,
    }
    return Recipe(
        function.fn.__code__.co_filename,
        stage.name,
        argument_types(stage),
        tuple(even),
        options,
        (target.backend, target.arch, target.warp_size),
        str(_built()),
    )


Write = Callable[[bool, bool], Program]  # with 64-bit indices or not, for aligned addresses or any


class Variants(dict[int, list[Runnable]]):
    """Compiled stages by variant; what is missing is compiled when it is asked for."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write
        self.begun: dict[int, list[Future[Any]]] = {}

    def begin(self, variant: int) -> None:
        """Starts compiling a variant that will be asked for."""
        self.begun[variant] = self.program(variant).begin(variant)

    def program(self, variant: int) -> Program:
        return self._write(bool(variant & WIDE), bool(variant & ALIGNED))

    def __missing__(self, variant: int) -> list[Runnable]:
        if interpreting():
            self[variant] = self.program(variant).functions()
            return self[variant]
        if variant not in self.begun:
            self.begin(variant)
        self[variant] = ready(self.begun.pop(variant))
        return self[variant]


def give_scratch() -> None:
    """Descriptors that a kernel makes lie in memory that its launch asks for: torch's, if no one set another."""
    from triton.runtime import _allocation

    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        _allocation.set_allocator(_scratch)


def _scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")


def measured(program: Program, names: Sequence[str], device: torch.device) -> Callable[[], float]:
    """A function that times one kernel, all its stages, on buffers of its own."""

    def measure() -> float:
        picked = [k for k, stage in enumerate(program.stages) if stage.name in names]
        kernels = program.compile(ALIGNED | (WIDE if program.stages[0].wide else 0))
        buffers: dict[str, torch.Tensor] = {}
        for k in picked:
            for tensor in program.stages[k].tensors:
                reach = 1 + sum(
                    (cost.number(size) - 1) * cost.number(stride)
                    for size, stride in zip(tensor.sizes, tensor.strides, strict=True)
                )
                if tensor.name not in buffers:
                    buffers[tensor.name] = _filled(max(reach, 1), tensor.dtype, device)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        give_scratch()

        def run_all() -> None:
            for k in picked:
                stage = program.stages[k]
                run, function, packed = kernels[k]
                values = [buffers[t.name].data_ptr() for t in stage.tensors]
                values += [cost.ASSUMED_SIZE] * len(stage.symbols)
                grid = [cost.number(n) for n in stage.grid]
                run(*grid, 1, stream, function, packed, None, None, None, *values)

        return event_seconds(run_all)

    return measure


def _filled(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers for floats, zeros for integers: they may be positions."""
    if not dtype.is_floating_point:
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.rand(count, device=device).to(dtype)


def event_seconds(call: Callable[[], Any], repeats: int = 20) -> float:
    """Seconds of the device for one call: the median of several, by events."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]
