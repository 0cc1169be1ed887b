"""Deterministic mode: the results of a request depend on that request alone (batch invariance).

    with fulgurite.deterministic():
        logits = compiled_model(token_ids, positions)

In this mode every operator computes a row (a token, a query) in an order of additions that depends
neither on the other rows of the call, nor on how a prompt is cut into chunks, nor on what a cache
holds already. The engine on a CPU runs in it by default, and forward passes in it give the log-
probabilities of the engine to the bit. docs/determinism.md says what it covers and costs.

The mode belongs to a thread. `fulgurite.compile` reads it while a graph is captured.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class _Mode(threading.local):
    """Without a class attribute: TorchDynamo of torch 2.11 would read that one in every thread."""

    def __init__(self) -> None:
        self.is_enabled = False


_mode = _Mode()


def is_deterministic() -> bool:
    """Whether the calling thread is in deterministic mode."""
    return _mode.is_enabled


@contextlib.contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Run the block in deterministic mode; `enabled=False` leaves the mode for the block."""
    before = _mode.is_enabled
    _mode.is_enabled = enabled
    try:
        yield
    finally:
        _mode.is_enabled = before
