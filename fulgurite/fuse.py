"""`fulgurite.fuse`: compiles a function to generated kernels only, or names the op that can't be fused.

In: a function of tensors. Out: a `Fused` function: call it like the original; `.kernels` lists its
kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import fx

from fulgurite import fuser
from fulgurite.compile import Compiled
from fulgurite.errors import FusionError
from fulgurite.executors import Executor
from fulgurite.executors.fuser import FUSER, kernels_of
from fulgurite.executors.torch import TORCH
from fulgurite.options import make_options
from fulgurite.trace import describe, source_of
from fulgurite.trace.node_meta import fake_value


class _HostCallsExecutor(Executor):
    """Assertions, reads of a size from data, and what follows from it: the host does these between
    kernels, as eager does. It is no torch executor, to which regions could fall back.
    """

    name = "torch"

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        return TORCH.lower(region)

    def claims(self, node: fx.Node) -> bool:
        is_number = isinstance(
            fake_value(node), int | torch.SymInt | torch.SymBool | torch.SymFloat
        )
        return node.target in HOST_CALLS or is_number


HOST_CALLS = (
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


class _RejectingExecutor(Executor):
    """The last executor: raises for every op that the fuser did not claim."""

    name = "nothing"

    def claims(self, node: fx.Node) -> bool:
        raise_fusion_error(node)

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        raise AssertionError("the rejecting executor claims nothing, so it lowers nothing")


def raise_fusion_error(node: fx.Node) -> NoReturn:
    """Raise the error for one op: its name, the user's line, its inputs and the reason."""
    name = str(node.target).removeprefix("aten.").split(".")[0]
    reason = fuser.unsupported_reason(node)
    inputs = [f"{n.name}: {describe(fake_value(n))}" for n in node.all_input_nodes]
    raise FusionError(
        f"{name} can't be part of a generated kernel yet",
        where=str(source_of(node)),
        input=", ".join(inputs),
        reason=None if reason == name else reason,
        next=f"use fulgurite.compile, which runs {name} with torch and fuses the other ops",
    )


class Fused(Compiled):
    """A function that runs generated kernels only."""

    @property
    def kernels(self) -> list[fuser.Kernel]:
        """Every kernel of every graph compiled so far: source, schedule, bytes, predicted time."""
        finals = [trace for trace in self.history if trace.stage == "final"]
        return [kernel for trace in finals for _, kernel in kernels_of(trace)]


def fuse(function: Callable[..., Any], *, dynamic: bool | None = None) -> Fused:
    """Compile a function to generated kernels only.

    The first call raises `FusionError` if an op can't be fused. `.kernels` lists the kernels. Assertions
    and reads of a size from data stay calls of the host between kernels.
    """
    options = make_options(
        executors=[FUSER, _HostCallsExecutor(), _RejectingExecutor()],
        dynamic=dynamic,
        fullgraph=True,
    )
    return Fused(function, options)
