"""What every test runs under: verified traces, a cache of its own, fixed seeds, a clean TorchDynamo."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator

import numpy
import pytest
import torch
import torch._dynamo

# Set before any test module is imported: some read settings at import time.
os.environ["FULGURITE_VERIFY"] = "1"
_folder = tempfile.TemporaryDirectory(prefix="fulgurite-tests-")
os.environ["FULGURITE_CACHE"] = os.path.join(_folder.name, "cache")
os.environ["FULGURITE_REPRO"] = os.path.join(_folder.name, "repro")


def pytest_configure(config: pytest.Config) -> None:
    """Without -m, leave the slow suites out; `-m slow` runs them."""
    if not config.option.markexpr:
        config.option.markexpr = "not slow"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test starts with the same random numbers and nothing captured."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
