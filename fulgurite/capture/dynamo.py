"""Entry into TorchDynamo.

In: a callable and our backend. Out: the callable, captured on its first call. Graph breaks (reason, the
user's line, a hint) are collected for `explain`; with fullgraph=True they raise GraphBreakError.
"""

from __future__ import annotations

import inspect
import linecache
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch._dynamo
from torch import _guards
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_included,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch._dynamo import exc
from torch._dynamo import guards as _dynamo_guards
from torch._dynamo import symbolic_convert as _symbolic_convert  # also makes its logger
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fulgurite.capture import dynamo_fixes, native_guards, program_errors
from fulgurite.capture.direct_call import DirectCall, find_inline_wrapper
from fulgurite.errors import CaptureError, FulguriteError, GraphBreakError, OpError
from fulgurite.host_api import load_library, start_build
from fulgurite.trace.describe import is_user_file

# how often a function is recompiled, for shapes, dtypes or layers, before it runs in eager mode
RECOMPILE_LIMIT = 64


def optimize(
    function: Callable[..., Any],
    backend: Any,
    *,
    dynamic: bool | None,
    fullgraph: bool,
    limit: int = RECOMPILE_LIMIT,
) -> Any:
    """`function`, captured by TorchDynamo and compiled by `backend` when called."""
    if isinstance(function, torch.jit.ScriptModule):
        function = _make_caller(function)
    dynamo_fixes.install()
    native_guards.install()
    _attach_break_listener()
    _skip_function_names()
    _skip_guard_timing()
    # a profiler marker that costs 3 µs a call, with or without a profiler
    torch._dynamo.config.record_runtime_overhead = False
    # these guards (0.3 µs a layer) notice a hook that is added to a layer after capture
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    # Lightning replaces torch.compile by a function that copies the backend into the user's model
    torch_compile = inspect.unwrap(torch.compile)
    supported = inspect.signature(torch_compile).parameters
    limits = {"recompile_limit": limit, "isolate_recompiles": True}
    isolation: Any = {key: value for key, value in limits.items() if key in supported}
    with _ignore_tracing_in_other_threads():
        captured = torch_compile(
            function, backend=backend, dynamic=dynamic, fullgraph=fullgraph, **isolation
        )
    start_build()
    return DirectCall(
        function,
        collect_breaks(captured, backend.breaks, fullgraph),
        backend,
        find_inline_wrapper(function, captured),
    )


