"""Generated kernels: regions go through the fuser.

In: nodes and regions on the CPU. Out: a `FusedRegion`, which has `.kernels` to look at. Composite ops are
taken apart to reach it. Without a C++ compiler it claims nothing, and torch runs everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fulgurite import fuser
from fulgurite.executors.base import Executor


class FuserExecutor(Executor):
    name = "fuser"
    takes_pieces = True

    def claims(self, node: fx.Node) -> bool:
        return fuser.claims(node)

    def lower(self, region: fx.GraphModule) -> Callable[..., Sequence[Any]]:
        return fuser.lower(region)


FUSER = FuserExecutor()
