"""C++ source to a loaded library."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fulgurite
from fulgurite import cache, native
from fulgurite.errors import CompileError
from tests.forked import run_program

SOURCE = 'extern "C" __attribute__((visibility("default"))) int answer(void) {{ return {0}; }}'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULGURITE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})


def test_build_and_load() -> None:
    assert native.load(SOURCE.format(42)).answer() == 42
    assert native.load(SOURCE.format(43)).answer() == 43


def test_warm_start_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    path = native.build(SOURCE.format(1))

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(native.subprocess, "run", refuse)
    assert native.build(SOURCE.format(1)) == path
    assert ctypes.CDLL(str(path)).answer() == 1


def test_truncated_library_is_rebuilt() -> None:
    path = native.build(SOURCE.format(5))
    path.write_bytes(path.read_bytes()[:100])
    assert native.load(SOURCE.format(5)).answer() == 5


def test_cache_key_contains_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    first = native.build(SOURCE.format(1))
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-DOTHER"))
    assert native.build(SOURCE.format(1)) != first


def test_rejected_source_shows_the_compiler_error() -> None:
    with pytest.raises(CompileError, match="rejected") as caught:
        native.load("this is no C++")
    assert "this" in str(caught.value)


def test_full_disk_falls_back_to_the_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler reports ENOSPC in its output; the kernel is then built in the private folder."""
    monkeypatch.setattr(cache, "_private_folder", None)
    run = subprocess.run

    def full(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        if command[-1] != "--version" and any(word.startswith(str(tmp_path)) for word in command):
            problem = "ld: final link failed: No space left on device"
            return subprocess.CompletedProcess(command, 1, "", problem)
        return run(command, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(native.subprocess, "run", full)
    with pytest.warns(UserWarning, match=r"can't be written \(No space left on device\)"):
        path = native.build(SOURCE.format(44))
    assert ctypes.CDLL(str(path)).answer() == 44 and not path.is_relative_to(tmp_path)


def test_openmp_is_shared_with_torch() -> None:
    """One thread pool: kernels link the OpenMP library that torch has loaded."""
    library = native.load(
        'extern "C" int omp_get_max_threads(void);'
        'extern "C" __attribute__((visibility("default"))) int max_threads(void)'
        "{ return omp_get_max_threads(); }"
    )
    assert library.max_threads() >= 1
    loaded = {
        line.split()[-1]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "libgomp" in line or "libiomp" in line
    }
    assert len(loaded) == 1, loaded


def test_without_a_compiler_the_fuser_claims_nothing() -> None:
    """One warning, no claims, no error."""
    program = (
        "import warnings\n"
        "warnings.simplefilter('always')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    import torch\n"
        "    from fulgurite import fuser\n"
        "    from torch.fx.experimental.proxy_tensor import make_fx\n"
        "    graph = make_fx(lambda x: x * 2, tracing_mode='fake')(torch.randn(3))\n"
        "    nodes = [n for n in graph.graph.nodes if n.op == 'call_function']\n"
        "    assert nodes and not any(fuser.can_fuse(n) for n in nodes * 3)\n"
        "ours = [w for w in caught if 'compiler' in str(w.message)]\n"
        "assert len(ours) == 1, caught\n"
    )
    environment = {"FULGURITE_CXX": "no-such-compiler", "PATH": "/usr/bin:/bin"}
    done = run_program(program, {**environment, "HOME": "/nonexistent"})
    assert done.returncode == 0, done.stderr


def test_fork_while_all_compile_slots_are_taken() -> None:
    """A forked child has none of the build threads, and must not wait for them."""
    program = (
        "import os, signal, threading\n"
        "from fulgurite import native\n"
        f"source = {SOURCE.format(7)!r}\n"
        "real, go = native.build, threading.Event()\n"
        "native.build = lambda source: go.wait() and real(source)\n"
        "builds = [native.start_build(source + ' ' * k) for k in range(os.cpu_count())]\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    native.build = real\n"
        "    signal.alarm(30)\n"
        "    print(native.load(source + '//').answer(), builds[0]().answer(), flush=True)\n"
        "    os._exit(0)\n"
        "print(os.waitpid(child, 0)[1])\n"
        "go.set()\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "7 7\n0\n", done


@pytest.mark.parametrize("compiler", ["false", "not a program"])
def test_compiler_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    path = tmp_path / "g++"
    path.write_text("#!/bin/false\n" if compiler == "false" else compiler)
    path.chmod(0o700)
    monkeypatch.setattr(native, "find_compiler", lambda: str(path))
    with pytest.raises(CompileError, match="does not run"):
        native.load(SOURCE.format(8))


def test_digest_is_a_safe_file_name() -> None:
    assert cache.digest("x").isalnum()


def _without_openmp(path: str) -> tuple[str, ...]:
    return ("-fopenmp-simd",)


def test_clang_gets_no_gcc_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiler_version", lambda path: "Apple clang version 15.0.0")
    monkeypatch.setattr(native, "is_clang", native.is_clang.__wrapped__)
    monkeypatch.setattr(native, "clang_openmp_flags", _without_openmp)
    line = native.compile_command("/usr/bin/g++", Path("a.cpp"), Path("a.so"))
    assert "-fopenmp-simd" in line and not set(line) & {*native.GCC_FLAGS, "-fopenmp", "-nostdlib"}


@pytest.mark.skipif(shutil.which("clang++") is None, reason="needs clang++")
@pytest.mark.parametrize("threads", [False, True])
def test_kernels_built_by_clang(monkeypatch: pytest.MonkeyPatch, threads: bool) -> None:
    """A transpose, which shuffles lanes, and a norm, with and without an OpenMP runtime."""
    path = shutil.which("clang++")
    if threads and native.clang_openmp_flags(path) != ("-fopenmp",):
        pytest.skip("clang++ has no OpenMP runtime here")
    if not threads:
        monkeypatch.setattr(native, "clang_openmp_flags", _without_openmp)
    monkeypatch.setattr(native, "find_compiler", lambda: path)
    x = torch.randn(67, 129)
    for function in (lambda x: (x.t() + 1).contiguous(), lambda x: torch.softmax(x, -1)):
        torch.testing.assert_close(fulgurite.fuse(function)(x), function(x))


CHAIN = """
typedef float vec __attribute__((vector_size(64)));
#pragma GCC optimize("fp-contract=fast")
extern "C" vec chain(const vec* a, const float* x, long n) {
  vec total = {};
  for (long i = 0; i < n; ++i) total = total + a[i] * x[i];
  return total;
}
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 instructions")
def test_multiply_adds_are_fused_where_a_tuning_would_avoid_it(tmp_path: Path) -> None:
    """g++ leaves FMAs out of chains for some CPUs: a row's bits would depend on the unrolled tile."""
    path = native.find_compiler()
    if path is None or native.is_clang(path) or " fma " not in native.cpu_fingerprint():
        pytest.skip("needs g++ and a CPU with FMA")
    source, target = tmp_path / "chain.cpp", tmp_path / "chain.s"
    source.write_text(CHAIN)
    line = native.compile_command(path, source, target)
    tuned = [line[0], "--param=avoid-fma-max-bits=512", *line[1:], "-S"]
    subprocess.run([f for f in tuned if f != "-shared"], check=True)
    text = target.read_text()
    assert "vfmadd" in text and "vmulps" not in text
