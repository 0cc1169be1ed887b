"""C++ source → a loaded library, through the cache.

In: the text of one translation unit that needs no headers of torch. Out: a `ctypes.CDLL`. The key
is source + flags + compiler + processor + version, so a library is never used where it can't run.
The OpenMP runtime is the one torch has already loaded, so both share one pool of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import warnings
from pathlib import Path

from . import cache
from .config import environment
from .errors import CompileError

FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-fwrapv",  # integers wrap, as torch's do
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",  # comparisons may be evaluated on both sides of a branch
    "-ffp-contract=off",  # a*b - a*b is 0, as in torch
)
VERSION = "1"

_loaded: dict[str, ctypes.CDLL] = {}


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
    return subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout


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


def command(path: str, source: Path, target: Path) -> list[str]:
    line = [path, *FLAGS, *machine_flags(), str(source), "-o", str(target)]
    runtime = openmp_library()
    if runtime is not None and not os.path.basename(runtime).startswith("libgomp.so"):
        # a runtime under another name: take its symbols from it, not from a second copy
        line += [runtime]
    return [*line, "-lm"]


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
        if done.returncode:
            raise CompileError(
                "the C++ compiler refused a generated kernel",
                where=done.stderr[:4000],
                next="this is a fault of the fuser: report it with the kernel's source",
            )

    return cache.entry("cpp", key, compile_to, ".so")


def load(source: str) -> ctypes.CDLL:
    """The loaded library of a source text."""
    key = cache.digest(source)
    if key not in _loaded:
        path = build(source)
        try:
            _loaded[key] = ctypes.CDLL(str(path))
        except OSError as problem:
            raise CompileError(
                "a built kernel could not be loaded",
                where=str(problem),
                next=f"remove {path.parent} and try again",
            ) from problem
    return _loaded[key]
