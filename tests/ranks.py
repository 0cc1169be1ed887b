"""Rank processes of tests: kept over many tests, forked from a process with all imports done."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fulgurite.parallel.processes import launch
from fulgurite.parallel.processes.launch import RankPool

# What a rank would import for a second or more: the fork server imports it once per pytest process.
PRELOADED = (
    "tests.garbage",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.export",
    "fulgurite.compile",
    "fulgurite.serve",
    "fulgurite.train.trainer",
    "tests.parallel.engine_cases",
    "tests.train.fault_worker",
    "tests.train.parallel.model_parallel_cases",
)


Value = TypeVar("Value")
_open: dict[Hashable, Any] = {}


def preload_rank_imports() -> None:
    """Call it before the first rank: the fork server starts with that one.

    Not on a machine with a GPU: some of these imports ask for the GPUs, and CUDA can't be used after a fork.
    """
    if torch.cuda.is_available():
        return
    launch.PRELOADED_MODULES[:] = dict.fromkeys([*launch.PRELOADED_MODULES, *PRELOADED])


class TestRankPool(RankPool):
    """Ranks that close after each function what `open_once` made in it.

    A thread of each gloo group polls a hundred times a second. Ranks that kept the groups of all tests
    took a tenth of a core and more each while they waited for the next one.
    """

    __test__ = False

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        launch._pickle_call(function, arguments)  # its error names the function of the test
        return super().run(_run_and_close, function, arguments)


def _run_and_close(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        result = function(*arguments)
        if _open and dist.is_initialized():
            dist.barrier()  # nobody leaves while others wait for it
        return result
    finally:
        while _open:
            value = _open.popitem()[1]
            if hasattr(value, "close"):
                value.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def open_once(key: Hashable, make: Callable[[], Value]) -> Value:
    """On a rank: what `make` returns, a mesh or what has one, until the function of the test ends."""
    if key not in _open:
        _open[key] = make()
    value: Value = _open[key]
    return value


@contextmanager
def keep_pools(
    failure_grace: float = launch.FAILURE_GRACE, *, closes_meshes: bool = True
) -> Iterator[Callable[[int], RankPool]]:
    """`get(4)`: four processes, started when first asked for, and anew after a failure.

    `closes_meshes`: not where torch keeps groups by name, as in its caches of functions of DTensors.
    """
    make = TestRankPool if closes_meshes else RankPool
    running: dict[int, RankPool] = {}

    def get(count: int) -> RankPool:
        if count not in running or not running[count].is_alive:
            running[count] = make(count, failure_grace=failure_grace)
        return running[count]

    try:
        yield get
    finally:
        for pool in running.values():
            pool.close()
