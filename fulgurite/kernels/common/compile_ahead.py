"""Compile Triton kernels side by side: a block of code in, its kernels compiled, none of them run.

    with compile_ahead(threads=16):
        step()                          every `cached_launch` kernel compiles in a thread

Triton compiles a kernel at its first launch, one after the other, about a second each. Inside the
block a launch only starts a compilation; the block ends when all are done. Nothing that these kernels
would write is written, so the block must not keep its results. New tensors are zeros instead of
uninitialized: as indices they are in range for the torch operators between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
ALLOCATIONS = (
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
)


class CompileAhead:
    """Whether launches only compile. Kernels ask at every launch, so this is one attribute."""

    def __init__(self) -> None:
        self.is_active = False


COMPILE_AHEAD = CompileAhead()


class ZeroAllocations(TorchDispatchMode):
    """New tensors are zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "overloadpacket", None) in ALLOCATIONS and isinstance(result, Tensor):
            is_packed = result.element_size() == 1 and result.is_contiguous()
            (result.view(torch.uint8) if is_packed else result).zero_()
        return result


def can_compile_ahead() -> bool:
    """Whether this Triton compiles in threads (3.5 and later)."""
    try:
        from triton.runtime import _async_compile
    except ImportError:
        return False
    return hasattr(_async_compile, "AsyncCompileMode")


@contextmanager
def compile_ahead(threads: int) -> Iterator[None]:
    """Launches of `cached_launch` kernels inside the block compile and don't run."""
    from triton.runtime import _async_compile, driver

    class CompileMode(_async_compile.AsyncCompileMode):  # type: ignore[misc]
        """Compiles the launcher of a kernel, too: Triton 3.6 runs a C compiler for it."""

        def submit(self, key: Any, compile_fn: Callable[[], Any], *callbacks: Any) -> Any:
            def compile_both() -> Any:
                kernel = compile_fn()
                driver.active.launcher_cls(kernel.src, kernel.metadata)
                return kernel

            return super().submit(key, compile_both, *callbacks)

    assert not COMPILE_AHEAD.is_active, "blocks don't nest"
    with ThreadPoolExecutor(threads, thread_name_prefix="fulgurite-compile") as executor:
        mode = CompileMode(executor)
        try:
            with mode, ZeroAllocations():
                COMPILE_AHEAD.is_active = True
                yield
                COMPILE_AHEAD.is_active = False
        finally:
            COMPILE_AHEAD.is_active = False
            _async_compile.active_mode.set(None)  # Triton keeps it after a compile error
