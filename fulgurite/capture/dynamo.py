"""The way into TorchDynamo.

In: a callable and our backend. Out: the same callable, captured on its first call. Graph breaks are gathered
(reason, the user's line, how to avoid it) for `explain`; with fullgraph=True they are raised as GraphBreakError.
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
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch._dynamo
from torch import _guards
from torch._C import (
    DispatchKey,
    _dispatch_tls_is_dispatch_key_included,
    _len_torch_dispatch_stack,
)
from torch._dynamo import exc
from torch._dynamo import symbolic_convert as _symbolic_convert  # noqa: F401  (makes its logger)
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fulgurite.capture.direct import Direct, torchs_function
from fulgurite.errors import CaptureError, FulguriteError, GraphBreakError, OpError
from fulgurite.trace.describe import is_the_users

# shapes, dtypes or kinds of layers a function is compiled for before it runs in eager
RECOMPILE_LIMIT = 64


def optimize(
    function: Callable[..., Any],
    backend: Any,
    *,
    dynamic: bool | None,
    fullgraph: bool,
    limit: int = RECOMPILE_LIMIT,
) -> Any:
    """`function`, captured by TorchDynamo and compiled by `backend` when it is called."""
    _listen()
    # marks the time before a graph in torch's profiler, at 3 µs a call whether or not that runs
    torch._dynamo.config.record_runtime_overhead = False
    # without these guards a hook that is added to a layer later is never called; 0.3 µs a layer
    torch._dynamo.config.skip_nnmodule_hook_guards = False
    known = inspect.signature(torch.compile).parameters
    wanted = {"recompile_limit": limit, "isolate_recompiles": True}
    isolation: Any = {key: value for key, value in wanted.items() if key in known}
    with _deaf_to_other_threads():
        captured = torch.compile(
            function, backend=backend, dynamic=dynamic, fullgraph=fullgraph, **isolation
        )
    return Direct(
        function, heard(captured, backend.breaks), backend, torchs_function(function, captured)
    )


def heard(captured: Callable[..., Any], breaks: list[GraphBreak]) -> Callable[..., Any]:
    """A call through TorchDynamo: its graph breaks go into the list, its errors come out as ours."""

    def call(*args: Any, **kwargs: Any) -> Any:
        outer, here.breaks = here.breaks, breaks
        try:
            return captured(*args, **kwargs)
        except (exc.BackendCompilerFailed, exc.Unsupported, exc.TorchRuntimeError) as error:
            raise_as_ours(error)
        finally:
            here.breaks = outer

    return call


def is_capturing() -> bool:
    """Whether someone captures the code that runs here, on this thread, or sends tangents through it.

    `torch.compiler.is_compiling()` also says yes while another thread compiles. Forward derivatives ride on
    tensors, where generated kernels don't see them.
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        return True
    tracing = _guards._TLS.__dict__.get("tracing_context")  # try_get raises inside: 0.7 µs
    if tracing is not None or forward_ad._current_level >= 0:
        return True
    traced = _len_torch_dispatch_stack() or _dispatch_tls_is_dispatch_key_included(_BEFORE_DISPATCH)
    return bool(traced) and get_proxy_mode() is not None


_BEFORE_DISPATCH = DispatchKey.PreDispatch  # where torch.export and make_fx may trace


_building = threading.Lock()


@contextmanager
def _deaf_to_other_threads() -> Iterator[None]:
    """What torch.compile makes in here runs while another thread traces.

    It keeps a reference to `is_fx_symbolic_tracing`, one flag for all threads, and refuses to run while that is
    set: also when another thread compiles something else. Our callers have asked `is_capturing`, which knows.
    """
    with _building:
        asked = _symbolic_trace.is_fx_symbolic_tracing
        _symbolic_trace.is_fx_symbolic_tracing = lambda: False
        try:
            yield
        finally:
            _symbolic_trace.is_fx_symbolic_tracing = asked


@dataclass(frozen=True)
class GraphBreak:
    """A place where capture stopped and Python took over."""

    reason: str
    hint: str
    file: str
    line: int

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.line).strip()

    def __str__(self) -> str:
        place = f"{os.path.basename(self.file)}:{self.line}"
        lines = [f"{place}   {self.code}", self.reason, *([self.hint] if self.hint else [])]
        return f"\n{'':<{len(place)}}   ".join(lines)


