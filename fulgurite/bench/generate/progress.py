"""What a long benchmark is doing: a line on stderr when a part begins, with the seconds so far.

    [  0.2 s] fulgurite: loading
    [  3.1 s] fulgurite: warm-up (21 kernels compiled in 9.8 s)

Kernels that Triton compiles are counted, since a first run may spend most of its time there.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fulgurite.kernels.common.triton_import import HAS_TRITON, triton


class CompileCount:
    """How many kernels were compiled, and the seconds of it. Threads may compile at once."""

    def __init__(self) -> None:
        self.kernels, self.seconds = 0, 0.0
        self._lock = threading.Lock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self.kernels += 1
            self.seconds += seconds

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Count what Triton compiles inside the block."""
        knobs = getattr(triton, "knobs", None) if HAS_TRITON else None
        if knobs is None or not hasattr(knobs.compilation, "listener"):
            yield
            return
        before = knobs.compilation.listener

        def count(**found: Any) -> None:
            if not found["cache_hit"]:
                self.add(found["times"].total / 1e6)
            if before is not None:
                before(**found)

        knobs.compilation.listener = count
        try:
            yield
        finally:
            knobs.compilation.listener = before


class Progress:
    """Prints the parts of a run as they begin and end."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def say(self, text: str) -> None:
        seconds = time.perf_counter() - self.start
        print(f"[{seconds:6.1f} s] {text}", file=sys.stderr, flush=True)

    @contextmanager
    def part(self, text: str) -> Iterator[None]:
        """Say that a part begins, and how long it took."""
        self.say(text)
        begin, compiled = time.perf_counter(), CompileCount()
        with compiled.listen():
            yield
        seconds = time.perf_counter() - begin
        if compiled.kernels:
            kernels = f", {compiled.kernels} kernels compiled in {compiled.seconds:.1f} s"
        else:
            kernels = ""
        self.say(f"{text}: {seconds:.1f} s{kernels}")
