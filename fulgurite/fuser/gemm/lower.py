"""Lower a region with GEMMs: one Triton kernel, or the library's GEMMs and kernels for the rest.

In: a region as an fx graph, and its device. Out: a `TritonRegion` with one kernel, or a
`LibraryGemmRegion`. A region has GEMMs only where `fusion.py` put them there. It hands on the schedule
that it decided by; `lower_gemm` computes one only for a region that comes without.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from fulgurite.device import DeviceInfo
from fulgurite.fuser.gemm.calls import is_gemm, read_gemm
from fulgurite.fuser.gemm.codegen import write_gemm
from fulgurite.fuser.gemm.frontend import extract_epilogue, lower_gemm_graph
from fulgurite.fuser.gemm.heuristics import tensor_core_flops
from fulgurite.fuser.gemm.schedule import (
    GemmSchedule,
    ScheduledGemm,
    apply_config,
    make_problem,
    schedule_gemms,
)
from fulgurite.fuser.ir import cost
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.lowering import gpu_info, lower_to_kernels, with_index
from fulgurite.fuser.runtime.autotune import pick_fastest
from fulgurite.fuser.runtime.compile_triton import (
    KernelModule,
    build_kernel_module,
    is_interpreted,
    supports_warp_specialization,
)
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.fuser.runtime.kernel import Kernel, time_triton_kernel
from fulgurite.fuser.runtime.triton_region import TritonRegion, needs_int64_indices
from fulgurite.kernels.tuning.gemm_epilogue import GemmEpilogueConfig
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.trace.node_meta import fusion_schedule


@dataclass(frozen=True, eq=False)
class FusionSchedule:
    """The schedule of a fused GEMM, and the names of the nodes that it was computed for."""

    scheduled: ScheduledGemm
    node_names: tuple[str, ...]


def lower_gemm_region(
    module: fx.GraphModule, device: torch.device, autotune: bool = False
) -> FusedRegion:
    """One kernel for GEMMs and epilogue; the library's GEMMs and a kernel if that can't be."""
    if device.type == "cuda" or is_interpreted():
        try:
            return lower_gemm(module, device, autotune)
        except Unsupported:  # grouping may split a region after fusion was decided
            pass
    return LibraryGemmRegion(module, device)


def lower_gemm(
    module: fx.GraphModule,
    device: torch.device,
    autotune: bool = False,
    config: GemmEpilogueConfig | None = None,
) -> TritonRegion:
    """Lower a region to one kernel; `autotune` times several configs."""
    device = with_index(device)
    is_specialized = config is not None and config.tile_loop == "warp_specialize"
    if is_specialized and not supports_warp_specialization():
        raise Unsupported("a warp-specialized loop, which Triton miscompiles before 3.7")
    device_info = gpu_info(device)
    scheduled = _handed_on_schedule(module) if config is None else None
    if scheduled is None:
        region = lower_gemm_graph(module)
        scheduled = schedule_gemms(region, device_info, heuristics_for(device), config)
    name = scheduled.kernel_name
    int64_indices = needs_int64_indices(scheduled.region.region)
    if autotune and config is None and not is_interpreted():
        schedule = _autotune(scheduled, device, bool(int64_indices))
        scheduled = replace(scheduled, schedule=schedule)
    schedule = scheduled.schedule

    @functools.cache
    def write(use_int64: bool, is_aligned: bool) -> KernelModule:
        variant = schedule if is_aligned else replace(schedule, use_tma=False)
        return build_kernel_module([write_gemm(name, variant, use_int64)])

    kernel = _describe_kernel(scheduled, write(bool(int64_indices), True), device_info, device)

    def use_library(failed: str) -> FusedRegion:
        return LibraryGemmRegion(module, device)

    return TritonRegion(
        scheduled.region.region, write, (kernel,), device, int64_indices, use_library
    )


def _handed_on_schedule(module: fx.GraphModule) -> ScheduledGemm | None:
    """The schedule of the step "gemm_fusion", unless the region has other nodes by now."""
    names = node_names(module)
    for node in module.graph.nodes:
        handed_on = fusion_schedule(node)
        if handed_on is not None and handed_on.node_names == names:
            scheduled: ScheduledGemm = handed_on.scheduled
            return scheduled
    return None


def node_names(module: fx.GraphModule) -> tuple[str, ...]:
    return tuple(node.name for node in module.graph.nodes)


def _autotune(scheduled: ScheduledGemm, device: torch.device, use_int64: bool) -> GemmSchedule:
    """The schedule with the fastest config."""
    schedule, device_info = scheduled.schedule, gpu_info(device)
    nest, accumulators = schedule.nest, schedule.accumulators
    configs = heuristics_for(device).autotune_gemm_epilogue_configs(
        make_problem(nest, accumulators, device_info), supports_warp_specialization()
    )
    candidates = [apply_config(nest, accumulators, config, device_info) for config in configs]

    def write(candidate: GemmSchedule) -> KernelModule:
        return build_kernel_module([write_gemm(scheduled.kernel_name, candidate, use_int64)])

    return pick_fastest([schedule, *candidates], write, device, device_info.name)


def _describe_kernel(
    scheduled: ScheduledGemm,
    kernel_module: KernelModule,
    device_info: DeviceInfo,
    device: torch.device,
) -> Kernel:
    (source,) = kernel_module.kernels
    bytes_moved = sum(map(cost.tensor_bytes, source.tensors))
    memory_seconds = bytes_moved / device_info.copy_bandwidth
    math_seconds = scheduled.gemm_flops / tensor_core_flops(device_info, scheduled.region.gemms[0])
    statements = scheduled.segment.structure.statements.values()
    return Kernel(
        name=source.name,
        source=source.text,
        schedule=scheduled.schedule,
        ops=(
            *(gemm.origin for gemm in scheduled.region.gemms),
            *(s.statement.origin for s in statements),
        ),
        bytes_moved=bytes_moved,
        flops=scheduled.gemm_flops,
        predicted_seconds=max(memory_seconds, math_seconds) + cost.LAUNCH_SECONDS,
        reason=scheduled.segment.reason,
        _measure=time_triton_kernel(kernel_module, [source.name], device),
    )


class LibraryGemmRegion(FusedRegion):
    """GEMMs by torch, everything else by generated kernels.

    Fused GEMMs are measured against it, and it runs where a region can't be one kernel.
    """

    def __init__(self, module: fx.GraphModule, device: torch.device) -> None:
        epilogue = extract_epilogue(module, are_in_memory=True)
        self.epilogue = lower_to_kernels(epilogue, device)  # its first arguments: the GEMM outputs
        self.region, self.unit = self.epilogue.region, self.epilogue.unit
        self.kernels, self.source = self.epilogue.kernels, self.epilogue.source
        self.launcher, self._first_launch_line = "", 0
        placeholders = module.graph.find_nodes(op="placeholder")
        position = {node: k for k, node in enumerate(placeholders)}
        self.gemms = [_library_gemm(n, position) for n in module.graph.nodes if is_gemm(n)]
        read = {n.name for n in epilogue.graph.find_nodes(op="placeholder")}
        self.epilogue_inputs = [position[n] for n in placeholders if n.name in read]

    @property
    def is_capturable(self) -> bool:
        return self.epilogue.is_capturable

    @property
    def overwritten_inputs(self) -> tuple[int, ...]:
        """Those of the epilogue, whose arguments come after the GEMM outputs."""
        first = len(self.gemms)
        return tuple(self.epilogue_inputs[k - first] for k in self.epilogue.overwritten_inputs)

    @property
    def may_fail_later(self) -> bool:
        return self.epilogue.may_fail_later

    def can_rerun(self, error: Exception) -> bool:
        return self.epilogue.can_rerun(error)

    def wait(self) -> None:
        self.epilogue.wait()

    @property
    def cached_launch(self) -> Callable[..., tuple[Any, ...]] | None:
        return None

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        outputs = [gemm(arguments) for gemm in self.gemms]
        return self.epilogue(*outputs, *(arguments[k] for k in self.epilogue_inputs))


def _library_gemm(
    node: fx.Node, position: dict[fx.Node, int]
) -> Callable[[tuple[Any, ...]], torch.Tensor]:
    """The library's call of a GEMM, of a region's arguments. The epilogue adds the bias of an addmm."""
    call = read_gemm(node)
    if call.scales is None:
        lhs, rhs = position[call.lhs], position[call.rhs]
        return lambda arguments: torch.mm(arguments[lhs], arguments[rhs])
    target: Any = node.target

    def run(arguments: tuple[Any, ...]) -> torch.Tensor:
        given = fx.node.map_arg((node.args, node.kwargs), lambda n: arguments[position[n]])
        out: torch.Tensor = target(*given[0], **given[1])
        return out

    return run
