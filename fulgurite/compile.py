"""fulgurite.compile: from a PyTorch function or module to one that runs compiled, and tells how.

In: a callable and options. Out: a `Compiled` function, or the module as a compiled module; both carry
`.history`, `.graphs`, `.breaks`, `.last_trace()`, `.explain()`, `.save_repro()`, `.replace_trace()`.
The pipeline itself is `Session.compile_graph` and `Session.build`.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fulgurite import repro
from fulgurite.capture.around import MOST_CAPTURES, Around, bodies_of, is_data, set_apart
from fulgurite.capture.blocks import BlockRunner, Blocks, find_blocks, worth_it
from fulgurite.capture.dynamo import RECOMPILE_LIMIT, GraphBreak, is_capturing, optimize
from fulgurite.capture.module import original_of, plain_again, wrap_module
from fulgurite.errors import ArgumentError
from fulgurite.executors import Executor
from fulgurite.executors.tune import Tune
from fulgurite.explain import Explanation, explain
from fulgurite.options import Options, Regions, make_options
from fulgurite.session import GraphRecord, Session
from fulgurite.trace import Kind, Trace
from fulgurite.transforms.remat import Remat

_recordings: list[list[Compiled]] = []


@contextmanager
def recording() -> Iterator[list[Compiled]]:
    """Everything compiled inside the block, in order."""
    made: list[Compiled] = []
    _recordings.append(made)
    try:
        yield made
    finally:
        _recordings.remove(made)


class Compiled:
    """A compiled function. Call it as the original; ask it how it was compiled."""

    def __init__(self, function: Callable[..., Any], options: Options) -> None:
        for made in _recordings:
            made.append(self)
        self.original = function
        self.session = Session(options)
        self.blocks: list[Blocks] = []
        self._runner: BlockRunner | None = None
        self._around = Around(self.session)
        if isinstance(function, nn.Module):
            self._use_blocks(function)
        self._run = self._first_run() if self._runner else self._optimize(function)
        if not isinstance(function, nn.Module):
            functools.update_wrapper(self, function, updated=())

    def _optimize(
        self, function: Callable[..., Any], backend: Any = None, limit: int = RECOMPILE_LIMIT
    ) -> Any:
        options, backend = self.session.options, backend or self.session
        return optimize(
            function, backend, dynamic=options.dynamic, fullgraph=options.fullgraph, limit=limit
        )

    def _use_blocks(self, module: nn.Module) -> None:
        """Decide whether the model's equal layers are compiled once, or the model as a whole."""
        options = self.session.options
        if options.regions == "whole" or options.fullgraph:
            return
        blocks = find_blocks(module)
        if options.regions == "blocks" and not blocks:
            raise ArgumentError(
                f"regions='blocks', but {type(module).__name__} has no group of equal layers",
                next="regions='whole', or 'auto' to let fulgurite choose",
            )
        if options.regions == "blocks" or worth_it(module, blocks):
            self.blocks = blocks
            self._runner = BlockRunner(blocks, self._optimize)

    def _first_run(self) -> Callable[..., Any]:
        """The model with its layers compiled; if it turns out not to call them, compiled as a whole."""
        runner = self._runner
        assert runner is not None, "only a model with blocks has a first run"
        with_blocks = self._with_blocks(runner)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = with_blocks(*args, **kwargs)
            if runner.called or self.session.options.regions == "blocks":
                self._run = with_blocks
            else:
                self.blocks, self._run = [], self._optimize(self.original)
            return result

        return run

    def _with_blocks(self, runner: BlockRunner) -> Callable[..., Any]:
        """The model with its layers compiled; and what is around them, unless a call brings a cache along."""
        model = self.original
        assert isinstance(model, nn.Module), "only modules have blocks"
        plain = runner.around(model)
        bodies = bodies_of(model, self.blocks)
        if not bodies:
            return plain
        self._around.bodies = [path for path, one in model.named_modules() if one in bodies]
        captured = self._optimize(model, self._around, MOST_CAPTURES)
        whole = runner.around(set_apart(bodies, self.blocks, captured))

        def run(*args: Any, **kwargs: Any) -> Any:
            captures = torch.is_grad_enabled() or is_data((args, kwargs))
            return (whole if captures else plain)(*args, **kwargs)

        return run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_capturing():  # inside someone else's capture: be the plain function
            return self.original(*args, **kwargs)
        return self._run(*args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call from where nobody captures."""
        return self._run(*args, **kwargs)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        """As a method: bound like any function."""
        return self if owner is None else functools.partial(self, owner)

    def __copy__(self) -> Any:
        return self  # as a copy of a function is the function

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        original = copy.deepcopy(self.original, memo)  # a method comes with its object
        return self if original is self.original else compile_with(original, self.session.options)

    def __reduce__(self) -> Any:
        """A pickle names the compiled function where it has a name, and holds the plain one elsewhere."""
        module, name = getattr(self, "__module__", ""), getattr(self, "__qualname__", "")
        try:
            named = operator.attrgetter(name)(sys.modules[module])
        except (KeyError, AttributeError):
            named = None
        return name if named is self else (plain_again, (self.original,))

    def __repr__(self) -> str:
        name = getattr(self.original, "__qualname__", type(self.original).__name__)
        return f"<fulgurite.compile of {name}, {len(self.graphs)} graphs>"

    # ---- looking at it -------------------------------------------------------------------------------

    @property
    def history(self) -> list[Trace]:
        """Every stage of every graph, in the order they were made."""
        return self.session.history

    @property
    def graphs(self) -> list[GraphRecord]:
        return self.session.graphs

    @property
    def breaks(self) -> list[GraphBreak]:
        return self.session.breaks + self._around.unmeant

    def last_trace(self, kind: Kind | None = None, graph: int = -1) -> Trace:
        """The final trace of a graph (the last one), of its forward or inference unless said otherwise."""
        return self.session.program(graph, kind).trace

    def explain(self, *args: Any, **kwargs: Any) -> Explanation:
        """What was compiled and why; with example inputs it is called and timed, too."""
        if args or kwargs:
            self(*args, **kwargs)
        return explain(
            self.session,
            self.blocks,
            {"eager": self.original, "fulgurite": self},
            args,
            kwargs,
            self._around,
        )

    def save_repro(self, path: str | Path, graph: int = -1) -> Path:
        """Write a script that runs one graph by itself and times it beside eager and torch.compile."""
        record = self.session.record(graph)
        return repro.save(record.captured, self.session.options, path)

    def replace_trace(
        self, edited: str | Path | Trace, graph: int = -1, kind: Kind | None = None
    ) -> None:
        """Run an edited trace (its text, a file, or a Trace) in the place of a final one."""
        if isinstance(edited, Path):
            edited = edited.read_text(encoding="utf-8")
        self.session.replace_trace(str(edited), graph, kind)


MEMBERS = ("history", "graphs", "breaks", "last_trace", "explain", "save_repro", "replace_trace")


def _compile_module(module: nn.Module, options: Options) -> Any:
    compiled = Compiled(module, options)
    members: dict[str, Any] = {"compiled": property(lambda module: compiled)}
    for name in MEMBERS:
        members[name] = _Forward(compiled, name)
    return wrap_module(
        module, compiled.call, lambda other: _compile_module(other, options), members
    )


class _Forward:
    """An attribute of a compiled module that is its `Compiled`'s."""

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
    regions: Regions = "auto",
    tune: Tune | None = None,
    cudagraph: bool = False,
) -> Any:
    """Compile a function, a method or an nn.Module; also a decorator, with or without options.

    executors    who runs what, in order: names or Executor objects (default: what is best here)
    transforms   functions Trace -> Trace, run after the built-in ones
    dynamic      True: sizes are symbols from the start; False: never; None: when a size changes
    fullgraph    raise where the graph would break instead of running that part in Python
    remat        what backward recomputes: "none", "mincut" (the cheapest in bytes), "full"
    regions      "blocks": equal layers are compiled once; "whole": one graph; "auto" chooses
    tune         "auto": a generated region that torch runs faster is given back; True: each region is
                 timed under every executor that can run it; False: nothing is measured
    cudagraph    replay what runs on a GPU as CUDA graphs once it is warm
    """
    options = make_options(
        executors=executors,
        transforms=transforms,
        dynamic=dynamic,
        fullgraph=fullgraph,
        remat=remat,
        regions=regions,
        tune=tune,
        cudagraph=cudagraph,
    )
    if function is None:
        return lambda decorated: compile_with(decorated, options)
    return compile_with(function, options)


def compile_with(function: Any, options: Options) -> Any:
    function = function.original if isinstance(function, Compiled) else original_of(function)
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
    **more: Any,
) -> Callable[..., Any]:
    """The backend behind `torch.compile(model, backend="fulgurite", options={...})`."""
    wanted = {**(options or {}), **more}
    known = inspect.signature(make_options).parameters
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ArgumentError(
            f"{', '.join(unknown)}: no option of backend='fulgurite'",
            next=f"options={{...}} may hold {', '.join(known)}",
        )
    return Session(make_options(**wanted))(module, inputs)
