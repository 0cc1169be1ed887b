"""Direct calls: run what TorchDynamo compiled without going through TorchDynamo again.

In: a function or module and its captured form. Out: a callable that does the same.

A call through TorchDynamo costs 15 to 25 µs before anything is computed: it installs its frame
evaluation hook, starts the function's frame, and looks up its cache. If the whole function became
one graph, this module does the same lookup in about 2 µs: bind the arguments to their names, check
TorchDynamo's guards, run the code it generated. `include/direct_call.h` is the same lookup in
native code, for a third of that. TorchDynamo captures modules of torch's own classes through a
small wrapper function (`wrap_inline`), and caches the code under that wrapper.

All other calls go through TorchDynamo: the first call, new shapes, graph breaks, modules with hooks,
calls inside another capture, and calls under `torch.compiler.set_stance`.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import struct
import weakref
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

from fulgurite.host_api import load_library

GLOBAL_OPCODES = ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL")
COMPILED_PREFIX = "__compiled_fn"  # TorchDynamo's name for what a backend returned


AdoptNative = Callable[["DirectCall", Callable[..., Any]], bool]


@dataclass(frozen=True)
class DynamoEntry:
    """One entry of TorchDynamo's code cache: its guards, and the code to run."""

    guard_manager: Any  # its `cache_entry` becomes None when TorchDynamo invalidates the entry
    check_guards: Callable[[dict[str, Any]], bool]
    run: Callable[..., Any]


