"""Fallback: a region that can't be built or launched runs with another schedule, then with torch.

In: a lowered region, and the region as torch runs it. Out: `GuardedRegion`, a callable. It runs the
generated kernels as long as they can be compiled, loaded and launched. Errors of the program itself
(an index out of range, no memory) and of the device (a device-side assert) are raised.

This file is the one boundary of region lowering and launch that catches every exception: any failure of
ours must not become the user's. Each one is reported: by a `FallbackWarning`, in the trace and by
`explain`. With `FULGURITE_STRICT=1` it is raised instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fulgurite.config import settings
from fulgurite.errors import FulguriteError

ANOTHER_SCHEDULE, TORCH_OPS = "another schedule", "torch"
# Texts of CUDA errors after which the device still works. After any other (an illegal address, a
# device-side assert) every call fails.
RECOVERABLE_CUDA_ERRORS = (
    "invalid argument",
    "invalid configuration argument",
    "too many resources requested for launch",
    "invalid device function",
    "no kernel image is available",
    "device kernel image is invalid",
    "a PTX JIT compilation failed",
    "named symbol not found",
)
CUDA_ERROR_PREFIXES = ("Triton Error [CUDA]", "CUDA error")


@dataclass(frozen=True)
class Fallback:
    """What failed while a graph was compiled or run, and what runs instead."""

    name: str  # of the region or the step
    error: FulguriteError
    instead: str  # "torch", "another schedule", "the trace before it"
    repro: str = ""  # script that reproduces the failure

    @property
    def reason(self) -> str:
        """The failure in one line."""
        return self.error.what.splitlines()[0]

    def __str__(self) -> str:
        return f"{self.name}: {self.instead} ({self.reason})"


ReportFallback = Callable[[Fallback], None]


@dataclass(frozen=True)
class InputForm:
    """What a kernel reads memory by: the sizes of an input, None for a symbol, and its dtype."""

    sizes: tuple[int | None, ...]
    dtype: torch.dtype

    def accepts(self, value: torch.Tensor) -> bool:
        if value.dtype != self.dtype or value.dim() != len(self.sizes):
            return False
        pairs = zip(self.sizes, value.shape, strict=True)
        return all(size is None or size == found for size, found in pairs)


def is_error_of_device(error: BaseException) -> bool:
    """Whether the device is lost or out of memory: another implementation would fail as well."""
    if isinstance(error, torch.AcceleratorError | torch.OutOfMemoryError):
        return True
    text = str(error)
    is_cuda = any(prefix in text for prefix in CUDA_ERROR_PREFIXES)
    return is_cuda and not any(known in text for known in RECOVERABLE_CUDA_ERRORS)


def raise_or_report(fallback: Fallback, report: ReportFallback | None, cause: Exception) -> None:
    """Report a fallback; raise its error if nobody takes reports. A report raises in strict mode."""
    if fallback.error is not cause:
        fallback.error.__cause__ = cause
    if report is None:
        raise fallback.error
    report(fallback)


class UnexpectedInput(RuntimeError):
    """An op before the region returned other sizes, or another dtype, than its FakeTensor rule."""


def check_inputs(inputs: Sequence[Any], forms: Sequence[InputForm | None]) -> None:
    """Raise UnexpectedInput if an input has another form; None: it is no tensor."""
    for position, (value, expected) in enumerate(zip(inputs, forms, strict=True)):
        if expected is None or not isinstance(value, torch.Tensor) or expected.accepts(value):
            continue
        raise UnexpectedInput(
            f"input {position} is {value.dtype} of the sizes {tuple(value.shape)}, and was compiled "
            f"for {expected.dtype} of {expected.sizes}"
        )


class GuardedRegion:
    """A lowered region that falls back if its kernels can't be built or launched."""

    def __init__(
        self,
        name: str,
        lowered: Callable[..., Any],
        make_torch_call: Callable[[], Callable[..., Any]],
        make_error: Callable[[Exception], FulguriteError],
        report: ReportFallback | None,
        forms: Sequence[InputForm | None] = (),
    ) -> None:
        """`forms` are those of the inputs for which the region was lowered."""
        self.name = name
        self.lowered = lowered
        self.fallback: Fallback | None = None
        self._make_torch_call = make_torch_call
        self._make_error = make_error
        self._report = report
        self._launch = lowered
        self._unchecked = tuple(forms)
        self._guard_scope: dict[str, Any] = {}  # of the function that `cached_launch` returned
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        """Everything else is the lowered region's: its kernels, source, donated inputs."""
        if name == "lowered":  # not set yet, in a copy
            raise AttributeError(name)
        return getattr(self.lowered, name)

    @property
    def runs_torch(self) -> bool:
        return self.fallback is not None and self.fallback.instead == TORCH_OPS

    @property
    def kernels(self) -> Any:
        """The generated kernels that run."""
        return () if self.runs_torch else self.lowered.kernels  # type: ignore[attr-defined]

    @property
    def cached_launch(self) -> Callable[..., Any] | None:
        """The lowered region's own launch once nothing can fail any more; else the guarded one."""
        launch = getattr(self.lowered, "cached_launch", None)
        if launch is None or self.runs_torch:
            return None
        self._launch = launch
        if not getattr(self.lowered, "may_fail_later", True):
            return launch
        self._guard_scope = {"launch": launch, "recover": self._recover}
        return _make_guarded_function(launch.__code__.co_argcount, self._guard_scope)

    def __call__(self, *inputs: Any) -> Any:
        launch = self._launch
        try:
            if self._unchecked:
                check_inputs(inputs, self._unchecked)
                self._unchecked = ()
            return launch(*inputs)
        except Exception as error:
            return self._recover(launch, error, inputs)

    def _recover(self, failed: Callable[..., Any], error: Exception, inputs: Any) -> Any:
        """Run the next schedule that works, or torch; raise what is no failure of ours."""
        with self._lock:
            if failed is not self._launch:  # another thread has switched meanwhile
                return self(*inputs)
            first = error
            if _is_captured():  # the launch may work outside of the CUDA graph, which is given up
                raise error
            while True:
                if self.runs_torch or is_error_of_device(error) or not self._can_rerun(error):
                    raise error
                is_final = settings().strict or isinstance(error, UnexpectedInput)
                following = None if is_final else self._next_schedule(error)
                if following is None:
                    break
                self.lowered = following
                self._use(following)
                try:
                    result = following(*inputs)
                except Exception as another:
                    error = another
                    continue
                self._switched(ANOTHER_SCHEDULE, first)
                return result
            if settings().strict or self._report is None:
                self._switched(TORCH_OPS, first)  # raises
            torch_call = self._make_torch_call()
            result = torch_call(*inputs)  # where torch raises too, the program is at fault
            self._switched(TORCH_OPS, first)
            self._use(torch_call)
            self._unchecked = ()
            return result

    def _use(self, launch: Callable[..., Any]) -> None:
        """Run `launch` from now on, also in functions that were made for an earlier one."""
        self._launch = self._guard_scope["launch"] = launch

    def _can_rerun(self, error: Exception) -> bool:
        """Whether no kernel has run that reports errors of the program, or writes to an input."""
        can_rerun = getattr(self.lowered, "can_rerun", None)
        return can_rerun is not None and bool(can_rerun(error))

    def _next_schedule(self, error: Exception) -> Callable[..., Any] | None:
        next_schedule = getattr(self.lowered, "next_schedule", None)
        try:
            return next_schedule(error) if next_schedule is not None else None
        except Exception:  # torch runs the region, and the report names the first failure
            return None

    def _switched(self, instead: str, cause: Exception) -> None:
        fallback = Fallback(self.name, self._make_error(cause), instead)
        raise_or_report(fallback, self._report, cause)
        self.fallback = fallback


def _is_captured() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _make_guarded_function(num_inputs: int, scope: dict[str, Any]) -> Callable[..., Any]:
    """A function of so many inputs that runs `launch` of its globals, and `recover` if that raises.

    It has fixed parameters: packing any number of them into a tuple costs three times as much.
    """
    names = ", ".join(f"a{k}" for k in range(num_inputs))
    text = f"""
def guarded({names}):
    try:
        return launch({names})
    except Exception as error:
        return recover(launch, error, [{names}])
"""
    exec(compile(text, "<guarded region>", "exec"), scope)  # generated above
    return scope["guarded"]  # type: ignore[no-any-return]
