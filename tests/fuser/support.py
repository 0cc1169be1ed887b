"""Shared by the fuser's tests: tracing a function into a region, and the comparison with eager."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite import fuser
from fulgurite.capture.upsample import keep_upsampling_whole
from fulgurite.fuser.frontend.lower_graph import lower_graph
from fulgurite.fuser.ir.interpreter import interpret_region
from fulgurite.fuser.ir.split_axes import split_axes
from fulgurite.fuser.ir.statement import Region, verify_region

aten = torch.ops.aten

# The kernels to generate: "cpp", "triton" (in its interpreter) or "cuda". conftest.py sets it.
TARGET = "cpp"

DECOMPOSED = (
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten._softmax,
    aten._log_softmax,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.logsumexp,
    aten.mse_loss,
    aten.smooth_l1_loss,
    aten.linalg_vector_norm,
)
NOT_DECOMPOSED = (
    # image ops, which have lowerings of their own
    aten.im2col,
    aten.col2im,
    aten.grid_sampler_2d,
    aten.upsample_nearest1d,
    aten.upsample_nearest2d,
    aten.upsample_nearest3d,
    aten._upsample_nearest_exact2d,
    aten.upsample_linear1d,
    aten.upsample_bilinear2d,
    aten.upsample_trilinear3d,
    aten.upsample_bicubic2d,
    aten.reflection_pad1d,
    aten.reflection_pad2d,
    aten.reflection_pad3d,
    aten.replication_pad1d,
    aten.replication_pad2d,
    aten.replication_pad3d,
    aten.reflection_pad1d_backward,
    aten.reflection_pad2d_backward,
    aten.reflection_pad3d_backward,
    aten._adaptive_avg_pool2d,
    aten.silu,
    aten.gelu,
    aten.silu_backward,
    aten.gelu_backward,
    aten.lerp,
    aten.clamp,
    aten.linspace,
)


@functools.cache
def decompositions() -> dict[Any, Any]:
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(DECOMPOSED))
    excluded = {getattr(packet, name) for packet in NOT_DECOMPOSED for name in packet.overloads()}
    return {op: rule for op, rule in table.items() if op not in excluded}


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], mode: str = "fake"
) -> torch.fx.GraphModule:
    """Traces a function into a functional ATen graph with FakeTensor metadata, like a region's."""
    table = decompositions()
    with keep_upsampling_whole():
        graph = make_fx(function, tracing_mode=mode, decomposition_table=table)(*arguments)
        if any(map(is_mutation, graph.graph.nodes)):
            functional = torch.func.functionalize(graph, remove="mutations")
            graph = make_fx(functional, tracing_mode=mode)(*arguments)
    for position, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node._rename(f"arg{position}_1")  # as functionalization names them
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def is_mutation(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def as_tuple(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def check_interpreted(function: Callable[..., Any], *arguments: Any, mode: str = "fake") -> Region:
    """Lowers, verifies and interprets the function, and compares with eager. Returns the region."""
    region = lower_graph(trace(function, arguments, mode))
    verify_region(region)
    refined = split_axes(region)
    verify_region(refined)
    for variant in (region, refined):
        check_against_eager(interpret_region(variant, arguments), function, arguments)
    return refined


def check_fused(
    function: Callable[..., Any], *arguments: Any, mode: str = "fake"
) -> fuser.FusedRegion:
    """Lowers and runs the function, and compares with eager and float64. Returns its kernels."""
    with target_device():
        arguments = tuple(map(to_target, arguments))
        region = lower_for_target(function, arguments, mode)
        check_against_eager(region(*arguments), function, arguments)
    return region


def lower_for_target(
    function: Callable[..., Any], arguments: Sequence[Any], mode: str = "fake"
) -> fuser.FusedRegion:
    """Lowers the function to kernels of the target."""
    return fuser.lower_region(trace(function, arguments, mode), use_triton=TARGET == "triton")


def target_device() -> AbstractContextManager[Any]:
    """Creates new tensors on the target's device."""
    return torch.device("cuda") if TARGET == "cuda" else nullcontext()


def to_target(argument: Any) -> Any:
    """Moves a tensor to the target's device."""
    return to_gpu(argument) if TARGET == "cuda" else argument


def check_fused_again(
    region: fuser.FusedRegion, function: Callable[..., Any], *arguments: Any
) -> None:
    """Runs the result of `check_fused` on other arguments, and compares with eager."""
    with target_device():
        arguments = tuple(map(to_target, arguments))
        check_against_eager(region(*arguments), function, arguments)


def to_gpu(argument: Any) -> Any:
    """Copies a tensor's storage to the GPU and returns the same strided view of it."""
    if not isinstance(argument, torch.Tensor) or argument.is_cuda:
        return argument
    memory = (
        torch.empty(0, dtype=argument.dtype, device="cpu").set_(argument.untyped_storage()).cuda()
    )
    return memory.as_strided(argument.shape, argument.stride(), argument.storage_offset())


def to_float64(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.is_floating_point():
        return argument.double()
    return argument


def check_against_eager(
    got: Sequence[Any], function: Callable[..., Any], arguments: Sequence[Any], slack: float = 4.0
) -> None:
    """Checks dtypes, sizes, strides, and that errors are at most twice eager's."""
    eager = as_tuple(function(*arguments))
    exact = as_tuple(function(*(to_float64(a) for a in arguments)))
    assert len(got) == len(eager), "a different number of results"
    for ours, theirs, wide in zip(got, eager, exact, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs
            continue
        check_layout(ours, theirs)
        check_close(ours, theirs, wide, slack)


def check_layout(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype, f"{ours.dtype} instead of {theirs.dtype}"
    assert ours.shape == theirs.shape, f"{ours.shape} instead of {theirs.shape}"
    if theirs.numel():
        for size, have, want in zip(ours.shape, ours.stride(), theirs.stride(), strict=True):
            assert have == want or size == 1, f"{ours.stride()} instead of {theirs.stride()}"


def check_close(
    ours: torch.Tensor, theirs: torch.Tensor, wide: torch.Tensor, slack: float = 4.0
) -> None:
    """Checks that the error against float64 is at most twice eager's, plus a few ulp."""
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), f"{ours} instead of {theirs}"
        return
    a, b, exact = ours.double(), theirs.double(), wide.double()
    # NaN and infinity must match eager, or float64 (eager gelu(inf) is NaN), or float64 rounded to this
    # dtype.
    kind = _kind(a)
    mismatch = (
        (kind != _kind(b))
        & (kind != _kind(exact))
        & (kind != _kind(exact.to(theirs.dtype).double()))
    )
    assert not mismatch.any(), (
        f"{a[mismatch]} instead of {b[mismatch]} (float64: {exact[mismatch]})"
    )
    finite = b.isfinite() & exact.isfinite() & a.isfinite()
    if not finite.any():
        return
    a, b, exact = a[finite], b[finite], exact[finite]
    info = torch.finfo(theirs.dtype)
    floor = slack * info.eps * exact.abs() + info.tiny
    if theirs.dtype == torch.float64:
        # Eager is its own reference here. Formulas may differ by a few ulp of their terms.
        floor = 64 * info.eps * (exact.abs() + 1)
    allowed = 2 * (b - exact).abs().max() + floor
    error = (a - exact).abs()
    worst = (error - allowed).argmax()
    assert bool((error <= allowed).all()), (
        f"off by {error[worst]:.3g} where eager is off by at most {(b - exact).abs().max():.3g}: "
        f"{a[worst]!r} instead of {exact[worst]!r}"
    )


def _kind(x: torch.Tensor) -> torch.Tensor:
    """Returns 0 for finite numbers, 1 for inf, -1 for -inf, 2 for NaN."""
    return torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), 0.0))