def _make_caller(module: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a TorchScript module: a graph break, where `torch.compile` refuses the module."""
    return lambda *args, **kwargs: module(*args, **kwargs)


def collect_breaks(
    captured: Callable[..., Any], breaks: list[GraphBreak], fullgraph: bool
) -> Callable[..., Any]:
    """`captured`, with its graph breaks appended to `breaks` and TorchDynamo's errors translated."""
    capture = program_errors.capture

    def call(*args: Any, **kwargs: Any) -> Any:
        outer, _break_sink.breaks = _break_sink.breaks, breaks
        outer_fullgraph, capture.fullgraph = capture.fullgraph, fullgraph
        was_active, capture.is_active = capture.is_active, True
        try:
            return captured(*args, **kwargs)
        except exc.TorchRuntimeError as error:
            raise (_find_fulgurite_error(error) or _make_op_error(str(error))) from error
        except (exc.BackendCompilerFailed, exc.Unsupported) as error:
            raise_translated(error)
        finally:
            _break_sink.breaks = outer
            capture.fullgraph, capture.is_active = outer_fullgraph, was_active

    return call


def is_capturing() -> bool:
    """Whether this thread captures the code that runs now (also by `torch.jit.trace`), or computes
    forward-mode derivatives.

    `torch.compiler.is_compiling()` is also true while another thread compiles. Forward-mode derivatives
    are attached to tensors, where generated kernels don't see them.
    """
    if torch.compiler.is_dynamo_compiling() or _get_tracing_state() is not None:
        return True
    if not _may_trace():  # 0.1 µs instead of 0.4
        return False
    if torch.compiler.is_exporting():
        return True
    tracing = _guards._TLS.__dict__.get("tracing_context")  # try_get() costs 0.7 µs
    if tracing is not None or forward_ad._current_level >= 0:
        return True
    traced = _len_torch_dispatch_stack() or _dispatch_tls_is_dispatch_key_included(_PRE_DISPATCH)
    return bool(traced) and get_proxy_mode() is not None


def _look_closely() -> bool:
    return True


_may_trace: Callable[[], Any] = _look_closely


def use_native_checks() -> None:
    """Let native code find that nothing can be captured now, where the library for it can be used."""
    global _may_trace
    library = load_library() if _may_trace is _look_closely else None
    if library is not None:
        _may_trace = library.make_callable("may_trace", ())


_PRE_DISPATCH = DispatchKey.PreDispatch  # key under which torch.export and make_fx may trace


_compile_lock = threading.Lock()


@contextmanager
def _ignore_tracing_in_other_threads() -> Iterator[None]:
    """Let functions made by torch.compile inside this block run while another thread traces.

    They hold a reference to `is_fx_symbolic_tracing`, one flag for all threads, and refuse to run while
    it is set, also by another thread. Our callers check `is_capturing`, which knows the thread.
    """
    with _compile_lock:
        original = _symbolic_trace.is_fx_symbolic_tracing
        _symbolic_trace.is_fx_symbolic_tracing = lambda: False
        try:
            yield
        finally:
            _symbolic_trace.is_fx_symbolic_tracing = original


@dataclass(frozen=True)
class GraphBreak:
    """A graph break: the line that TorchDynamo could not capture, the reason, and what to do (`hint`).

    frames   file and line of the calls that lead there, outermost first
    """

    reason: str
    hint: str
    file: str
    line: int
    frames: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        location = f"{os.path.basename(self.file)}:{self.line}"
        lines = [f"{location}   {self.code}", self.reason, *([self.hint] if self.hint else [])]
        return f"\n{'':<{len(location)}}   ".join(lines)


class _BreakSink(threading.local):
    """The list that collects the graph breaks of this thread's capture."""

    breaks: list[GraphBreak] | None = None


_break_sink = _BreakSink()


class _BreakListener(logging.Handler):
    """Collects graph breaks from TorchDynamo's log."""

    def emit(self, record: logging.LogRecord) -> None:
        if _break_sink.breaks is None:
            return
        found = parse_graph_break(record.getMessage())
        if found is not None and found not in _break_sink.breaks:
            _break_sink.breaks.append(found)


_break_listener = _BreakListener(logging.DEBUG)
_guards_log = logging.getLogger("torch._dynamo.guards.__guards")
_profile_guard_manager = _dynamo_guards.profile_guard_manager


def _attach_break_listener() -> None:
    """Attach the listener once. TorchDynamo's own log output stays as the user set it."""
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    if _break_listener in logger.handlers:
        return
    if not logger.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # the user did not enable this log: don't pass it on
    logger.addHandler(_break_listener)


def _skip_function_names() -> None:
    """Keep TorchDynamo from parsing source files for function names that only a log shows.

    It parses every file of a model (0.7 s for a transformers model), whether the log is on or not.
    """
    log = logging.getLogger("torch._dynamo.output_graph.__trace_call")
    if not log.isEnabledFor(logging.DEBUG):
        _symbolic_convert.get_funcname = lambda filename, lineno: None


def _skip_guard_timing() -> None:
    """Keep TorchDynamo from timing the guards of every graph for a log.

    It flushes the CPU's caches before: 20 ms a graph, half of a small graph's first call.
    """
    _dynamo_guards.profile_guard_manager = _time_guards_for_log  # type: ignore[assignment]


def _time_guards_for_log(root: Any, scope: dict[str, Any], n_iters: int) -> float:
    is_read = _guards_log.isEnabledFor(logging.DEBUG)
    return _profile_guard_manager(root, scope, n_iters) if is_read else 0.0


def parse_graph_break(message: str) -> GraphBreak | None:
    """A GraphBreak from TorchDynamo's log message; None if it has no location."""
    location = re.search(r"in user code at (.+?):(\d+)$", message, re.MULTILINE)
    if location is None:
        return None
    reason, hint = _reason_and_hint(message.partition("Graph Break Reason: ")[2])
    file, line = location[1], int(location[2])
    frames = _find_frames(message)
    own = [frame for frame in frames if is_user_file(frame[0])]
    if own and not is_user_file(file):
        file, line = own[-1]
    return GraphBreak(reason, hint, file, line, frames)


def _find_frames(text: str) -> tuple[tuple[str, int], ...]:
    """File and line of the frames in a message of TorchDynamo's."""
    return tuple((f, int(line)) for f, line in re.findall(r'File "(.+?)", line (\d+), in', text))


def _reason_and_hint(text: str) -> tuple[str, str]:
    """The title, explanation and first hint of TorchDynamo's message."""
    head = text.partition("*** While handling this graph break")[0]
    head = re.sub(r"^Failed to handle graph break gracefully.*?\n\n", "", head, flags=re.DOTALL)
    head = re.sub(r"^Encountered graph break when attempting to trace .*\n+", "", head.lstrip())
    title = head.strip().splitlines()[0].strip() if head.strip() else "unknown reason"
    explanation = re.search(r"Explanation: (.+)", head)
    hint = re.search(r"Hint: (.+)", head)
    reason = title.removesuffix(".")
    if explanation:
        reason += f": {explanation[1].strip().removesuffix('.')}"
    return reason, hint[1].strip() if hint else ""


def raise_translated(error: Exception) -> NoReturn:
    """Raise TorchDynamo's error as ours: our backend's own error, or GraphBreakError for a break."""
    inner = error
    while isinstance(inner, exc.BackendCompilerFailed):
        cause = getattr(inner, "inner_exception", None) or inner.__cause__
        if not isinstance(cause, Exception):
            break
        inner = cause
    if isinstance(inner, FulguriteError):
        raise inner.with_traceback(None) from None
    text = str(error)
    if isinstance(error, exc.Unsupported):
        reason, hint = _reason_and_hint(text)
        raised = re.search(r"context: raised exception (.+)", text)
        if raised:
            reason = f"the program raises {clean_exception_text(raised[1])}"
            hint = "compile without fullgraph=True to get the exception itself"
        translated = GraphBreakError(
            f"graph break with fullgraph=True: {reason}",
            where=_user_line(text),
            next=hint or "change that line, or compile without fullgraph=True",
        )
        translated.frames = _find_frames(text)
        raise translated from error
    if isinstance(error, exc.BackendCompilerFailed):
        raise CaptureError(
            f"capture failed: {type(inner).__name__}: {inner}",
            where=_user_line(str(inner)),
            next="if torch.compile(..., backend='aot_eager') fails too, torch can't capture this: "
            "exclude that part with torch.compiler.disable",
        ) from inner
    raise error


def clean_exception_text(text: str) -> str:
    """`ValueError('mine')` from TorchDynamo's text, which in 2.11 and 2.12 shows internal variables."""
    text = re.sub(r"ConstantVariable\(\w+: (.*?)\)(?=[,\]])", r"\1", text)
    return re.sub(r"^(\w+)\(\[(.*)\]\)$", r"\1(\2)", text)


def _find_fulgurite_error(error: BaseException) -> FulguriteError | None:
    """Our error inside TorchDynamo's, such as that of an operator without a fake function."""
    cause = error.__cause__ or error.__context__
    if cause is None or isinstance(cause, FulguriteError):
        return cause
    return _find_fulgurite_error(cause)


def _make_op_error(text: str) -> OpError:
    """The error of an op that failed on FakeTensors: the op, its inputs and its message."""
    call = re.search(r"fake tensors: \w+ (.+?)\(\*\((.*)\), \*\*(.*)\): got (\w+)\((.*)\)", text)
    next_step = "run it in eager mode: if that accepts these inputs, this is a bug of capture"
    if call is None:
        return OpError(text.strip().splitlines()[0], where=_user_line(text), next=next_step)
    function, inputs, keywords, kind, message = call.groups()
    named = re.search(r"(?:function|method) (\w+)", function)
    return OpError(
        f"{named[1] if named else function}: {kind}: {message[1:-1]}",  # without repr's quotes
        where=_user_line(text),
        input=inputs + (f", {keywords}" if keywords != "{}" else ""),
        next=next_step,
    )


def _user_line(text: str) -> str:
    """The user's line in a message of TorchDynamo's; empty if there is none."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', text)
    own = [frame for frame in frames if is_user_file(frame[0])] or frames
    if not own:
        return ""
    file, line, function = own[-1]
    return f"{linecache.getline(file, int(line)).strip()}   {file}:{line}, in {function}"
