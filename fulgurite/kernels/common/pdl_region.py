"""Steps whose kernels may overlap: where nothing writes a weight, nor the numbers of the step.

In: `with chain():` around a step of a model. Out: `in_chain()`, which kernels ask. A kernel of a chain may
read weights, and the lengths and tables of its sequences, before the kernel in front of it is done
(`triton/early.py`); outside of one the kernel in front could be what writes them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State(threading.local):
    depth = 0


_state = _State()


@contextmanager
def chain() -> Iterator[None]:
    """Within it no kernel writes a weight, or where sequences are and how long."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def in_chain() -> bool:
    return _state.depth > 0