class DirectCall:
    """`captured`, called directly if a known cache entry applies."""

    def __init__(
        self,
        function: Callable[..., Any],
        captured: Callable[..., Any],
        backend: Any,
        wrapper: FunctionType | None = None,
    ) -> None:
        self.original = function
        self.captured = captured
        self.backend = backend
        self.num_graphs_seen = 0  # graphs of the backend when `entries` was read
        self.entries: tuple[DynamoEntry, ...] = ()
        self.native: Callable[..., Any] | None = None  # the same lookup in native code
        self._has_native = False
        # a weak reference to the owner's method that may take the native function instead of this object
        self.adopt_native: weakref.WeakMethod[AdoptNative] | None = None
        self._native_entries: list[tuple[Any, ...]] = []
        self.module = function if isinstance(function, nn.Module) and wrapper is None else None
        self.function = wrapper or _underlying_function(function)
        self.bound_self = () if wrapper else _bound_self(function)
        if self.function is not None:
            self.code, self.defaults, self.keyword_defaults = _code_and_defaults(self.function)
            self.bind = make_binder(self.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.native is not None:
            return self.native(*args, **kwargs)
        if self.entries and self._can_bypass_dynamo():
            all_args = self.bound_self + args
            local_values = self.bind(*all_args, **kwargs)
            for entry in self.entries:
                if entry.guard_manager.cache_entry is not None and entry.check_guards(local_values):
                    return entry.run(*all_args, **kwargs)
        return self.call_dynamo(*args, **kwargs)

    def call_dynamo(self, *args: Any, **kwargs: Any) -> Any:
        """Call through TorchDynamo, which captures what it has not seen."""
        if _has_any_global_hook():  # global hooks run around each module in eager mode
            return self.original(*args, **kwargs)
        result = self.captured(*args, **kwargs)
        if self.function is not None and self.num_graphs_seen != len(self.backend.graphs):
            self._refresh_entries(self.function)
        return result

    def _can_bypass_dynamo(self) -> bool:
        """Whether TorchDynamo would do nothing but look up its cache."""
        return (
            get_eval_frame_callback() is None
            and eval_frame._stance.stance == "default"
            and _get_tracing_state() is None
            and not _has_any_global_hook()
            and self._is_unchanged()
        )

    def _is_unchanged(self) -> bool:
        """Whether the code, the defaults and a module's forward and hooks are as they were captured."""
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

    def _refresh_entries(self, function: FunctionType) -> None:
        self.num_graphs_seen = len(self.backend.graphs)
        if self.backend.breaks:
            self.entries = ()
            self._native_entries.clear()
            return
        entries = _debug_get_cache_entry_list(function.__code__)
        own = [e for e in entries if getattr(e.backend, "compiler_fn", None) is self.backend]
        usable = [_make_entry(entry, function) for entry in own]
        self.entries = tuple(entry for entry in usable if entry is not None)
        self._make_native(function)

    def _make_native(self, function: FunctionType) -> None:
        """Do the lookup in native code from now on, where the library for it can be used.

        The owner may call the native function in place of this object, which it then holds. Otherwise
        this object holds the function. Neither makes a reference cycle: captures free GPU memory.
        """
        self._native_entries[:] = [(e.guard_manager, e.check_guards, e.run) for e in self.entries]
        library = load_library() if not self._has_native and self.entries else None
        if library is None:
            return
        self._has_native = True

        def make_callable(call_dynamo: Callable[..., Any]) -> Callable[..., Any]:
            values = (
                *(function, self.code, self.defaults, self.keyword_defaults, self.module),
                *(self.bound_self[0] if self.bound_self else None, self.bind, call_dynamo),
                *(self._native_entries, _plain_parameters(self.code)),
            )
            words = struct.pack(f"{len(values)}q", *(0 if v is None else id(v) for v in values))
            made: Callable[..., Any] = library.make_callable("call_directly", (words, values))
            return made

        adopt = self.adopt_native() if self.adopt_native is not None else None
        if adopt is None or not adopt(self, make_callable(self.call_dynamo)):
            weak = weakref.proxy(self)
            self.native = make_callable(lambda *args, **kwargs: weak.call_dynamo(*args, **kwargs))


def _make_entry(entry: Any, function: FunctionType) -> DynamoEntry | None:
    """The entry if its code is the whole function as one graph; None otherwise."""
    code, manager = entry.code, entry.guard_manager
    names = {i.argval for i in dis.get_instructions(code) if i.opname in GLOBAL_OPCODES}
    graphs = [name for name in names if name.startswith(COMPILED_PREFIX)]
    resumes = any(name.startswith("__resume_at") for name in names)
    if len(graphs) != 1 or resumes or code.co_freevars != function.__code__.co_freevars:
        return None
    scope = function.__globals__
    if len(names) == 1:  # only the graph is called: the guard against TorchDynamo is not needed
        graph = scope[graphs[0]]
        graph = getattr(graph, "_torchdynamo_orig_callable", graph)
        scope = {graphs[0]: graph, "__builtins__": builtins}  # torch may import from this frame
    run = FunctionType(code, scope, function.__name__, function.__defaults__, function.__closure__)
    run.__kwdefaults__ = function.__kwdefaults__
    return DynamoEntry(manager, manager.root.check, run)


def make_binder(function: FunctionType) -> Callable[..., dict[str, Any]]:
    """A function with the same parameters that returns its local and closure variables by name."""
    code = function.__code__
    names = (*_parameter_names(code), *code.co_freevars)
    values = ", ".join(f"{name!r}: {name}" for name in names)
    closure_lines = "".join(f"    {name} = None\n" for name in code.co_freevars)
    inner = f"    def bound({_parameter_list(code)}):\n        return {{{values}}}\n"
    namespace: dict[str, Any] = {}
    exec(f"def make():\n{closure_lines}{inner}    return bound", namespace)
    bound_code = namespace["make"]().__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    closure = tuple(cells[name] for name in bound_code.co_freevars)
    bound = FunctionType(bound_code, namespace, function.__name__, function.__defaults__, closure)
    bound.__kwdefaults__ = function.__kwdefaults__
    bound.__qualname__ = function.__qualname__  # named in TypeErrors about arguments
    return bound


def _parameter_names(code: CodeType) -> tuple[str, ...]:
    """Parameter names in the order of code objects: positional, keyword-only, *args, **kwargs."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]


def _plain_parameters(code: CodeType) -> tuple[str, ...] | None:
    """The names, if arguments by position are all local variables there are; None otherwise."""
    stars = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    is_plain = not (code.co_flags & stars or code.co_kwonlyargcount or code.co_freevars)
    return _parameter_names(code) if is_plain else None


def _parameter_list(code: CodeType) -> str:
    """The parameter list as Python source."""
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


def find_inline_wrapper(function: Callable[..., Any], captured: Any) -> FunctionType | None:
    """The wrapper function through which TorchDynamo captures a module of torch's own class, if any."""
    if not isinstance(function, nn.Module):
        return None
    inner = getattr(getattr(captured, "forward", None), "_torchdynamo_orig_callable", None)
    if not isinstance(inner, FunctionType) or inner.__code__ is not _INLINE_WRAPPER_CODE:
        return None
    return inner


_INLINE_WRAPPER_CODE = wrap_inline(
    len
).__code__  # one code object for all modules: the callee is in the closure


def _underlying_function(function: Callable[..., Any]) -> FunctionType | None:
    """The Python function that is captured: of a method, or a module's forward. None if there is none."""
    if isinstance(function, nn.Module):
        if type(function).__call__ is not nn.Module.__call__:
            return None
        function = function.forward
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, FunctionType) or plain.__code__.co_flags & _GENERATOR_FLAGS:
        return None
    return plain


_GENERATOR_FLAGS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def _code_and_defaults(function: FunctionType) -> tuple[Any, ...]:
    return function.__code__, function.__defaults__, function.__kwdefaults__


def _bound_self(function: Callable[..., Any]) -> tuple[Any, ...]:
    """The object of a bound method, as a tuple to put before the arguments."""
    method = function.forward if isinstance(function, nn.Module) else function
    return (method.__self__,) if inspect.ismethod(method) else ()


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
