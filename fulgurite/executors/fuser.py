"""The fuser executor: regions become generated kernels.

In: nodes and regions on the CPU or a GPU. Out: a `FusedRegion`, whose `.kernels` can be inspected.
Composite ops are decomposed so that it can claim them. Without a C++ compiler it claims nothing on the
CPU, and without Triton nothing on a GPU; torch runs everything then. All calls from `executors/` into
`fuser/` on the compile path go through this file.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, fx

from fulgurite import device, fuser
from fulgurite.config import settings
from fulgurite.executors.autotune import ExecutorTuner
from fulgurite.executors.base import Executor
from fulgurite.executors.torch import TorchExecutor
from fulgurite.fuser.gemm.fusion import FusionOptions, fuse_gemm_epilogues, has_gpu_gemms
from fulgurite.trace import Trace
from fulgurite.trace.cost import is_view, iter_tensors
from fulgurite.trace.node_meta import composite_of, executor_of, fake_value
from fulgurite.trace.region import Region
from fulgurite.trace.signature import region_signature
from fulgurite.trace.subgraph import SubgraphCall

MAX_CACHED_REGIONS = 512  # each is its source text and a loaded library
# Ops of a captured graph. ResNet-50 has 180 and some 60 kernels, a decoder layer 40 and ten kernels.
MIN_OPS_FOR_COMPILE_WORKERS = 64


class FuserExecutor(Executor):
    name = "fuser"
    accepts_decomposed_ops = True
    falls_back_if_slower = True
    falls_back_if_failed = True

    def __init__(self) -> None:
        self._lowered: OrderedDict[tuple[Any, ...], fuser.FusedRegion] = OrderedDict()

    def claims(self, node: fx.Node) -> bool:
        return fuser.can_fuse(node)

    def warm_up(self, captured: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Start worker processes for large GPU graphs: they take a second to start."""
        is_on_gpu = any(isinstance(x, Tensor) and x.device.type == "cuda" for x in inputs)
        if is_on_gpu and len(captured.graph.nodes) - len(inputs) >= MIN_OPS_FOR_COMPILE_WORKERS:
            fuser.start_compile_workers()

    def start_lowering(self, region: fx.GraphModule) -> None:
        """Lower now: kernels of all regions then compile in parallel."""
        if is_cacheable(region):
            self.lower(region)

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        """Lower a region to kernels; equal regions (of equal layers) share them."""
        if not is_cacheable(region):
            return fuser.lower_region(region)
        # besides the region, schedules depend on the number of threads and the settings; the errors of
        # a region are those of its composite ops
        composites = [str(getattr(composite_of(n), "target", "")) for n in region.graph.nodes]
        key = (
            region_signature(region),
            " ".join(composites),
            device.num_cpu_threads(),
            str(settings()),
        )
        lowered = self._lowered.pop(key, None) or fuser.lower_region(region)
        self._lowered[key] = lowered
        while len(self._lowered) > MAX_CACHED_REGIONS:
            self._lowered.popitem(last=False)
        return lowered

    def lower_autotuned(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        return fuser.lower_region(region, autotune=True)


def is_cacheable(region: fx.GraphModule) -> bool:
    """Whether equal regions may share kernels: nothing in the region belongs to one capture."""
    nodes = list(region.graph.nodes)
    return all(node.op != "get_attr" and has_static_sizes(node) for node in nodes)


def has_static_sizes(node: fx.Node) -> bool:
    """Whether sizes and strides are numbers; a symbol has a meaning in one capture only."""
    value = fake_value(node)
    sizes = [size for tensor in iter_tensors(value) for size in (*tensor.shape, *tensor.stride())]
    return not any(isinstance(size, SymInt | SymFloat | SymBool) for size in (value, *sizes))


FUSER = FuserExecutor()


def can_fuse_gemms(trace: Trace, executors: Sequence[Executor]) -> bool:
    """Whether the step "gemm_fusion" applies: GEMMs on a GPU, run by torch next to the fuser."""
    has_torch = any(isinstance(executor, TorchExecutor) for executor in executors)
    return FUSER in executors and has_torch and has_gpu_gemms(trace)


def fuse_gemms(
    trace: Trace, executors: Sequence[Executor], tuner: ExecutorTuner | None = None
) -> Trace:
    """The step "gemm_fusion": schedule GEMMs together with the elementwise ops that read them."""
    options = FusionOptions(
        fuser=FUSER.name,
        library=TorchExecutor.name,
        library_names={e.name for e in executors if isinstance(e, TorchExecutor)},
        autotune=tuner is not None and tuner.autotune is True,
    )
    trace, decisions = fuse_gemm_epilogues(trace, options)
    if tuner is not None:
        tuner.decisions += decisions
    return trace


def describe_torch_ops(claimed: Trace) -> list[str]:
    """The ops that torch runs, with the reason if the fuser has one: `mm ×4`, `cummin (complex64)`.

    claimed   a trace of the stage "claimed"
    """
    counts: Counter[str] = Counter()
    for node in claimed.ops:
        if executor_of(node) != TorchExecutor.name or is_view(node) or node.target is getitem:
            continue
        if isinstance(node.target, Region):  # sub-graphs and packed weights have lines of their own
            continue
        name = str(node.target).removeprefix("aten.")
        if name.startswith("fulgurite."):  # a hand-written kernel: it needs no reason
            counts[name.rpartition(".")[0]] += 1
            continue
        name = name.split(".")[0]
        reason = fuser.unsupported_reason(node) if node.op == "call_function" else None
        counts[name if reason in (None, name) else f"{name} ({reason})"] += 1
    return [f"{text} ×{count}" if count > 1 else text for text, count in counts.most_common()]


def kernels_of(trace: Trace) -> list[tuple[fx.Node, fuser.Kernel]]:
    """The generated kernels of a final trace, each with the call that launches it."""
    return [
        (node, kernel)
        for node in _fused_region_calls(trace.graph)
        for kernel in node.target.call.kernels
    ]


def _fused_region_calls(graph: fx.Graph) -> list[Any]:
    """Calls of fused regions, also inside CUDA graphs. Sub-graphs are graphs of their own."""
    calls: list[Any] = []
    for node in graph.nodes:
        if isinstance(node.target, Region) and not isinstance(node.target, SubgraphCall):
            is_fused = hasattr(node.target.call, "kernels")
            calls += [node] if is_fused else _fused_region_calls(node.target.module.graph)
    return calls
