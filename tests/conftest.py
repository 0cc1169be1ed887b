"""Settings of every test: verified traces, a private cache, fixed seeds, a clean TorchDynamo."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import logging
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
import torch._dynamo
from torch.profiler import ProfilerActivity, profile

import tests.garbage  # noqa: F401
from tests.covering import mark_uncovering

# Set before test modules are imported: some read settings at import time.
os.environ["FULGURITE_VERIFY"] = "1"
os.environ["FULGURITE_STRICT"] = "1"  # a failure is an error, not a fallback to torch
# Which executor runs a region must not depend on the load of the machine.
os.environ["FULGURITE_AUTOTUNE"] = "0"
# As `launch.rank_environment` says; tests are ranks, too. A read of the resolver's settings, so before its first use.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")
# oneDNN's bfloat16 convolutions hit an illegal instruction if a virtual machine shows AMX but forbids it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
_folder = tempfile.TemporaryDirectory(prefix="fulgurite-tests-")
os.environ.setdefault(
    "FULGURITE_CACHE_DIR", os.path.join(_folder.name, "cache")
)  # xdist workers share it
os.environ["FULGURITE_REPRO_DIR"] = os.path.join(_folder.name, "repro")
# Processes of tests import from bytecode, also if the environment says not to write it: reading the 430
# test files took 39 s of CPU time without and 21 s with it, and every process that a test starts 0.4 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# pytest listens to loggers that don't propagate. torch fills this one, with all it captures, if anybody listens.
logging.getLogger("torch.__trace").propagate = True


def pytest_configure(config: pytest.Config) -> None:
    """Without -m, skip the slow suites; `-m slow` runs them. No test fails for being slow."""
    from tests.ranks import preload_rank_imports  # reads settings, so not earlier

    preload_rank_imports()
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "fulgurite", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("fulgurite")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_uncovering(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked `gpu` without a GPU."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


# without a GPU: `torch.manual_seed` formats a stack for each kind of GPU, 0.1 ms for each of 20,000 tests
_seed_torch = (
    torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
)
_finished_files = itertools.count(1)
FILES_PER_FULL_COLLECTION = 40


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file: take what lives on (modules, caches of torch) out of later garbage collections.

    A process of the suite has millions of objects: late in a run, a full collection took 4 s.
    """
    if nextitem is None or nextitem.path != item.path:
        if next(_finished_files) % FILES_PER_FULL_COLLECTION == 0:
            gc.unfreeze()
        torch._dynamo.reset()  # else the last test's graphs would be kept
        gc.collect()
        gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # Triton's bindings count what is left at exit


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Seed all random generators and reset TorchDynamo before each test; restore our settings after it."""
    random.seed(0)
    numpy.random.seed(0)
    _seed_torch(0)
    torch._dynamo.reset()
    before, log = _read_settings(), logging.getLogger("fulgurite")
    handlers, level, propagate = [*log.handlers], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = (
        handlers,
        propagate,
    )  # one may print to what the test has captured
    log.setLevel(level)
    for name in _read_settings().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _read_settings() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if name.startswith("FULGURITE_")}


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Default to the torch executor: for tests that look at single ops or at torch's random numbers."""
    monkeypatch.setattr("fulgurite.options.DEFAULT_EXECUTORS", ("torch",))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="overwrite golden files")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME. `pytest --accept` overwrites the file."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "golden" / name
        if request.config.getoption("--accept"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {name}: run pytest --accept and read what it wrote"
        assert text == path.read_text(), f"{name} changed: if it should, run pytest --accept"

    return check


@pytest.fixture
def peak_bytes() -> Callable[..., int]:
    """Peak bytes that torch allocates on the CPU during a call, above what was allocated before."""
    from fulgurite.fuser.runtime import memory_pool

    def measure(call: Callable[..., object], *inputs: object) -> int:
        call(*inputs)  # what is warm stays
        kinds = [ProfilerActivity.CPU]
        memory_pool.set_pooling(False)  # pooled blocks are not torch's, so a leak would not show
        try:
            with profile(activities=kinds, profile_memory=True, acc_events=True) as seen:
                call(*inputs)
        finally:
            memory_pool.set_pooling(True)
        assert seen.profiler is not None and seen.profiler.kineto_results is not None
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    return measure
