"""TEST_EVERY=n runs every nth test of a process; test_interpreted.py uses it."""

from __future__ import annotations

import os


def pytest_collection_modifyitems(items):
    items[:] = items[:: int(os.environ.get("TEST_EVERY", "1"))]
