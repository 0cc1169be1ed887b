"""`fulgurite.compile`: a PyTorch function or module → one that runs compiled.

In: a callable and options. Out: a `Compiled` function, or a compiled module of the module's own class.
Both have `.history`, `.graphs`, `.breaks`, `.last_trace()`, `.explain()`, `.save_repro()` and
`.replace_trace()`. The compilation pipeline itself is in `session.py`: `Session.compile_graph` and
`Session.build`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import fx, nn

from fulgurite import repro
from fulgurite.capture import dynamo_fixes
from fulgurite.capture.as_function import FunctionLike, as_function
from fulgurite.capture.blocks import BlockGroup, BlockRunner, find_blocks, should_compile_blocks
from fulgurite.capture.compiled_module import unpickle_original, unwrap_compiled, wrap_module
from fulgurite.capture.direct_call import DirectCall
from fulgurite.capture.dynamo import (
    RECOMPILE_LIMIT,
    GraphBreak,
    is_capturing,
    optimize,
    use_native_checks,
)
from fulgurite.capture.outer_graph import (
    OUTER_RECOMPILE_LIMIT,
    OuterGraphBackend,
    break_graph_at,
    find_block_parents,
    is_plain_data,
)
from fulgurite.capture.units import Unit, UnitGroup, find_units, group_units, make_unit_runner
from fulgurite.capture.whole_model import WholeModel
from fulgurite.compiled_graph import GraphRecord
from fulgurite.cudagraph import CudaGraphMode
from fulgurite.errors import ArgumentError
from fulgurite.executors import Executor
from fulgurite.executors.autotune import Autotune
from fulgurite.explain import Explanation, explain
from fulgurite.host import HostProgram
from fulgurite.options import Granularity, Options, make_options
from fulgurite.session import Session
from fulgurite.trace import Kind, Trace
from fulgurite.transforms.remat import Remat

# `torch.compile(mode=...)` in our options
TORCH_COMPILE_MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cudagraph": True},
    "max-autotune": {"autotune": True, "cudagraph": True},
    "max-autotune-no-cudagraphs": {"autotune": True, "cudagraph": False},
}
_active_recordings: list[list[Compiled]] = []
dynamo_fixes.install()  # torch.compile(backend="fulgurite") loads this module before it captures


@contextmanager
def record_compilations() -> Iterator[list[Compiled]]:
    """Collect every `Compiled` that is created inside the block, in order."""
    recording: list[Compiled] = []
    _active_recordings.append(recording)
    try:
        yield recording
    finally:
        _active_recordings.remove(recording)


class Compiled(FunctionLike):
    """A compiled function. Call it like the original; its attributes show how it was compiled."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        for recording in _active_recordings:
            recording.append(self)
        self.original = function
        self.session = Session(options)
        self.blocks: list[BlockGroup] = []
        self.units: list[UnitGroup] = []  # what distributed wrappers run
        self.whole_model: WholeModel | None = None  # how a model with repeated layers runs
        self._outer = OuterGraphBackend(self.session)
        self.run: Callable[..., Any]
        if isinstance(function, nn.Module):
            self.blocks = self._select_blocks(function)
            self.run = self._first_module_call
        else:
            self.run = self._optimize(function)
            functools.update_wrapper(self, function, updated=())

    def _optimize(
        self,
        function: Callable[..., Any],
        backend: Any = None,
        limit: int = RECOMPILE_LIMIT,
        fullgraph: bool = False,
    ) -> Any:
        options, backend = self.session.options, backend or self.session
        fullgraph |= options.fullgraph
        call = optimize(
            function, backend, dynamic=options.dynamic, fullgraph=fullgraph, limit=limit
        )
        call.adopt_native = weakref.WeakMethod(self._adopt_native)
        return call

    def _adopt_native(self, call: DirectCall, native: Callable[..., Any]) -> bool:
        """Run the native function of a direct call in its place, if it is all that runs."""
        use_native_checks()
        if self.run is not call:
            return False
        self.run = native
        return True

    def _select_blocks(self, module: nn.Module) -> list[BlockGroup]:
        """The repeated layers to compile once each; none to compile the model as one graph."""
        options = self.session.options
        if options.granularity == "model" or options.fullgraph:
            return []
        blocks = find_blocks(module)
        if options.granularity == "blocks" and not blocks:
            raise ArgumentError(
                f"granularity='blocks', but {type(module).__name__} has no repeated layers",
                next="granularity='model', or 'auto' to let fulgurite choose",
            )
        is_chosen = options.granularity == "blocks" or should_compile_blocks(module, blocks)
        return blocks if is_chosen else []

    def _first_module_call(self, *args: Any, **kwargs: Any) -> Any:
        """Choose how to run a module. Wrappers such as `fully_shard` may be applied before this call."""
        model = self.original
        assert isinstance(model, nn.Module), "functions are compiled at once"
        units = find_units(model)
        self.run = self._run_units(model, units) if units else self._run_model(model)
        return self.run(*args, **kwargs)

    def _run_units(self, model: nn.Module, units: list[Unit]) -> Callable[..., Any]:
        """Run a model in eager mode with compiled units: what its distributed wrappers run."""
        self.units = group_units(units)
        if len(units) > 1:
            self.blocks = []
            return make_unit_runner(model, self.units, self._optimize).wrap(model)
        unit = units[0]
        self.blocks = self._select_blocks(unit.module)
        run = self._run_module(unit.module, unit.bind_call())
        return unit.make_runner(run).wrap(model)

    def _run_model(self, model: nn.Module) -> Callable[..., Any]:
        """Run a model as few graphs, whose repeated layers are sub-graphs, or block by block."""
        if not self.blocks or self.session.options.granularity == "blocks":
            return self._run_module(model, model)
        self.whole_model = WholeModel(
            self._optimize(model, limit=OUTER_RECOMPILE_LIMIT, fullgraph=True),
            lambda: self._optimize(model, limit=OUTER_RECOMPILE_LIMIT),
            lambda: self._run_module(model, model),
            self.blocks,
            self.session,
        )
        return self.whole_model

    def _run_module(self, model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which runs the model, with compiled layers or as one graph.

        If the model turns out not to call its layers, it is compiled as one graph.
        """
        if not self.blocks:
            return self._optimize(call)
        runner = BlockRunner(self.blocks, self._optimize)
        run_with_blocks = self._run_with_blocks(model, call, runner)

        def first(*args: Any, **kwargs: Any) -> Any:
            result = run_with_blocks(*args, **kwargs)
            if runner.called or self.session.options.granularity == "blocks":
                current[0] = run_with_blocks
            else:
                self.blocks, current[0] = [], self._optimize(call)
            return result

        current = [first]
        return lambda *args, **kwargs: current[0](*args, **kwargs)

    def _run_with_blocks(
        self, model: nn.Module, call: Callable[..., Any], runner: BlockRunner
    ) -> Callable[..., Any]:
        """Run the model with compiled layers.

        The outer graph (the code around the layers) is compiled too, unless inference passes a
        KV cache or another stateful object.
        """
        eager_outside = runner.wrap(call)
        parents = find_block_parents(model, self.blocks)
        if not parents:
            return eager_outside
        self._outer.parent_paths = [path for path, one in model.named_modules() if one in parents]
        captured = self._optimize(call, self._outer, OUTER_RECOMPILE_LIMIT)
        compiled_outside = runner.wrap(break_graph_at(parents, self.blocks, captured))

        def run(*args: Any, **kwargs: Any) -> Any:
            compiles_outside = torch.is_grad_enabled() or is_plain_data((args, kwargs))
            return (compiled_outside if compiles_outside else eager_outside)(*args, **kwargs)

        return run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():  # inside another capture: behave like the original function
            return self.original(*args, **kwargs)
        return self.run(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """Bind like a plain function when used as a method."""
        if owner is None:
            return self
        if torch.compiler.is_dynamo_compiling():  # it can't make bound methods
            return functools.partial(self, owner)
        return MethodType(self._function, owner)

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        return as_function(self)

    def __copy__(self) -> Any:
        return self  # like copying a function

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = copy.deepcopy(self.original, memo)  # a bound method copies its object
        return self if original is self.original else compile_with(original, self.session.options)

    def __reduce__(self) -> Any:
        """Pickle by name if the compiled function has one; otherwise pickle the original function."""
        module, name = getattr(self, "__module__", ""), getattr(self, "__qualname__", "")
        try:
            named = operator.attrgetter(name)(sys.modules[module])
        except (KeyError, AttributeError):
            named = None
        return name if named is self else (unpickle_original, (self.original,))

    def __repr__(self) -> str:
        name = getattr(self.original, "__qualname__", type(self.original).__name__)
        return f"<fulgurite.compile of {name}, {len(self.graphs)} graphs>"

    # ---- inspection ----------------------------------------------------------------------------------

    @property
    def history(self) -> list[Trace]:
        """Every stage of every graph, in the order of compilation."""
        return self.session.history

    @property
    def graphs(self) -> list[GraphRecord]:
        """One record per captured graph."""
        return self.session.graphs

    @property
    def breaks(self) -> list[GraphBreak]:
        """Graph breaks in the user's code."""
        return self.session.breaks + self._outer.unintended_breaks

    def last_trace(self, kind: Kind | None = None, graph: int = -1) -> Trace:
        """The final trace of a graph, by default of the last graph's inference or forward."""
        return self.session.compiled_graph(graph, kind).trace

    def host_program(self, kind: Kind | None = None, graph: int = -1) -> HostProgram | None:
        """What runs for `last_trace`: its lines without Python between them. None: it runs as Python."""
        return self.session.compiled_graph(graph, kind).host_program

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """Summarize what was compiled and why. With example inputs, also call and time it."""
        if args or kwargs:
            self(*args, **kwargs)
        return explain(
            self.session,
            self.blocks,
            {"eager": self.original, "fulgurite": self},
            args,
            kwargs,
            self._outer,
            self.units,
            self.whole_model.reason if self.whole_model else None,
        )

    def save_repro(self, path: str | Path, graph: int = -1) -> Path:
        """Write a standalone script that runs one graph and times it against eager and torch.compile."""
        record = self.session.graph_record(graph)
        return repro.save_script(record.captured, self.session.options, record.state, path)

    def replace_trace(
        self, edited: str | Path | Trace, graph: int = -1, kind: Kind | None = None
    ) -> None:
        """Run an edited trace (its text, a file, or a Trace) instead of the final trace of a graph."""
        if isinstance(edited, Path):
            edited = edited.read_text(encoding="utf-8")
        self.session.replace_trace(str(edited), graph, kind)


FORWARDED_MEMBERS = (
    "history",
    "graphs",
    "breaks",
    "host_program",
    "last_trace",
    "explain",
    "save_repro",
    "replace_trace",
)


def _compile_module(module: nn.Module, options: Options) -> Any:
    compiled = Compiled(module, options)
    members: dict[str, Any] = {"compiled": property(lambda module: compiled)}
    for name in FORWARDED_MEMBERS:
        members[name] = _ForwardedMember(compiled, name)
    return wrap_module(module, compiled, lambda other: _compile_module(other, options), members)


class _ForwardedMember:
    """A descriptor that forwards an attribute of a compiled module to its `Compiled`."""

    def __init__(self, compiled: Compiled, name: str) -> None:
        self.compiled = compiled
        self.name = name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return getattr(self.compiled, self.name)


def compile(
    function: Any = None,
    /,
    *,
    executors: Sequence[Executor | str] | Executor | str | None = None,
    transforms: Sequence[Any] = (),
    dynamic: bool | None = None,
    fullgraph: bool = False,
    remat: Remat = "mincut",
    granularity: Granularity = "auto",
    autotune: Autotune | None = None,
    cudagraph: CudaGraphMode = "auto",
) -> Any:
    """Compile a function, a method or an nn.Module. Also a decorator, with or without options.

    Args:
        function: the function, method or module to compile. None: return a decorator.
        executors: executors in order of priority: names or `Executor` objects. Default: `fuser`,
            then `torch`.
        transforms: functions `Trace -> Trace`, run after the built-in ones.
        dynamic: True: sizes are symbolic from the start. False: never. None: once a size changes.
        fullgraph: raise `GraphBreakError` at a graph break instead of running that part in Python.
        remat: what backward recomputes: `"none"`, `"mincut"` (fewest bytes saved) or `"full"`.
        granularity: `"auto"`: one graph, in which each distinct repeated layer is a sub-graph, or
            `"blocks"` if the graph breaks. `"blocks"`: one graph per distinct layer. `"model"`: one
            graph without sub-graphs.
        autotune: `"auto"`: a generated region falls back to torch if torch is faster. True: time
            each region on every executor that can run it. False: measure nothing. None: the value
            of `FULGURITE_AUTOTUNE`, or `"auto"`.
        cudagraph: replay GPU work as CUDA graphs. `"auto"`: graphs whose replays are measured to be
            faster. True: all that can be captured. False: none.

    Returns:
        A `Compiled` function, or a module of a subclass of the original's class. Both have
            `.last_trace()`, `.history`, `.explain()` and the other members of `Compiled`.
    """
    options = make_options(
        executors=executors,
        transforms=transforms,
        dynamic=dynamic,
        fullgraph=fullgraph,
        remat=remat,
        granularity=granularity,
        autotune=autotune,
        cudagraph=cudagraph,
    )
    if function is None:
        return lambda decorated: compile_with(decorated, options)
    return compile_with(function, options)


def compile_with(function: Any, options: Options) -> Any:
    """Compile with checked options. An already compiled function is compiled anew from its original."""
    function = function.original if isinstance(function, Compiled) else unwrap_compiled(function)
    if isinstance(function, type) or not callable(function):
        raise ArgumentError(
            f"{function!r} can't be compiled",
            next="pass a function, a method or an nn.Module object (not a class)",
        )
    if isinstance(function, nn.Module):
        return _compile_module(function, options)
    return Compiled(function, options)


def backend(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """The TorchDynamo backend of `torch.compile(model, backend="fulgurite", options={...})`."""
    mode = kwargs.pop("mode", "default")
    if mode not in TORCH_COMPILE_MODES:
        raise ArgumentError(
            f"mode={mode!r} is no mode of backend='fulgurite'",
            next=f"one of {', '.join(map(repr, TORCH_COMPILE_MODES))}, or options={{...}}",
        )
    requested = {**TORCH_COMPILE_MODES[mode], **(options or {}), **kwargs}
    allowed = inspect.signature(make_options).parameters
    unknown = [name for name in requested if name not in allowed]
    if unknown:
        raise ArgumentError(
            f"{', '.join(unknown)}: no option of backend='fulgurite'",
            next=f"options={{...}} may hold {', '.join(allowed)}",
        )
    return Session(make_options(**requested))(module, inputs)
