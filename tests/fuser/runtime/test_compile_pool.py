"""The compile pool: workers fill Triton's cache, and threads compile where there are no workers."""

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

from fulgurite.fuser.lowering import has_triton
from fulgurite.fuser.runtime import compile_pool, compile_worker
from fulgurite.fuser.runtime.compile_pool import MAX_LOCAL_COMPILES, CompilePool, WorkerProcesses
from fulgurite.fuser.runtime.compile_worker import CompileJob

needs_compiler = pytest.mark.skipif(
    not has_triton() or "TRITON_INTERPRET" in os.environ, reason="no Triton that compiles"
)
OPTIONS = {"num_warps": 4, "num_stages": 2, "debug": False, "enable_fp_fusion": False}
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
def job(tmp_path: Path) -> CompileJob:
    path = tmp_path / "kernels_0123456789abcdef.py"
    path.write_text(TEXT)
    folder = str(tmp_path / "built")
    return CompileJob(
        str(path), "larger", ("*fp32",) * 3, (0, 1, 2), OPTIONS, ("cuda", 90, 32), folder
    )


@pytest.fixture
def workers() -> Iterator[WorkerProcesses]:
    created = WorkerProcesses(2)
    yield created
    if not created.has_ended:
        created._channel.shutdown(socket.SHUT_RDWR)


def is_cached(job: CompileJob) -> list[bool]:
    """Whether Triton's cache had the kernel when this process jobs for it."""
    import triton

    found: list[bool] = []
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = job.cache_dir
        triton.knobs.compilation.listener = lambda **event: found.append(event["cache_hit"])
        module = compile_worker.load_module(job.path)
        assert compile_worker.compile_kernel(getattr(module, job.name), job).asm["cubin"]
    return found


def until(met: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


@needs_compiler
def test_worker_fills_the_cache_of_this_process(workers: WorkerProcesses, job: CompileJob) -> None:
    assert workers.compile(job)
    assert is_cached(job) == [True]
    assert is_cached(replace(job, divisible_arguments=())) == [False], (
        "another variant is another kernel"
    )


@needs_compiler
def test_failed_jobs_and_dead_workers_are_reported(
    workers: WorkerProcesses, job: CompileJob
) -> None:
    assert not workers.compile(replace(job, name="wrong"))
    assert not workers.compile(replace(job, path=job.path + ".gone"))
    assert workers.compile(job), "an error ends one job, not the process"
    first = workers._process.pid
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)
    until(lambda: workers.has_ended)
    assert workers.has_failed and not workers.compile(job)
    until(lambda: workers._process.returncode is not None)


@needs_compiler
def test_idle_workers_exit(job: CompileJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_pool, "IDLE_SECONDS", 0.3)
    created = WorkerProcesses(1)
    assert created.compile(job), "a job that takes longer than that is waited for"
    until(lambda: created.has_ended)
    assert not created.has_failed and not created.compile(job)
    until(lambda: created._process.returncode == 0)


class FakeWorkers:
    """Workers that record their jobs."""

    created: list[FakeWorkers]

    def __init__(self, number: int) -> None:
        self.is_ready = self.has_ended = self.has_failed = False
        self.jobs: list[CompileJob] = []
        self.created.append(self)

    def compile(self, job: CompileJob) -> bool:
        self.jobs.append(job)
        return True


@pytest.fixture
def fake_workers(monkeypatch: pytest.MonkeyPatch) -> list[FakeWorkers]:
    monkeypatch.setattr(FakeWorkers, "created", [], raising=False)
    monkeypatch.setattr(compile_pool, "WorkerProcesses", FakeWorkers)
    monkeypatch.setattr(compile_pool, "MIN_CORES", 0)
    return FakeWorkers.created


def test_few_kernels_need_no_workers(fake_workers: list[FakeWorkers], job: CompileJob) -> None:
    pool = CompilePool()
    for _ in range(3 * MAX_LOCAL_COMPILES):
        with pool.offload(job):
            pass
    assert not fake_workers
    with ExitStack() as stack:
        for _ in range(MAX_LOCAL_COMPILES):
            stack.enter_context(pool.offload(job))
        assert not fake_workers
        stack.enter_context(pool.offload(job))
        assert len(fake_workers) == 1 and len(fake_workers[0].jobs) == 1
    with pool.offload(job):  # they are not ready yet, and threads have room
        assert len(fake_workers[0].jobs) == 1


def test_ready_workers_are_used_and_replaced(
    fake_workers: list[FakeWorkers], job: CompileJob
) -> None:
    pool = CompilePool()
    pool.start_workers()
    fake_workers[0].is_ready = True
    with pool.offload(job):
        assert len(fake_workers[0].jobs) == 1
    fake_workers[0].has_ended = True
    pool.start_workers()
    assert len(fake_workers) == 2
    fake_workers[1].has_ended = fake_workers[1].has_failed = True
    for _ in range(3):
        pool.start_workers()
        with pool.offload(job), pool.offload(job), pool.offload(job):
            pass
    assert len(fake_workers) == 2 and not fake_workers[1].jobs, "what dies is not started again"


def test_few_cores_use_no_workers(
    fake_workers: list[FakeWorkers], job: CompileJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_pool, "MIN_CORES", 1 << 10)
    pool = CompilePool()
    pool.start_workers()
    with ExitStack() as stack:
        for _ in range(2 * MAX_LOCAL_COMPILES):
            stack.enter_context(pool.offload(job))
    assert not fake_workers


def test_ranks_share_the_cores_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert compile_pool.worker_count() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compile_pool.worker_count() == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert compile_pool.worker_count() == 1


@needs_compiler
def test_forked_child_has_its_own_pool(job: CompileJob) -> None:
    before = compile_pool.compile_pool()
    child = os.fork()
    if child == 0:
        os._exit(compile_pool.compile_pool() is before)
    assert os.waitpid(child, 0)[1] == 0
    assert compile_pool.compile_pool() is before


@needs_compiler
def test_threads_share_the_workers(workers: WorkerProcesses, job: CompileJob) -> None:
    variants = [replace(job, divisible_arguments=tuple(range(k))) for k in range(4)]
    found: list[bool] = []
    threads = [
        threading.Thread(target=lambda one=one: found.append(workers.compile(one)))
        for one in variants
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert [is_cached(one) for one in variants] == [[True]] * 4
