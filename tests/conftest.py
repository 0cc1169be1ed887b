"""What every test runs under: verified traces, a cache of its own, fixed seeds, a clean TorchDynamo."""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
import torch
import torch._dynamo
from torch.profiler import ProfilerActivity, profile

# Set before any test module is imported: some read settings at import time.
os.environ["FULGURITE_VERIFY"] = "1"
# Which executor wins a region must not depend on how busy the machine is.
os.environ["FULGURITE_TUNE"] = "0"
# oneDNN's bfloat16 convolutions die of an illegal instruction where a virtual machine shows AMX but forbids it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
_folder = tempfile.TemporaryDirectory(prefix="fulgurite-tests-")
os.environ.setdefault("FULGURITE_CACHE", os.path.join(_folder.name, "cache"))  # workers share it
os.environ["FULGURITE_REPRO"] = os.path.join(_folder.name, "repro")


def pytest_configure(config: pytest.Config) -> None:
    """Without -m, leave the slow suites out; `-m slow` runs them. No test fails for being slow."""
    if importlib.util.find_spec("hypothesis"):
        from hypothesis import HealthCheck, settings

        settings.register_profile(
            "fulgurite", deadline=None, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("fulgurite")
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests marked `gpu` need one."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test starts with the same random numbers and nothing captured."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield


@pytest.fixture
def torch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single torch ops by default: for tests that look at each op, or at the numbers torch draws."""
    monkeypatch.setattr("fulgurite.options.DEFAULT_EXECUTORS", ("torch",))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept", action="store_true", help="write golden files anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with tests/golden/NAME; `pytest --accept` writes it instead."""

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
    """The most bytes of torch's on the CPU that live at once during a call, above what lived before it."""
    from fulgurite.fuser.runtime import memory_pool

    def measure(call: Callable[..., object], *inputs: object) -> int:
        call(*inputs)  # what is warm stays
        kinds = [ProfilerActivity.CPU]
        memory_pool.set_reuse(False)  # kept blocks are not torch's: nobody would see them
        try:
            with profile(activities=kinds, profile_memory=True, acc_events=True) as seen:
                call(*inputs)
        finally:
            memory_pool.set_reuse(True)
        assert seen.profiler is not None and seen.profiler.kineto_results is not None
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            peak = max(peak, live)
        return peak

    return measure
