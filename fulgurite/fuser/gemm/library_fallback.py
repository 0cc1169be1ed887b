"""A region with matrix products as the library's calls and generated kernels after them.

In: a region as an fx graph. Out: a `LibraryRegion`: what one kernel for all of it is measured against, and what runs
where the region can't be one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fulgurite.fuser.gemm import pattern
from fulgurite.fuser.runtime.cpu_region import FusedRegion


class LibraryRegion(FusedRegion):
    """Products by torch, everything else by the kernels of `rest`, whose first arguments the products are."""

    def __init__(
        self, module: fx.GraphModule, lower: Callable[[fx.GraphModule], FusedRegion]
    ) -> None:
        products = [n for n in module.graph.nodes if n.target in pattern.PRODUCTS]
        after = pattern.epilogue(module, in_memory=True)
        self.rest = lower(after)
        self.region, self.unit = self.rest.region, self.rest.unit
        self.kernels, self.source = self.rest.kernels, self.rest.source
        self.launcher = ""
        placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
        place = {node: position for position, node in enumerate(placeholders)}
        self.operands = [tuple(place[m] for m in pattern.operands(n)) for n in products]
        kept = {n.name for n in after.graph.nodes if n.op == "placeholder"}
        self.others = [place[n] for n in placeholders if n.name in kept]

    @property
    def capturable(self) -> bool:
        return self.rest.capturable

    @property
    def overwritten(self) -> tuple[int, ...]:
        """As the rest says, whose arguments come after the products."""
        return tuple(self.others[k - len(self.operands)] for k in self.rest.overwritten)

    def wait(self) -> None:
        self.rest.wait()

    @property
    def prepared(self) -> Callable[..., tuple[Any, ...]] | None:
        return None

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        made = [torch.mm(arguments[left], arguments[right]) for left, right in self.operands]
        return self.rest(*made, *(arguments[k] for k in self.others))
