"""TEST_EVERY=n takes every nth test of a process: what test_interpreted.py does with a slow interpreter."""

from __future__ import annotations

import os


def pytest_collection_modifyitems(items):
    items[:] = items[:: int(os.environ.get("TEST_EVERY", "1"))]
