"""Programmatic dependent launch (PDL), host side: the region in which kernels may overlap.

In: `with pdl_region():` around a step of a model. Out: `in_pdl_region()`, which launchers read.

With PDL a kernel starts while the previous kernel of its stream still runs, and reads some inputs
before that one is done (`triton_pdl.py`). Inside a region these are weights, sequence lengths and
block tables: the caller promises that no kernel of the region writes them. Outside of a region
there is no such promise, so kernels launch without PDL.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _State(threading.local):
    depth = 0


_state = _State()


@contextmanager
def pdl_region() -> Iterator[None]:
    """Launch kernels with PDL: none of them writes a weight, a block table or a sequence length."""
    _state.depth += 1
    try:
        yield
    finally:
        _state.depth -= 1


def in_pdl_region() -> bool:
    """Whether the calling thread is inside a `pdl_region`."""
    return _state.depth > 0