class Here(threading.local):
    """Who is compiling on this thread: graph breaks go into this list."""

    breaks: list[GraphBreak] | None = None


here = Here()


class _Listener(logging.Handler):
    """Hears TorchDynamo speak of graph breaks."""

    def emit(self, record: logging.LogRecord) -> None:
        if here.breaks is None:
            return
        found = parse_break(record.getMessage())
        if found is not None and found not in here.breaks:
            here.breaks.append(found)


_listener = _Listener(logging.DEBUG)


def _listen() -> None:
    """Attach the listener once; Dynamo's own output stays as the user set it."""
    logger = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
    if _listener in logger.handlers:
        return
    if not logger.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # nobody asked to see these: keep them from the parent's handlers
    logger.addHandler(_listener)


def parse_break(message: str) -> GraphBreak | None:
    """A GraphBreak from what Dynamo says about one."""
    place = re.search(r"in user code at (.+?):(\d+)$", message, re.MULTILINE)
    if place is None:
        return None
    reason, hint = _reason_and_hint(message.partition("Graph Break Reason: ")[2])
    file, line = place[1], int(place[2])
    frames = re.findall(r'File "(.+?)", line (\d+), in', message)
    own = [frame for frame in frames if is_the_users(frame[0])]
    if own and not is_the_users(file):
        file, line = own[-1][0], int(own[-1][1])
    return GraphBreak(reason, hint, file, line)


def _reason_and_hint(text: str) -> tuple[str, str]:
    """Dynamo's message has a title, an explanation and hints; the title and first hint are enough."""
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


def raise_as_ours(error: Exception) -> NoReturn:
    """Dynamo's errors as ours: a failure of our backend is itself, a graph break is a GraphBreakError."""
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
            reason = f"the program raises {plain_exception(raised[1])}"
            hint = "compile without fullgraph=True, and the exception itself comes out"
        raise GraphBreakError(
            f"the graph breaks here, and fullgraph=True: {reason}",
            where=_user_line(text),
            next=hint or "change that line, or compile without fullgraph=True",
        ) from error
    if isinstance(error, exc.TorchRuntimeError):
        raise _ours_behind(error) or _refused_inputs(text) from error
    if isinstance(error, exc.BackendCompilerFailed):
        raise CaptureError(
            f"capture failed: {type(inner).__name__}: {inner}",
            where=_user_line(str(inner)),
            next="if torch.compile(..., backend='aot_eager') fails too, torch can't capture this: leave "
            "that part out with torch.compiler.disable",
        ) from inner
    raise error


def plain_exception(text: str) -> str:
    """`ValueError('mine')`, also where torch 2.11 and 2.12 show the variables of Dynamo's own."""
    text = re.sub(r"ConstantVariable\(\w+: (.*?)\)(?=[,\]])", r"\1", text)
    return re.sub(r"^(\w+)\(\[(.*)\]\)$", r"\1(\2)", text)


def _ours_behind(error: BaseException) -> FulguriteError | None:
    """An error of ours that Dynamo met and wrapped, such as that of an operator without a fake rule."""
    behind = error.__cause__ or error.__context__
    if behind is None or isinstance(behind, FulguriteError):
        return behind
    return _ours_behind(behind)


def _refused_inputs(text: str) -> OpError:
    """What Dynamo says of an op that failed on FakeTensors: the op, its inputs, its own message."""
    call = re.search(r"fake tensors: \w+ (.+?)\(\*\((.*)\), \*\*(.*)\): got (\w+)\((.*)\)", text)
    next_step = (
        "run it without compiling: where eager torch takes these inputs, capture is at fault"
    )
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
    """The user's line in a message of Dynamo's, or nothing."""
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', text)
    own = [frame for frame in frames if is_the_users(frame[0])] or frames
    if not own:
        return ""
    file, line, function = own[-1]
    return f"{linecache.getline(file, int(line)).strip()}   {file}:{line}, in {function}"
