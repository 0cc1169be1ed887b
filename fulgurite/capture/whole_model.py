"""A model captured as one graph, as few graphs, or with its layers as separate graphs.

In: the model captured whole (graph breaks are errors), with graph breaks, and run block by block. Out: a
callable that uses the first that works. A failed capture of the whole model has run nothing, so the call is
repeated another way. A graph break outside of the repeated layers (in a loss, a mask or a cache) costs one
more graph; one inside a layer would cost two graphs for each layer.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from fulgurite.capture.blocks import BlockGroup
from fulgurite.capture.dynamo import GraphBreak
from fulgurite.capture.outer_graph import is_plain_data
from fulgurite.errors import CaptureError, GraphBreakError, OpError
from fulgurite.logs import LOG
from fulgurite.trace.cost import strides_or_ones

MAX_EQUAL_CAPTURES = 4  # of calls that look the same: the model reads state that changes
Run = Callable[..., Any]


class Recorded(Protocol):
    """What a session has recorded."""

    @property
    def graphs(self) -> Sequence[Any]: ...

    @property
    def breaks(self) -> Sequence[GraphBreak]: ...


class WholeModel:
    """Runs a model as one graph if it can be captured so.

    whole         the captured model
    make_parts    makes the model that is captured with graph breaks
    make_blocks   makes the model whose layers are separate graphs
    blocks        its repeated layers
    session       the graphs and graph breaks so far
    """

    def __init__(
        self,
        whole: Run,
        make_parts: Callable[[], Run],
        make_blocks: Callable[[], Run],
        blocks: Sequence[BlockGroup],
        session: Recorded,
    ) -> None:
        self.run_captured = whole
        self.make_parts, self.make_blocks = make_parts, make_blocks
        self.layers = LayerSources(blocks)
        self.session = session
        self.is_whole = True  # graph breaks are errors
        self.blocks: Run | None = None
        self.reason = ""  # why the layers are separate graphs; empty: they are not
        self.captured: list[Any] = []  # kinds of the calls that were captured

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.reason or _is_inside_ddp() or not _can_capture_arguments(args, kwargs):
            return self.run_blocks(*args, **kwargs)
        if not self.is_whole:
            return self.run_parts(*args, **kwargs)
        known = len(self.session.graphs)
        try:
            result = self.run_captured(*args, **kwargs)
        except GraphBreakError as error:
            self.use_parts(error)
        except (CaptureError, OpError) as error:
            self.use_blocks(error.what)
        except FailOnRecompileLimitHit:
            self.use_blocks("it was captured too often")
        else:
            if len(self.session.graphs) != known:
                self.count_capture(args, kwargs)
            return result
        return self(*args, **kwargs)

    def run_parts(self, *args: Any, **kwargs: Any) -> Any:
        """Run as one graph between graph breaks. Code between them may have run, so errors are final."""
        known = len(self.session.graphs)
        result = self.run_captured(*args, **kwargs)
        if len(self.session.graphs) != known:
            self.count_capture(args, kwargs)
            if any(self.layers.contain(found.frames) for found in self.session.breaks):
                self.use_blocks("a layer breaks the graph")
        return result

    def count_capture(self, args: Any, kwargs: Any) -> None:
        """Give up capturing the whole model if equal calls are captured again and again."""
        kind = _call_kind(args, kwargs)
        self.captured.append(kind)
        if self.captured.count(kind) >= MAX_EQUAL_CAPTURES:
            self.use_blocks("the model reads state that changes from call to call")

    def use_parts(self, error: GraphBreakError) -> None:
        if self.layers.contain(error.frames):
            return self.use_blocks(error.what)
        self.is_whole, self.captured = False, []
        self.run_captured = self.make_parts()
        LOG.info("the model is one graph between graph breaks: %s", error.what)

    def use_blocks(self, reason: str) -> None:
        self.reason = reason
        LOG.info("the layers of the model are separate graphs: %s", reason)

    def run_blocks(self, *args: Any, **kwargs: Any) -> Any:
        if self.blocks is None:
            self.blocks = self.make_blocks()
        return self.blocks(*args, **kwargs)


class LayerSources:
    """The source lines of the layers' forward functions, and of loops in the methods of their parents.

    TorchDynamo does not capture a function that breaks the graph inside a loop.
    """

    def __init__(self, blocks: Iterable[BlockGroup]) -> None:
        self.ranges: set[tuple[str, int, int]] = set()
        for group in blocks:
            for kind in {type(layer) for layer in group.modules}:
                self.ranges.update(_function_lines(kind.forward))
            for method in _own_methods(type(group.parent)):
                self.ranges.update(_loop_lines(method))

    def contain(self, frames: Iterable[tuple[str, int]]) -> bool:
        """Whether one of these calls is in a layer, or in a loop around layers."""
        return any(
            file == name and first <= line <= last
            for file, line in frames
            for name, first, last in self.ranges
        )


def _own_methods(kind: type) -> Iterator[Callable[..., Any]]:
    """The methods of a module's class and of its bases, up to nn.Module."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        yield from (value for value in vars(base).values() if inspect.isfunction(value))


def _function_lines(function: Callable[..., Any]) -> Iterator[tuple[str, int, int]]:
    """File, first and last line of a function; nothing if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is not None:
        lines = [line for _, _, line in code.co_lines() if line is not None]
        yield code.co_filename, code.co_firstlineno, max(lines)


def _loop_lines(function: Callable[..., Any]) -> Iterator[tuple[str, int, int]]:
    """The same of each loop in a function whose source is known."""
    for file, start, _ in _function_lines(function):
        try:
            source = textwrap.dedent(inspect.getsource(inspect.unwrap(function)))
            tree = ast.parse(source)
        except (OSError, SyntaxError):  # no file, or a lambda inside an expression
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.For | ast.While) and node.end_lineno is not None:
                yield file, start + node.lineno - 1, start + node.end_lineno - 1


def _is_inside_ddp() -> bool:
    """Whether DistributedDataParallel calls the model.

    It reduces gradients as each backward graph returns: with one graph per layer, this overlaps.
    """
    return DistributedDataParallel._active_ddp_module is not None


def _can_capture_arguments(args: Any, kwargs: Any) -> bool:
    """Whether the call passes no KV cache or other stateful object, which changes from call to call.

    Calls that record gradients rarely pass one.
    """
    return torch.is_grad_enabled() or is_plain_data((args, kwargs))


def _call_kind(args: Any, kwargs: Any) -> Any:
    """What TorchDynamo's guards see of a call besides the model's own state."""
    leaves, structure = pytree.tree_flatten((args, kwargs))
    kinds = [*map(_leaf_kind, leaves)]
    return structure, torch.is_grad_enabled(), torch._C._is_any_autocast_enabled(), kinds


def _leaf_kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        strides = strides_or_ones(value)
        return tuple(value.shape), strides, value.dtype, value.device, value.requires_grad
    return value if isinstance(value, bool | int | float | str | None) else type(value)
