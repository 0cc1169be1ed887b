"""What happens when a step of the pipeline, or a region of a compiled graph, fails.

In: an error and the graph that it is about. Out: the error with a script that reproduces it, and the
decision whether torch runs that part of the program instead (`can_fall_back`), with one warning.

Torch does not take over
- in strict mode (`FULGURITE_STRICT=1`), and for `fuse`, whose executors end without torch;
- for errors of the user's own transforms and executors (`may_fall_back` is False);
- for a trace that `FULGURITE_VERIFY=1` rejects: who sets it wants to see that;
- if the device is lost or out of memory.
"""

from __future__ import annotations

import warnings
from dataclasses import replace

from fulgurite import repro
from fulgurite.config import settings
from fulgurite.errors import CompileError, FallbackWarning, FulguriteError, VerifyError
from fulgurite.executors.fallback import Fallback, is_error_of_device
from fulgurite.executors.torch import TorchExecutor
from fulgurite.logs import LOG
from fulgurite.options import Options
from fulgurite.trace import Trace

BEFORE_STEP, CAPTURED_OPS = "the trace before this step", "torch, op by op as captured"
PYTHON_FORM = "the Python of the trace"


def as_compile_error(error: Exception, what: str, step: str = "") -> FulguriteError:
    """The error itself if it is ours; else a CompileError that says what failed."""
    if isinstance(error, FulguriteError):
        return error
    failure = CompileError(
        f"{what}: {type(error).__name__}: {error}",
        next=f"remove or fix {step}; the script above reproduces the failure" if step else None,
    )
    failure.__cause__ = error
    return failure


def can_fall_back(error: BaseException, options: Options) -> bool:
    """Whether torch may run what failed with this error."""
    if settings().strict or isinstance(error, VerifyError):
        return False
    if not any(isinstance(executor, TorchExecutor) for executor in options.executors):
        return False
    chain: BaseException | None = error
    while chain is not None:
        is_users = isinstance(chain, FulguriteError) and not chain.may_fall_back
        if is_users or is_error_of_device(chain):
            return False
        chain = chain.__cause__
    return True


def attach_repro(
    error: FulguriteError, captured: Trace, options: Options, state: repro.TorchState
) -> None:
    """Save a script that reproduces the failure, and name it in the error."""
    if "repro" not in error.details:
        try:
            saved = str(repro.save_failure(captured, options, state))
        except OSError as problem:  # the failure itself is what the user needs to see
            saved = f"not saved ({problem}): set FULGURITE_REPRO_DIR to a writable folder"
        error.details = {"repro": saved, **error.details}


def warn_of_fallback(fallback: Fallback) -> Fallback:
    """Warn once, with the script that reproduces the failure; return the fallback with its name."""
    script = fallback.error.details.get("repro", "")
    where = str(fallback.error.details.get("where") or "").partition("\n")[0]
    LOG.warning("%s; repro: %s", fallback, script)
    warnings.warn(
        f"{fallback.name} could not be compiled: {fallback.reason}\n"
        + (f"  where          {where}\n" if where else "")
        + f"  runs instead   {fallback.instead}\n"
        f"  repro          {script}\n"
        "  next           results are right, speed may be lower. Report it with the script; "
        "FULGURITE_STRICT=1 raises the error",
        FallbackWarning,
        stacklevel=2,
    )
    return replace(fallback, repro=script)


def warn_of_captured_calls(name: str, reason: str) -> None:
    """Warn that torch runs a captured graph for inputs with another memory layout than at capture."""
    LOG.warning("%s: some calls run as captured: %s", name, reason)
    warnings.warn(
        f"{name} was not compiled for the memory layout of these inputs: {reason}\n"
        f"  runs instead   {CAPTURED_OPS}\n"
        "  next           results are right, speed may be lower; pass clones of the inputs, or return "
        "clones of views, to run compiled",
        FallbackWarning,
        stacklevel=2,
    )
