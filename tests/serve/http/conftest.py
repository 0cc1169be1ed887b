"""Servers for tests with real clients; see serving.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.http import serving


@pytest.fixture(scope="module")
def server() -> Iterator[serving.RunningServer]:
    """A server with the mock engine; `script(text)` in a prompt says what it replies.

    It parses <think> and <tool_call>. No test may leave anything behind in it.
    """
    with serving.serve(serving.mock_config(reasoning_parser="think")) as running:
        yield running
        assert running.leaks() == {}


@pytest.fixture(scope="session")
def serve() -> object:
    """`with serve(mock_config(replies=[...])) as server:`; see serving.py."""
    return serving.serve
