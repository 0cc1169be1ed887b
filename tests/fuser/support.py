"""What the fuser's tests share: tracing a function into a region, and the float64 rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from fulgurite import fuser
from fulgurite.fuser.frontend import lower_graph
from fulgurite.fuser.ir import interpreter, split_axes, statement

aten = torch.ops.aten

# what kernels are generated: "cpp", "triton" (in its interpreter) or "cuda"; conftest.py sets it
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
KEPT = (aten.silu, aten.gelu, aten.silu_backward, aten.gelu_backward, aten.lerp, aten.clamp)


def decompositions() -> dict[Any, Any]:
    table = dict(core_aten_decompositions())
    table.update(get_decompositions(DECOMPOSED))
    kept = {getattr(packet, name) for packet in KEPT for name in packet.overloads()}
    return {op: rule for op, rule in table.items() if op not in kept}


def trace(
    function: Callable[..., Any], arguments: Sequence[Any], mode: str = "fake"
) -> torch.fx.GraphModule:
    """A functional ATen graph, with FakeTensor metadata, as a region has it."""
    graph = make_fx(function, tracing_mode=mode, decomposition_table=decompositions())(*arguments)
    functional = torch.func.functionalize(graph, remove="mutations")
    graph = make_fx(functional, tracing_mode=mode)(*arguments)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def tupled(result: Any) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, tuple | list) else (result,)


def oracle(function: Callable[..., Any], *arguments: Any, mode: str = "fake") -> statement.Region:
    """Reads, checks and interprets the function, and compares with eager."""
    region = lower_graph.read(trace(function, arguments, mode))
    statement.check(region)
    refined = split_axes.refine(region)
    statement.check(refined)
    for stage in (region, refined):
        compare(interpreter.run(stage, arguments), function, arguments)
    return refined


def fused(function: Callable[..., Any], *arguments: Any, mode: str = "fake") -> fuser.FusedRegion:
    """Lowers and runs the function, and compares with eager by the float64 rule."""
    with place():
        arguments = tuple(map(placed, arguments))
        region = lowered(function, arguments, mode)
        compare(region(*arguments), function, arguments)
    return region


def lowered(
    function: Callable[..., Any], arguments: Sequence[Any], mode: str = "fake"
) -> fuser.FusedRegion:
    """The function's kernels for the target."""
    return fuser.lower(trace(function, arguments, mode), use_triton=TARGET == "triton")


def place() -> AbstractContextManager[Any]:
    """New tensors are made where the target wants them."""
    return torch.device("cuda") if TARGET == "cuda" else nullcontext()


def placed(argument: Any) -> Any:
    """The tensor where the target wants it."""
    return on_gpu(argument) if TARGET == "cuda" else argument


def again(region: fuser.FusedRegion, function: Callable[..., Any], *arguments: Any) -> None:
    """Runs what `fused` gave on other arguments, and compares with eager."""
    with place():
        arguments = tuple(map(placed, arguments))
        compare(region(*arguments), function, arguments)


def on_gpu(argument: Any) -> Any:
    """The same window onto the same memory, on the GPU."""
    if not isinstance(argument, torch.Tensor) or argument.is_cuda:
        return argument
    memory = (
        torch.empty(0, dtype=argument.dtype, device="cpu").set_(argument.untyped_storage()).cuda()
    )
    return memory.as_strided(argument.shape, argument.stride(), argument.storage_offset())


def widened(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor) and argument.is_floating_point():
        return argument.double()
    return argument


def compare(
    got: Sequence[Any], function: Callable[..., Any], arguments: Sequence[Any], slack: float = 4.0
) -> None:
    """Same dtypes, sizes, strides; errors against float64 at most twice eager's."""
    eager = tupled(function(*arguments))
    exact = tupled(function(*(widened(a) for a in arguments)))
    assert len(got) == len(eager), "another number of results"
    for ours, theirs, wide in zip(got, eager, exact, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs
            continue
        same_place(ours, theirs)
        close(ours, theirs, wide, slack)


def same_place(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype, f"{ours.dtype} instead of {theirs.dtype}"
    assert ours.shape == theirs.shape, f"{ours.shape} instead of {theirs.shape}"
    if theirs.numel():
        for size, have, want in zip(ours.shape, ours.stride(), theirs.stride(), strict=True):
            assert have == want or size == 1, f"{ours.stride()} instead of {theirs.stride()}"


def close(ours: torch.Tensor, theirs: torch.Tensor, wide: torch.Tensor, slack: float = 4.0) -> None:
    """ours is as near to float64 as theirs: at most twice the error, plus a few last places."""
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), f"{ours} instead of {theirs}"
        return
    a, b, exact = ours.double(), theirs.double(), wide.double()
    # NaN and infinity where eager has them, or where float64 does (eager gelu(inf) is NaN), or would in this dtype
    kind = _kind(a)
    odd = (
        (kind != _kind(b))
        & (kind != _kind(exact))
        & (kind != _kind(exact.to(theirs.dtype).double()))
    )
    assert not odd.any(), f"{a[odd]} instead of {b[odd]} (float64: {exact[odd]})"
    finite = b.isfinite() & exact.isfinite() & a.isfinite()
    if not finite.any():
        return
    a, b, exact = a[finite], b[finite], exact[finite]
    info = torch.finfo(theirs.dtype)
    floor = slack * info.eps * exact.abs() + info.tiny
    if theirs.dtype == torch.float64:
        # eager is its own reference: formulas may differ by a few last places of their terms
        floor = 64 * info.eps * (exact.abs() + 1)
    allowed = 2 * (b - exact).abs().max() + floor
    error = (a - exact).abs()
    worst = (error - allowed).argmax()
    assert bool((error <= allowed).all()), (
        f"off by {error[worst]:.3g} where eager is off by at most {(b - exact).abs().max():.3g}: "
        f"{a[worst]!r} instead of {exact[worst]!r}"
    )


def _kind(x: torch.Tensor) -> torch.Tensor:
    """0 for numbers, 1 for inf, -1 for -inf, 2 for NaN."""
    return torch.where(x.isnan(), 2.0, torch.where(x.isinf(), x.sign(), 0.0))
