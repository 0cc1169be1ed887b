"""TEST_EVERY=n runs every nth test of a process; test_interpreted.py uses it. Tests share no plans."""

from __future__ import annotations

import os

import pytest

from fulgurite.kernels.common.launch_plan import clear_plans


def pytest_collection_modifyitems(items):
    items[:] = items[:: int(os.environ.get("TEST_EVERY", "1"))]


@pytest.fixture(autouse=True)
def _fresh_launch_plans():
    """Forget recorded launches: a test may have changed launch parameters."""
    clear_plans()
    yield
