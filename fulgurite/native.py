"""C++ source → a loaded shared library, through the kernel cache.

In: the text of one translation unit that includes no torch headers. Out: a `ctypes.CDLL`.

The cache key is source + flags + compiler + CPU + version, so a library is never loaded on a CPU that
can't run it. Libraries link the OpenMP runtime that torch has loaded, so both share one thread pool.
`start_build` compiles in the background: the kernels of a graph compile in parallel.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import re
import shutil
import subprocess
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from fulgurite import cache
from fulgurite.config import read_env
from fulgurite.errors import CacheError, CompileError

# C++ headers that generated and hand-written kernels share
INCLUDE = Path(__file__).parent / "include"
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fwrapv",  # signed overflow wraps, as in torch
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",  # comparisons on both sides of a branch may be evaluated
    "-ffp-contract=off",  # a*b - a*b is 0, as in torch
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-pipe",
)
GCC_FLAGS = (
    "-fno-thread-jumps",  # keeps a clamp as two selects instead of three paths through the loop
    "-fno-tree-pre",
    # For some CPUs g++ leaves out FMAs in chains of additions, in one unrolled tile and not in another. Then
    # the bits of a row of a GEMM would depend on how many other rows there are.
    "--param=avoid-fma-max-bits=0",
)
# For sources that start with GUARDED_LOADS: loads that a condition guards become masked loads in vector
# loops. g++ 12 replaces a masked load's address, which is computed before the loop, by an expression of the
# loop's counter, and reads elsewhere. Softmax takes 6% more time with the flag, most kernels as much as before.
GUARDED_LOADS = "// loads behind conditions"
GUARDED_LOADS_GCC_FLAGS = ("-fno-tree-ter",)
VERSION = "2"

_loaded: dict[str, ctypes.CDLL] = {}
_pending_builds: dict[str, PendingBuild] = {}
_compile_slots: threading.BoundedSemaphore


@functools.cache
def find_compiler() -> str | None:
    """Path of the C++ compiler; None, with one warning, if there is none."""
    requested = read_env("FULGURITE_CXX")
    for name in [requested] if requested else ["g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    warnings.warn(
        f"no C++ compiler found ({requested or 'g++ or clang++'}): no CPU kernels are generated and "
        "torch runs every op. Install g++ or set FULGURITE_CXX",
        stacklevel=2,
    )
    return None


@functools.cache
def compiler_version(path: str) -> str:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as problem:
        raise CompileError(
            f"the C++ compiler {path} does not run",
            where=str(problem),
            next="set FULGURITE_CXX to g++ or clang++, or unset it",
        ) from problem
    return done.stdout


@functools.cache
def cpu_fingerprint() -> str:
    """Text that identifies the CPU: everything `-march=native` depends on."""
    text = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return text + platform.processor()
    keys = ("model name", "flags", "Features", "CPU part")
    unique = dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in keys)
    return text + "\n".join(unique)


@functools.cache
def arch_flags() -> tuple[str, ...]:
    flags = ["-march=native"]
    if platform.machine() == "x86_64":
        flags.append("-mprefer-vector-width=512")
    return tuple(flags)


@functools.cache
def loaded_openmp_library() -> str | None:
    """Path of the OpenMP runtime that this process has loaded, if any."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for line in maps:
        name = os.path.basename(line.split(maxsplit=5)[-1]) if "/" in line else ""
        if name.startswith(("libgomp", "libiomp5", "libomp")) and ".so" in name:
            return line.split(maxsplit=5)[-1]
    return None


@functools.cache
def is_clang(path: str) -> bool:
    """Judged by `--version`: on some systems g++ is clang."""
    return "clang" in compiler_version(path)


@functools.cache
def clang_openmp_flags(path: str) -> tuple[str, ...]:
    """OpenMP flags for clang. Without clang's own OpenMP runtime, kernels run on one thread."""
    probe = [path, "-fopenmp", "-shared", "-fPIC", "-x", "c++", "-", "-o", os.devnull]
    text = "int f() { int n = 0;\n#pragma omp parallel\n{ n = 1; }\nreturn n; }"
    done = subprocess.run(probe, input=text, capture_output=True, text=True)
    if done.returncode == 0:
        return ("-fopenmp",)
    warnings.warn(
        f"{path} has no OpenMP runtime: CPU kernels run on one thread. Install libomp or g++",
        stacklevel=2,
    )
    return ("-fopenmp-simd",)


@functools.cache
def has_gather_tuning(path: str) -> bool:
    """Whether g++ has `-mtune-ctrl=use_gather`, which lets it vectorize loops with table lookups.

    g++'s generic tuning disables gathers. Versions 8 to 13 know the flag under this name.
    """
    found = re.search(r"\) (\d+)\.", compiler_version(path))
    return found is not None and 8 <= int(found[1]) <= 13


