"""Triton where it is installed, placeholders where it is not.

    from fulgurite.kernels.common.triton_import import TensorDescriptor, tl, triton

In: nothing. Out: `triton`, `tl` (`triton.language`), `TensorDescriptor`, `HAS_TRITON`, and
`INTERPRETED`, which says whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1).

Kernel registries hold functions, so every kernel module is imported on every machine. A CPU install
has no Triton. There `@triton.jit` gives a `MissingKernel`, which raises when it is launched, and
all other names give a `Placeholder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from fulgurite.errors import CompileError

triton: Any
tl: Any
TensorDescriptor: Any


class MissingKernel:
    """A Triton kernel on a machine without Triton: it can be imported, but not launched."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.fn = function
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> NoReturn:
        raise self._error()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error()

    def _error(self) -> CompileError:
        return CompileError(
            f"the Triton kernel {self.__name__} can't run: Triton is not installed",
            next="pip install triton (Linux), or use the CPU kernels",
        )


class Placeholder:
    """A name of Triton where Triton is missing: any attribute; `value` of a constant."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder()


class TritonPlaceholder(Placeholder):
    """Stands for `triton`, `triton.experimental.gluon` and their `language` modules."""

    JITFunction = MissingKernel
    constexpr = Placeholder

    @staticmethod
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return MissingKernel if function is None else MissingKernel(function)


try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
    from triton.tools.tensor_descriptor import TensorDescriptor  # type: ignore[no-redef]
except ImportError:
    triton = tl = TritonPlaceholder()
    TensorDescriptor = Placeholder
    HAS_TRITON = INTERPRETED = False
else:
    HAS_TRITON = True
    INTERPRETED = bool(triton.knobs.runtime.interpret)
