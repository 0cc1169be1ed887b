"""The fuser's entry points: which nodes can be fused, and a region to its kernels."""

from __future__ import annotations

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from fulgurite import native
from fulgurite.errors import FusionError
from fulgurite.fuser.codegen.triton.module import POINTER_TYPES
from fulgurite.fuser.frontend.lower_graph import find_unsupported_reason
from fulgurite.fuser.gemm.frontend import has_gemms
from fulgurite.fuser.gemm.lower import lower_gemm_region
from fulgurite.fuser.ir.errors import Unsupported
from fulgurite.fuser.ir.expression import opmath_dtype
from fulgurite.fuser.lowering import has_triton, lower_to_kernels
from fulgurite.fuser.runtime.compile_pool import compile_pool
from fulgurite.fuser.runtime.compile_triton import is_interpreted
from fulgurite.fuser.runtime.cpu_region import FusedRegion
from fulgurite.trace.cost import iter_tensors
from fulgurite.trace.node_meta import fake_value
from fulgurite.trace.signature import call_signature

MAX_CACHED_CALLS = 1 << 13  # some hundred bytes each
_CAN_LOWER_CACHE: dict[str, bool] = {}  # by call signature


def can_fuse(node: fx.Node, use_triton: bool = False) -> bool:
    """Whether this node can be part of a generated kernel.

    use_triton   of a Triton kernel, for CPU tensors too: as for `lower_region`
    """
    if node.op != "call_function" or _unsupported_device_reason(node, use_triton) is not None:
        return False
    return _can_lower(node, use_triton)


def unsupported_reason(node: fx.Node) -> str | None:
    """Why a node can't be part of a generated kernel; None if it can."""
    return _unsupported_device_reason(node) or find_unsupported_reason(node)


def _unsupported_device_reason(node: fx.Node, use_triton: bool = False) -> str | None:
    """Why there is no code generator for the devices of a node's tensors; None if there is one."""
    tensors = fake_tensors_of([node, *node.all_input_nodes])
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        return f"tensors on {' and '.join(sorted(map(str, devices)))}"
    if torch.device("cpu") in devices and native.find_compiler() is None:
        return "there is no C++ compiler"
    if not use_triton and not devices - {torch.device("cpu")}:
        return None
    if not has_triton():
        return "Triton is not installed"
    for tensor in tensors:
        dtype = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype
        if opmath_dtype(dtype) == torch.float32 and dtype not in POINTER_TYPES:
            return f"{tensor.dtype} on a GPU"
    return None


def fake_tensors_of(nodes: list[fx.Node]) -> list[torch.Tensor]:
    """The FakeTensors of the nodes' values."""
    return [tensor for node in nodes for tensor in iter_tensors(fake_value(node))]


def _can_lower(node: fx.Node, use_triton: bool) -> bool:
    """Whether the IR can express the node. Layers have many equal calls, so answers are cached."""
    schema = getattr(node.target, "_schema", None)
    is_cacheable = schema is not None and not schema.is_mutable  # a write depends on other readers
    call = call_signature(node) if is_cacheable else None
    if call is None:
        return find_unsupported_reason(node, use_triton) is None
    if use_triton:
        call += " triton"
    if torch.are_deterministic_algorithms_enabled():
        call += " deterministic"  # GPU kernels may then not store in any order
    if call not in _CAN_LOWER_CACHE:
        if len(_CAN_LOWER_CACHE) >= MAX_CACHED_CALLS:
            _CAN_LOWER_CACHE.clear()
        _CAN_LOWER_CACHE[call] = find_unsupported_reason(node, use_triton) is None
    return _CAN_LOWER_CACHE[call]


def start_compile_workers() -> None:
    """Start the processes that compile Triton kernels: many will be needed soon."""
    if has_triton() and not is_interpreted():
        compile_pool().start_workers()


def lower_region(
    module: fx.GraphModule, use_triton: bool = False, autotune: bool = False
) -> FusedRegion:
    """Lower a region to kernels, ready to call.

    use_triton   Triton kernels for CPU tensors too, in Triton's interpreter
    autotune     time several schedules of each GPU kernel
    """
    tensors = fake_tensors_of(list(module.graph.nodes))
    device = next(iter({tensor.device for tensor in tensors}), torch.device("cpu"))
    try:
        with _disable_current_modes():  # a region is lowered while torch traces on FakeTensors
            if has_gemms(module):
                return lower_gemm_region(module, device, autotune)
            region = lower_to_kernels(module, device, use_triton, autotune)
            region.reference = module
            return region
    except Unsupported as reason:
        raise FusionError(
            f"{reason} can't be part of a generated kernel",
            next="ask fulgurite.fuser.can_fuse(node) for each node of the region first",
        ) from reason