def compile_command(
    path: str, source: Path, target: Path, gcc_flags: tuple[str, ...] = ()
) -> list[str]:
    line = [path, *FLAGS, *arch_flags(), str(source), "-o", str(target)]
    runtime = loaded_openmp_library()
    is_other = runtime is not None and not os.path.basename(runtime).startswith("libgomp.so")
    # torch ships a runtime under another name: link that file instead of a second copy
    openmp = [str(runtime)] if is_other else []
    if is_clang(path):
        return [*line, *clang_openmp_flags(path), "-w", "-lm"]
    line += ["-fopenmp", *GCC_FLAGS, *gcc_flags]
    if platform.machine() == "x86_64" and has_gather_tuning(path):
        line.append("-mtune-ctrl=use_gather")
    # the kernels don't use the C++ standard library; without it, linking takes a third of the time
    return [*line, "-nostdlib", *(openmp or ["-lgomp"]), "-lm", "-lgcc", "-lc"]


def build(source: str) -> Path:
    """Path of the shared library of a source text, compiled if it is not cached."""
    path = find_compiler()
    if path is None:
        raise CompileError("there is no C++ compiler", next="install g++ or set FULGURITE_CXX")
    gcc_flags = GUARDED_LOADS_GCC_FLAGS if source.startswith(GUARDED_LOADS) else ()
    flags = " ".join(compile_command(path, Path("source.cpp"), Path("library.so"), gcc_flags))
    key = cache.digest(source, flags, compiler_version(path), cpu_fingerprint(), VERSION)

    def compile_to(target: Path) -> None:
        text = target.with_suffix(".cpp")
        text.write_text(source)
        command = compile_command(path, text, target, gcc_flags)
        done = subprocess.run(command, capture_output=True, text=True)
        full = os.strerror(errno.ENOSPC)
        if done.returncode and full in done.stderr:
            raise OSError(errno.ENOSPC, full, str(target))  # the cache then uses its private folder
        if done.returncode:
            raise CompileError(
                "the C++ compiler rejected a generated kernel",
                where=done.stderr[:4000],
                next="this is a bug in the code generator: report it with the kernel's source",
            )

    return cache.get_or_build("cpp", key, compile_to, ".so")


def load(source: str) -> ctypes.CDLL:
    """Build a source text if needed, and load the library."""
    return start_build(source)()


class PendingBuild:
    """A library that a background thread builds or finds in the cache. Calling it waits and loads."""

    def __init__(self, key: str, source: str) -> None:
        self.key, self.source = key, source
        self.path: Path | None = None
        self.problem: Exception | None = None
        self.thread = threading.Thread(target=self._build, name="fulgurite build", daemon=True)
        self.thread.start()

    def _build(self) -> None:
        with _compile_slots:
            try:
                self.path = build(self.source)
            except (CompileError, CacheError, OSError) as problem:
                self.problem = problem  # raised in the thread that waits

    def __call__(self) -> ctypes.CDLL:
        self.thread.join()
        _pending_builds.pop(self.key, None)
        if self.problem is not None:
            raise self.problem
        if self.path is None:
            self.path = build(self.source)  # in a process forked meanwhile: the thread is not here
        library = _loaded.get(self.key)
        if library is None:
            try:
                library = _loaded[self.key] = ctypes.CDLL(str(self.path))
            except OSError as problem:
                raise CompileError(
                    "a built kernel could not be loaded",
                    where=str(problem),
                    next=f"remove {self.path.parent} and try again",
                ) from problem
        return library


def clear_loaded() -> None:
    """Load libraries from the cache again from now on; those in use stay loaded."""
    _loaded.clear()


def _reset_compile_slots() -> None:
    """Allow as many compilers at once as there are cores.

    Called again in a forked child, which has none of the threads that hold a slot.
    """
    global _compile_slots
    _compile_slots = threading.BoundedSemaphore(os.cpu_count() or 1)


_reset_compile_slots()
os.register_at_fork(after_in_child=_reset_compile_slots)


def start_build(source: str) -> Callable[[], ctypes.CDLL]:
    """Start to build a source text in the background. The returned function waits for the library."""
    key = cache.digest(source)
    library = _loaded.get(key)
    if library is not None:
        return lambda: library
    pending = _pending_builds.get(key)  # a waiting thread may remove it at any moment
    if pending is None:
        find_compiler()  # warns here, once, with the caller's line
        pending = _pending_builds[key] = PendingBuild(key, source)
    return pending
