"""Compiled layers under model parallelism: a sharded model in, the same model with compiled layers out.

    compile_layers(model, options)       every layer's `forward` runs by `fulgurite.compile`
    trace_collectives(axis)              an axis whose collectives a compiled layer keeps as ops

Tensor, context and pipeline layouts run a model in eager mode with compiled layers, as FSDP2 does: hooks
of a layer, the embedding, the head, the loss and the schedule of stages stay outside. Equal layers share
one compiled function.

**Collectives** between ranks are custom operators of the captured graph (`fulgurite::axis_all_reduce`,
`axis_all_gather`, `axis_reduce_scatter`, `axis_all_to_all`). No transform moves, drops or repeats one,
so all ranks make the same calls in the same order. Outside of a capture they run as before.

**Graph breaks by design.** The experts of a tensor rank (how many tokens they get is read by the host),
expert dispatch, and linears of zero-bubble schedules run between graphs. `log.txt` of a run says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.capture.units import copy_function, run_forward
from fulgurite.compile import Compiled
from fulgurite.compile import compile as compile_function
from fulgurite.logs import LOG
from fulgurite.op import op
from fulgurite.parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all_rows,
    reduce_scatter_tokens,
)
from fulgurite.parallel.mesh import Axis

# By key: what an operator of a graph communicates with. A later mesh of the same ranks takes over.
_axes: dict[str, Axis] = {}


def trace_collectives(axis: Axis) -> Axis:
    """The axis, with operators in place of collectives while a graph is captured."""
    if axis.group is None or isinstance(axis.device_collectives, TracedCollectives):
        return axis
    key = f"{axis.name} {axis.ranks}"
    _axes[key] = axis
    return dataclasses.replace(axis, device_collectives=TracedCollectives(key))


class TracedCollectives:
    """`DeviceCollectives` of a capture: operators that a graph holds."""

    def __init__(self, key: str) -> None:
        self.key = key

    def accepts(self, x: Tensor) -> bool:
        return torch.compiler.is_compiling()

    def all_reduce(self, x: Tensor) -> Tensor:
        total: Tensor = _all_reduce_op(x, self.key)
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        gathered: Tensor = _all_gather_op(x, self.key)
        return gathered

    def reduce_scatter(self, x: Tensor) -> Tensor:
        part: Tensor = _reduce_scatter_op(x, self.key)
        return part

    def all_to_all(self, x: Tensor) -> Tensor:
        received: Tensor = _all_to_all_op(x, self.key)
        return received

    def check(self) -> None:
        """Errors are raised where they happen."""


@op("fulgurite::axis_all_reduce")
def _all_reduce_op(x: Tensor, axis: str) -> Tensor:
    """The sum of all ranks' x."""
    return all_reduce(x, _axes[axis])


@_all_reduce_op.fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@op("fulgurite::axis_all_gather")
def _all_gather_op(x: Tensor, axis: str) -> Tensor:
    """All ranks' x, concatenated along dimension 0."""
    return all_gather(x, _axes[axis])


@_all_gather_op.fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape[0] * _axes[axis].size, *x.shape[1:])


@op("fulgurite::axis_reduce_scatter")
def _reduce_scatter_op(x: Tensor, axis: str) -> Tensor:
    """This rank's part of dimension 0 of the sum of all ranks' x."""
    return reduce_scatter_tokens(x, _axes[axis])


@_reduce_scatter_op.fake
def _(x: Tensor, axis: str) -> Tensor:
    return x.new_empty(x.shape[0] // _axes[axis].size, *x.shape[1:])


@op("fulgurite::axis_all_to_all")
def _all_to_all_op(x: Tensor, axis: str) -> Tensor:
    """Part w of dimension 0 to rank w, in equal parts; the received parts in rank order."""
    size = _axes[axis].size
    rows = (x.shape[0] // size,) * size
    return all_to_all_rows(x, _axes[axis], rows, rows, "all-to-all of a compiled layer")


@_all_to_all_op.fake
def _(x: Tensor, axis: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


# ---- layers ----------------------------------------------------------------------------------------


class CompiledLayers:
    """The compiled function of a model's layers."""

    def __init__(self, compiled: Compiled, count: int) -> None:
        self.compiled, self.count = compiled, count
        self.is_reported = False

    def report(self) -> None:
        """Log the graphs and their breaks, once."""
        if self.is_reported or not self.compiled.graphs:
            return
        self.is_reported = True
        LOG.info("compiled %d layers: %d graphs", self.count, len(self.compiled.graphs))
        for text in dict.fromkeys(str(one) for one in self.compiled.breaks):
            LOG.info("the graph of a layer breaks: %s", text)


def compile_layers(model: nn.Module, options: dict[str, Any]) -> CompiledLayers:
    """Run the forward of every layer compiled, in place; names and parameters stay.

    CUDA graphs are off: microbatches of a pipeline overlap, and collectives wait on the host.
    """
    layers = list(list_layers(model))
    compiled = compile_function(copy_function(run_forward), **{**options, "cudagraph": False})
    for layer in layers:
        layer.forward = bind_layer(compiled, layer)  # type: ignore[method-assign]
    return CompiledLayers(compiled, len(layers))


def list_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers that this rank has."""
    for layer in getattr(model, "layers", ()):
        if any(True for _ in layer.parameters()):
            yield layer


def bind_layer(compiled: Compiled, layer: nn.Module) -> Callable[..., Any]:
    """`layer.forward` that runs compiled with a gradient, and in eager mode without."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return type(layer).forward(layer, *args, **kwargs)
        return compiled(layer, *args, **kwargs)

    return forward
