"""Compile Triton kernels: generated modules in the kernel cache, compiled in parallel.

In: `TritonKernelSource`s. Out: a `KernelModule`, and the launch handles of its kernels for each variant
(aligned addresses, divisible sizes, 64-bit indices). Compilation starts when a region is lowered and runs in
threads. If there are many kernels, threads hand them to worker processes (`compile_pool`). Triton stores what
it built in our cache folder, so a warm process compiles nothing. With TRITON_INTERPRET=1 the same kernels run
on CPU tensors, in Triton's interpreter.
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
from fulgurite.fuser.codegen.triton.kernel import TritonKernelSource
from fulgurite.fuser.codegen.triton.module import argument_types, write_module
from fulgurite.fuser.ir.errors import KernelBuildError
from fulgurite.fuser.runtime import compile_worker
from fulgurite.fuser.runtime.compile_pool import compile_pool, worker_count
from fulgurite.fuser.runtime.compile_worker import CompileJob
from fulgurite.fuser.runtime.reduction_layouts import FIRST_RIGHT_VERSION, check_reductions

ALIGNED, DIVISIBLE, INT64_INDICES = 1, 2, 4  # bits of a variant
LaunchHandle = tuple[Any, Any, Any]  # the launcher, the function on the device, packed metadata


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def triton_version() -> str:
    import triton

    return str(triton.__version__)


def supports_warp_specialization() -> bool:
    """Whether Triton compiles warp-specialized loops right. Triton 3.6 miscompiles them.

    It places barriers in memory that tiles are copied to (triton-lang/triton#9592 fixes that). On an H200 the
    first columns of tiles were NaN: barriers read as numbers.
    """
    major, minor = map(int, triton_version().split(".")[:2])
    return (major, minor) >= (3, 7)


def load_module(text: str) -> ModuleType:
    """Import a generated module from a file of the kernel cache: Triton reads its source."""
    key = cache.digest(text)
    path = cache.get_or_build("triton", key, lambda target: _write_text(target, text), ".py")
    return compile_worker.load_module(str(path))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


class _TritonCacheDir:
    """A context in which Triton's cache folder is inside ours; contexts may overlap."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0

    def __enter__(self) -> None:
        import triton

        with self.lock:
            if self.users == 0:
                self.scope = triton.knobs.cache.scope()
                self.scope.__enter__()
                triton.knobs.cache.dir = str(_built_dir())
            self.users += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.users -= 1
            if self.users == 0:
                self.scope.__exit__(None, None, None)


triton_cache_dir = _TritonCacheDir()


def _built_dir() -> Path:
    return settings().cache_dir / "triton" / "built"


@functools.cache
def compile_threads() -> ThreadPoolExecutor:
    """Threads that compile, or wait for worker processes that do."""
    return ThreadPoolExecutor(worker_count(), thread_name_prefix="fulgurite-triton")


os.register_at_fork(after_in_child=compile_threads.cache_clear)  # threads don't survive a fork


@dataclass(frozen=True)
class KernelModule:
    """The kernels of a region for one width of indices, and the module that defines them."""

    kernels: tuple[TritonKernelSource, ...]
    text: str

    def start_compile(self, variant: int) -> list[Future[Any]]:
        """Start compiling every kernel."""
        module = load_module(self.text)
        return [
            compile_threads().submit(
                compile_for_current_device, getattr(module, kernel.name), kernel, variant
            )
            for kernel in self.kernels
        ]

    def interpreted_kernels(self) -> list[LaunchHandle]:
        """Every kernel as the interpreter runs it."""
        module = load_module(self.text)
        return [(getattr(module, kernel.name), None, None) for kernel in self.kernels]

    def compile(self, variant: int) -> list[LaunchHandle]:
        return self.wait(self.start_compile(variant))

    def wait(self, jobs: list[Future[Any]]) -> list[LaunchHandle]:
        """Wait until every kernel is compiled, and load it onto the device."""
        names = [kernel.name for kernel in self.kernels]
        return [load_kernel(name, job) for name, job in zip(names, jobs, strict=True)]


def build_kernel_module(kernels: Sequence[TritonKernelSource]) -> KernelModule:
    return KernelModule(tuple(kernels), write_module(kernels))


def load_kernel(name: str, job: Future[Any]) -> LaunchHandle:
    """Wait until a kernel is compiled, and load it onto the device."""
    try:
        kernel = job.result()
        with triton_cache_dir:  # the compiled launchers are there too
            kernel._init_handles()
    except Exception as problem:  # Triton's and ptxas' many kinds, under the kernel's name
        raise KernelBuildError(name, problem) from problem
    return kernel.run, kernel.function, kernel.packed_metadata


def compile_for_current_device(function: Any, source: TritonKernelSource, variant: int) -> Any:
    """Compile a kernel and its launcher for the current device, into Triton's cache."""
    import triton

    active = triton.runtime.driver.active
    job = make_compile_job(function, source, variant, active.get_current_target())
    compiled_key = cache.digest(triton.__version__, job.to_message(0))
    with triton_cache_dir:
        if cache.read_text("triton", compiled_key) is None:
            with compile_pool().offload(job):
                kernel = _compile_checked(function, job)
            active.launcher_cls(kernel.src, kernel.metadata)  # Triton 3.6 runs a C compiler for it
            cache.write_text("triton", compiled_key, source.name)
            return kernel
        return _compile_checked(function, job)


def _compile_checked(function: Any, job: CompileJob) -> Any:
    """Compile a kernel. Raises an error if Triton compiles it wrong."""
    import triton

    kernel = compile_worker.compile_kernel(function, job)
    if tuple(map(int, triton.__version__.split(".")[:2])) < FIRST_RIGHT_VERSION:
        check_reductions(kernel.asm["ttgir"])
    return kernel


def compile_for_target(function: Any, source: TritonKernelSource, variant: int, target: Any) -> Any:
    """Compile a kernel for a device that need not be present."""
    job = make_compile_job(function, source, variant, target)
    with triton_cache_dir:
        return _compile_checked(function, job)


def make_compile_job(
    function: Any, source: TritonKernelSource, variant: int, target: Any
) -> CompileJob:
    """What compiling a kernel takes, in any process."""
    count = len(source.tensors)
    divisible = list(range(count)) if variant & ALIGNED else []
    if variant & DIVISIBLE:
        sizes = [k for k, symbol in enumerate(source.symbols) if not symbol.is_64_bit]
        divisible += [count + k for k in sizes]
    options = {
        "num_warps": source.num_warps,
        "num_stages": source.num_stages,
        "debug": source.has_asserts,
        "sanitize_overflow": False,
        "enable_fp_fusion": False,  # a*b - a*b is 0, as in torch and in C++ kernels
        "enable_reflect_ftz": source.flushes_denormals,
    }
    return CompileJob(
        path=function.fn.__code__.co_filename,
        name=source.name,
        argument_types=argument_types(source),
        divisible_arguments=tuple(divisible),
        options=options,
        target=(target.backend, target.arch, target.warp_size),
        cache_dir=str(_built_dir()),
    )


WriteModule = Callable[[bool, bool], KernelModule]  # (use 64-bit indices, addresses are aligned)


class CompiledVariants(dict[int, list[LaunchHandle]]):
    """Launch handles by variant; a missing variant is compiled when it is first used."""

    def __init__(self, write: WriteModule) -> None:
        super().__init__()
        self._write = write
        self.pending: dict[int, list[Future[Any]]] = {}
        self.when_compiled: list[Callable[[int, list[LaunchHandle]], None]] = []

    def start_compile(self, variant: int) -> None:
        """Start compiling a variant that will be used."""
        self.pending[variant] = self.kernel_module(variant).start_compile(variant)

    def kernel_module(self, variant: int) -> KernelModule:
        return self._write(bool(variant & INT64_INDICES), bool(variant & ALIGNED))

    def __missing__(self, variant: int) -> list[LaunchHandle]:
        if is_interpreted():
            self[variant] = self.kernel_module(variant).interpreted_kernels()
            return self[variant]
        if variant not in self.pending:
            self.start_compile(variant)
        module = self.kernel_module(variant)
        self[variant] = module.wait(self.pending.pop(variant))
        for listener in self.when_compiled:
            listener(variant, self[variant])
        return self[variant]


def ensure_scratch_allocator() -> None:
    """Let launches allocate tensor descriptors by torch, unless the user set another allocator."""
    from triton.runtime import _allocation

    if isinstance(_allocation._allocator.get(), _allocation.NullAllocator):
        _allocation.set_allocator(_allocate_scratch)


def _allocate_scratch(size: int, alignment: int, stream: int | None) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
