"""C++ source → a loaded library, through the cache.

In: the text of one translation unit that needs no headers of torch. Out: a `ctypes.CDLL`. The key
is source + flags + compiler + processor + version, so a library is never used where it can't run.
The OpenMP runtime is the one torch has already loaded, so both share one pool of threads. `begin`
builds in the background: the kernels of a graph are compiled side by side.
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
from fulgurite.config import environment
from fulgurite.errors import CacheError, CompileError

INCLUDE = (
    Path(__file__).parent / "include"
)  # C++ headers that generated and hand-written kernels share
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fwrapv",  # integers wrap, as torch's do
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",  # comparisons may be evaluated on both sides of a branch
    "-ffp-contract=off",  # a*b - a*b is 0, as in torch
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-asynchronous-unwind-tables",
    "-pipe",
)
GCC_FLAGS = (
    "-fno-thread-jumps",  # a clamp stays two selects instead of three ways through the loop
    "-fno-tree-pre",
)
VERSION = "2"

_loaded: dict[str, ctypes.CDLL] = {}
_building: dict[str, Build] = {}
_compilers: threading.BoundedSemaphore


@functools.cache
def compiler() -> str | None:
    """The C++ compiler, or None (with one warning) where there is none."""
    asked = environment("FULGURITE_CXX")
    for name in [asked] if asked else ["g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    warnings.warn(
        f"no C++ compiler found ({asked or 'g++ or clang++'}): CPU kernels are not generated and "
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
def processor() -> str:
    """What `-march=native` depends on."""
    text = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return text + platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part")
    found = dict.fromkeys(line for line in lines if line.split("\t")[0].strip() in wanted)
    return text + "\n".join(found)


@functools.cache
def machine_flags() -> tuple[str, ...]:
    flags = ["-march=native"]
    if platform.machine() == "x86_64":
        flags.append("-mprefer-vector-width=512")
    return tuple(flags)


@functools.cache
def openmp_library() -> str | None:
    """The file of the OpenMP runtime this process already uses, if one is loaded."""
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
    """By what it says: on some systems clang goes by the name g++."""
    return "clang" in compiler_version(path)


@functools.cache
def clang_openmp(path: str) -> tuple[str, ...]:
    """Threads need clang's own OpenMP runtime; where that is not installed, kernels run on one."""
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
def gathers(path: str) -> bool:
    """Does g++ know this name of the choice to load a vector from many places? A loop with a table in it
    is not SIMD without it, and the tuning for unknown processors has it off."""
    found = re.search(r"\) (\d+)\.", compiler_version(path))
    return found is not None and 8 <= int(found[1]) <= 13


def command(path: str, source: Path, target: Path) -> list[str]:
    line = [path, *FLAGS, *machine_flags(), str(source), "-o", str(target)]
    runtime = openmp_library()
    named = runtime is not None and not os.path.basename(runtime).startswith("libgomp.so")
    # a runtime under another name: take its symbols from it, not from a second copy
    openmp = [str(runtime)] if named else []
    if is_clang(path):
        return [*line, *clang_openmp(path), "-w", "-lm"]
    line += ["-fopenmp", *GCC_FLAGS]
    if platform.machine() == "x86_64" and gathers(path):
        line.append("-mtune-ctrl=use_gather")
    # without the C++ library, which the text doesn't use, linking takes a third of the time
    return [*line, "-nostdlib", *(openmp or ["-lgomp"]), "-lm", "-lgcc", "-lc"]


def build(source: str) -> Path:
    """The shared library of a source text; compiled where the cache doesn't have it."""
    path = compiler()
    if path is None:
        raise CompileError("there is no C++ compiler", next="install g++ or set FULGURITE_CXX")
    flags = " ".join(command(path, Path("source.cpp"), Path("library.so")))
    key = cache.digest(source, flags, compiler_version(path), processor(), VERSION)

    def compile_to(target: Path) -> None:
        text = target.with_suffix(".cpp")
        text.write_text(source)
        done = subprocess.run(command(path, text, target), capture_output=True, text=True)
        full = os.strerror(errno.ENOSPC)
        if done.returncode and full in done.stderr:
            raise OSError(errno.ENOSPC, full, str(target))  # the cache has another folder for it
        if done.returncode:
            raise CompileError(
                "the C++ compiler refused a generated kernel",
                where=done.stderr[:4000],
                next="this is a fault of the fuser: report it with the kernel's source",
            )

    return cache.entry("cpp", key, compile_to, ".so")


def load(source: str) -> ctypes.CDLL:
    """The loaded library of a source text."""
    return begin(source)()


class Build:
    """A library that a thread of its own builds or finds; calling this waits for it."""

    def __init__(self, key: str, source: str) -> None:
        self.key, self.source = key, source
        self.path: Path | None = None
        self.problem: Exception | None = None
        self.thread = threading.Thread(target=self._build, name="fulgurite build", daemon=True)
        self.thread.start()

    def _build(self) -> None:
        with _compilers:
            try:
                self.path = build(self.source)
            except (CompileError, CacheError, OSError) as problem:
                self.problem = problem  # for whoever waits

    def __call__(self) -> ctypes.CDLL:
        self.thread.join()
        _building.pop(self.key, None)
        if self.problem is not None:
            raise self.problem
        if self.path is None:
            self.path = build(self.source)  # a process forked meanwhile has not the thread
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


def forget() -> None:
    """Libraries asked for from now on are read from the cache again; those in use stay."""
    _loaded.clear()


def _allow_compilers() -> None:
    """As many at once as there are cores. A forked child has none of the threads that hold a turn."""
    global _compilers
    _compilers = threading.BoundedSemaphore(os.cpu_count() or 1)


_allow_compilers()
os.register_at_fork(after_in_child=_allow_compilers)


def begin(source: str) -> Callable[[], ctypes.CDLL]:
    """Starts building a source text, as many at once as there are cores; the result waits for it."""
    key = cache.digest(source)
    library = _loaded.get(key)
    if library is not None:
        return lambda: library
    build = _building.get(key)  # another thread that waits for it takes it out at any moment
    if build is None:
        compiler()  # warns here, once, on the caller's line
        build = _building[key] = Build(key, source)
    return build
