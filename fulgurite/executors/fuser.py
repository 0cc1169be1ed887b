"""Generated kernels: regions go through the fuser.

In: nodes and regions on the CPU or a GPU. Out: a `FusedRegion`, which has `.kernels` to look at. Composite ops
are taken apart to reach it. Without a C++ compiler it claims nothing on the CPU, without Triton nothing on a GPU,
and torch runs everything.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, fx

from fulgurite import device, fuser
from fulgurite.config import settings
from fulgurite.executors.base import Executor
from fulgurite.trace import Trace
from fulgurite.trace.cost import tensors
from fulgurite.trace.region import Region
from fulgurite.trace.signature import signature

MOST_KEPT = 512  # lowered regions; each is some text and a loaded library
MANY = 64  # ops of a captured graph; of ResNet-50's 180 some 60 kernels are made, of a decoder layer's 40 ten


class FuserExecutor(Executor):
    name = "fuser"
    takes_pieces = True
    compared = True

    def claims(self, node: fx.Node) -> bool:
        return fuser.claims(node)

    def __init__(self) -> None:
        self._lowered: OrderedDict[tuple[Any, ...], fuser.FusedRegion] = OrderedDict()

    def expect(self, captured: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Many ops on a GPU will be many kernels, and processes that compile them take a second to start."""
        on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in inputs)
        if on_gpu and len(captured.graph.nodes) - len(inputs) >= MANY:
            fuser.expect_many()

    def begin(self, region: fx.GraphModule) -> None:
        """Kernels of all regions compile side by side."""
        if is_kept(region):
            self.lower(region)

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """The region's kernels; equal regions, of equal layers mostly, share them."""
        if not is_kept(region):
            return fuser.lower(region)
        # schedules depend on the number of threads, and memory.set_reuse and the like on nothing here
        key = (signature(region), device.cpu_threads(), str(settings()))
        found = self._lowered.pop(key, None) or fuser.lower(region)
        self._lowered[key] = found
        while len(self._lowered) > MOST_KEPT:
            self._lowered.popitem(last=False)
        return found

    def tuned(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        return fuser.lower(region, tune=True)


def is_kept(region: fx.GraphModule) -> bool:
    """Whether equal regions may share kernels: nothing in it is one capture's own."""
    nodes = list(region.graph.nodes)
    return all(node.op != "get_attr" and has_fixed_sizes(node) for node in nodes)


def has_fixed_sizes(node: fx.Node) -> bool:
    """Whether nothing about the node's value is a symbol, whose meaning is one capture's own."""
    value = node.meta.get("val")
    sizes = [size for tensor in tensors(value) for size in (*tensor.shape, *tensor.stride())]
    return not any(isinstance(size, SymInt | SymFloat | SymBool) for size in (value, *sizes))


FUSER = FuserExecutor()


def kernels_of(trace: Trace) -> list[tuple[fx.Node, fuser.Kernel]]:
    """The generated kernels of a final trace, each with the call it belongs to."""
    return [(node, kernel) for node in _calls(trace.graph) for kernel in node.target.call.kernels]


def _calls(graph: fx.Graph) -> list[Any]:
    """Calls of fused regions, those inside CUDA graphs too."""
    found: list[Any] = []
    for node in graph.nodes:
        if isinstance(node.target, Region):
            held = hasattr(node.target.call, "kernels")
            found += [node] if held else _calls(node.target.module.graph)
    return found
