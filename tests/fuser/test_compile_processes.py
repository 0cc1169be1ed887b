"""Kernels compiled by other processes: the same entries of Triton's cache, and threads where there are none."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fulgurite.fuser.pipeline_triton import installed
from fulgurite.fuser.runtime import compile_pool, compile_worker
from fulgurite.fuser.runtime.compile_pool import FEW, Compilers, Processes
from fulgurite.fuser.runtime.compile_worker import Recipe

needs_compiler = pytest.mark.skipif(
    not installed() or "TRITON_INTERPRET" in os.environ, reason="no Triton that compiles"
)
OPTIONS = {"num_warps": 4, "num_stages": 2, "debug": False, "enable_fp_fusion": True}
TEXT = """
import triton
import triton.language as tl
from fulgurite.fuser.codegen.triton.device_functions import nan_max


@triton.jit
def larger(a, b, out):
    i = tl.arange(0, 128)
    tl.store(out + i, nan_max(tl.load(a + i), tl.load(b + i)))


@triton.jit
def wrong(a, b, out):
    tl.store(out, no_such_name)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    path = tmp_path / "kernels_0123456789abcdef.py"
    path.write_text(TEXT)
    folder = str(tmp_path / "built")
    return Recipe(str(path), "larger", ("*fp32",) * 3, (0, 1, 2), OPTIONS, ("cuda", 90, 32), folder)


@pytest.fixture
def processes() -> Iterator[Processes]:
    made = Processes(2)
    yield made
    if not made.ended:
        made._channel.shutdown(socket.SHUT_RDWR)


def built_here(recipe: Recipe) -> list[bool]:
    """Whether Triton's cache had the kernel when this process asked for it."""
    import triton

    found: list[bool] = []
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = recipe.folder
        triton.knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
        module = compile_worker.load(recipe.path)
        assert compile_worker.build(getattr(module, recipe.name), recipe).asm["cubin"]
    return found


def until(met: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


@needs_compiler
def test_a_process_compiles_what_this_one_then_finds(processes: Processes, recipe: Recipe) -> None:
    assert processes.compile(recipe)
    assert built_here(recipe) == [True]
    assert built_here(replace(recipe, even=())) == [False], "another variant is another kernel"


@needs_compiler
def test_what_fails_is_said_and_what_dies_is_noticed(processes: Processes, recipe: Recipe) -> None:
    assert not processes.compile(replace(recipe, name="wrong"))
    assert not processes.compile(replace(recipe, path=recipe.path + ".gone"))
    assert processes.compile(recipe), "an error ends one job, not the process"
    first = processes._process.pid
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)
    until(lambda: processes.ended)
    assert processes.failed and not processes.compile(recipe)
    until(lambda: processes._process.returncode is not None)


@needs_compiler
def test_processes_that_nobody_asks_end(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "IDLE", 0.3)
    made = Processes(1)
    assert made.compile(recipe), "a job that takes longer than that is waited for"
    until(lambda: made.ended)
    assert not made.failed and not made.compile(recipe)
    until(lambda: made._process.returncode == 0)


class Pretended:
    """Processes that note what they are asked."""

    made: list[Pretended]

    def __init__(self, number: int) -> None:
        self.ready = self.ended = self.failed = False
        self.asked: list[Recipe] = []
        self.made.append(self)

    def compile(self, recipe: Recipe) -> bool:
        self.asked.append(recipe)
        return True


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[Pretended]:
    monkeypatch.setattr(Pretended, "made", [], raising=False)
    monkeypatch.setattr(compile_pool, "Processes", Pretended)
    monkeypatch.setattr(compile_pool, "LEAST_CORES", 0)
    return Pretended.made


def test_a_few_kernels_need_no_processes(pretended: list[Pretended], recipe: Recipe) -> None:
    compilers = Compilers()
    for _ in range(3 * FEW):
        with compilers.beside(recipe):
            pass
    assert not pretended
    with ExitStack() as stack:
        for _ in range(FEW):
            stack.enter_context(compilers.beside(recipe))
        assert not pretended
        stack.enter_context(compilers.beside(recipe))
        assert len(pretended) == 1 and len(pretended[0].asked) == 1
    with compilers.beside(recipe):  # they are not ready yet, and threads have room
        assert len(pretended[0].asked) == 1


def test_processes_that_are_ready_are_asked_and_replaced(
    pretended: list[Pretended], recipe: Recipe
) -> None:
    compilers = Compilers()
    compilers.expect()
    pretended[0].ready = True
    with compilers.beside(recipe):
        assert len(pretended[0].asked) == 1
    pretended[0].ended = True
    compilers.expect()
    assert len(pretended) == 2
    pretended[1].ended = pretended[1].failed = True
    for _ in range(3):
        compilers.expect()
        with compilers.beside(recipe), compilers.beside(recipe), compilers.beside(recipe):
            pass
    assert len(pretended) == 2 and not pretended[1].asked, "what dies is not started again"


def test_a_small_machine_has_none(
    pretended: list[Pretended], recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_pool, "LEAST_CORES", 1 << 10)
    compilers = Compilers()
    compilers.expect()
    with ExitStack() as stack:
        for _ in range(2 * FEW):
            stack.enter_context(compilers.beside(recipe))
    assert not pretended


def test_ranks_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert compile_pool.count() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compile_pool.count() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert compile_pool.count() == 1


@needs_compiler
def test_a_forked_child_starts_its_own(recipe: Recipe) -> None:
    before = compile_pool.compilers()
    child = os.fork()
    if child == 0:
        os._exit(compile_pool.compilers() is before)
    assert os.waitpid(child, 0)[1] == 0
    assert compile_pool.compilers() is before


@needs_compiler
def test_many_threads_share_the_processes(processes: Processes, recipe: Recipe) -> None:
    variants = [replace(recipe, even=tuple(range(k))) for k in range(4)]
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(processes.compile(one)))
        for one in variants
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert [built_here(one) for one in variants] == [[True]] * 4
