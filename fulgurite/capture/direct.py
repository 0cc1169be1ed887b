"""Calling what TorchDynamo compiled without going through TorchDynamo again.

In: a function (or module) and its captured form. Out: a callable that does the same. A call through TorchDynamo costs 15 to
25 µs before anything is computed: it hooks itself into the interpreter, lets the function's frame begin, and looks up
what it compiled for it. Where the whole function became one graph, the same lookup can be made from here: bind the
arguments to their names, ask the guards that TorchDynamo made, run the code it made. That takes about 2 µs. A module of
torch's own is captured through a small function around it, and found under that.

Whatever is not that simple goes through TorchDynamo as before: the first call, other shapes, graph breaks, modules with
hooks, a call from inside somebody else's capture, `torch.compiler.set_stance`.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn
from torch._C import _get_tracing_state
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, get_eval_frame_callback
from torch._dynamo import eval_frame
from torch._dynamo.external_utils import wrap_inline
from torch.nn.modules.module import _has_any_global_hook

GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
COMPILED = "__compiled_fn"  # how TorchDynamo's bytecode names what a backend returned


@dataclass(frozen=True)
class Ready:
    """One thing TorchDynamo compiled: when it is right, and what to run."""

    manager: Any  # its guards; it loses its cache entry when TorchDynamo drops or invalidates that
    holds: Callable[[dict[str, Any]], bool]
    run: Callable[..., Any]


class Direct:
    """`captured`, called directly where everything that TorchDynamo would do is known."""

    def __init__(
        self,
        function: Callable[..., Any],
        captured: Callable[..., Any],
        backend: Any,
        around: FunctionType | None = None,
    ) -> None:
        self.original = function
        self.captured = captured
        self.backend = backend
        self.learned = 0  # graphs of the backend that were looked at
        self.ready: tuple[Ready, ...] = ()
        self.module = function if isinstance(function, nn.Module) and around is None else None
        self.function = around or _plain_function(function)
        self.owner = () if around else _owner(function)
        if self.function is not None:
            self.code, self.defaults, self.keyword_defaults = _parts(self.function)
            self.bind = binder(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.ready and self._is_simple():
            given = self.owner + args
            names = self.bind(*given, **kwargs)
            for one in self.ready:
                if one.manager.cache_entry is not None and one.holds(names):
                    return one.run(*given, **kwargs)
        if _has_any_global_hook():  # these are called around each module as it is
            return self.original(*args, **kwargs)
        result = self.captured(*args, **kwargs)
        if self.function is not None and self.learned != len(self.backend.graphs):
            self._learn(self.function)
        return result

    def _is_simple(self) -> bool:
        """Whether a call now would only look up what there is."""
        return (
            get_eval_frame_callback() is None
            and eval_frame._stance.stance == "default"
            and _get_tracing_state() is None
            and not _has_any_global_hook()
            and self._is_the_same_function()
        )

    def _is_the_same_function(self) -> bool:
        """Whether Python would call what was captured: defaults, code, a module's forward and hooks may change."""
        function, module = self.function, self.module
        if (
            function is None
            or function.__code__ is not self.code
            or function.__defaults__ is not self.defaults
            or function.__kwdefaults__ is not self.keyword_defaults
        ):
            return False
        if module is None:
            return True
        return getattr(module.forward, "__func__", None) is function and not _has_hooks(module)

    def _learn(self, function: FunctionType) -> None:
        self.learned = len(self.backend.graphs)
        if self.backend.breaks:
            self.ready = ()
            return
        entries = _debug_get_cache_entry_list(function.__code__)
        ours = [e for e in entries if getattr(e.backend, "compiler_fn", None) is self.backend]
        found = [_ready(entry, function) for entry in ours]
        self.ready = tuple(one for one in found if one is not None)


def _ready(entry: Any, function: FunctionType) -> Ready | None:
    """A cache entry of TorchDynamo's, if its code is the whole function."""
    code, manager = entry.code, entry.guard_manager
    names = {one.argval for one in dis.get_instructions(code) if one.opname in GLOBALS}
    graphs = [name for name in names if name.startswith(COMPILED)]
    resumes = any(name.startswith("__resume_at") for name in names)
    if len(graphs) != 1 or resumes or code.co_freevars != function.__code__.co_freevars:
        return None
    scope = function.__globals__
    if len(names) == 1:  # nothing but the graph: no need to keep TorchDynamo out around it
        graph = scope[graphs[0]]
        scope = {graphs[0]: getattr(graph, "_torchdynamo_orig_callable", graph)}
    run = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    run.__kwdefaults__ = function.__kwdefaults__
    return Ready(manager, manager.root.check, run)


def binder(function: FunctionType) -> Callable[..., dict[str, Any]]:
    """A function of the same parameters that gives their values, and those of the variables around, by name."""
    code = function.__code__
    names = (*_parameter_names(code), *code.co_freevars)
    values = ", ".join(f"{name!r}: {name}" for name in names)
    around = "".join(f"    {name} = None\n" for name in code.co_freevars)
    inner = f"    def bound({_parameters(code)}):\n        return {{{values}}}\n"
    made: dict[str, Any] = {}
    exec(f"def make():\n{around}{inner}    return bound", made)
    bound_code = made["make"]().__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in bound_code.co_freevars)
    bound = FunctionType(bound_code, made, function.__name__, function.__defaults__, closure)
    bound.__kwdefaults__ = function.__kwdefaults__
    bound.__qualname__ = function.__qualname__  # it is named where arguments don't fit
    return bound


def _parameter_names(code: CodeType) -> tuple[str, ...]:
    """Parameters in the order code objects have them: plain, keyword-only, *args, **kwargs."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]


def _parameters(code: CodeType) -> str:
    """The parameter list as it is written."""
    names = list(_parameter_names(code))
    plain, rest = names[: code.co_argcount], names[code.co_argcount :]
    only, stars = rest[: code.co_kwonlyargcount], rest[code.co_kwonlyargcount :]
    if code.co_posonlyargcount:
        plain.insert(code.co_posonlyargcount, "/")
    if code.co_flags & inspect.CO_VARARGS:
        plain.append(f"*{stars.pop(0)}")
    elif only:
        plain.append("*")
    return ", ".join([*plain, *only, *(f"**{name}" for name in stars)])


def torchs_function(function: Callable[..., Any], captured: Any) -> FunctionType | None:
    """The function that TorchDynamo puts around a module of torch's own, whose forward it would not look into."""
    if not isinstance(function, nn.Module):
        return None
    inner = getattr(getattr(captured, "forward", None), "_torchdynamo_orig_callable", None)
    if not isinstance(inner, FunctionType) or inner.__code__ is not _AROUND:
        return None
    return inner


_AROUND = wrap_inline(len).__code__  # one code for all: what it calls is in its closure


def _plain_function(function: Callable[..., Any]) -> FunctionType | None:
    """The Python function that is captured: itself, a method's, a module's forward; None if there is none."""
    if isinstance(function, nn.Module):
        if type(function).__call__ is not nn.Module.__call__:
            return None
        function = function.forward
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, FunctionType) or plain.__code__.co_flags & _PAUSES:
        return None
    return plain


_PAUSES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _parts(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _owner(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What comes before the arguments: a method's object."""
    method = function.forward if isinstance(function, nn.Module) else function
    return (method.__self__,) if inspect.ismethod(method) else ()


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
