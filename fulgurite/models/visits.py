"""How often each expert is visited: a model that runs in, counts [layers, experts] out.

    with count_visits(model) as visits:
        model(token_ids, positions)
    rebalance(visits, ranks=8)

Counts are of real tokens through the routers as they are called. Steps that are replayed (a CUDA graph,
recorded native calls) call no router: count over plain calls of the model.

Shapes: L layers with experts; E experts; T tokens; k experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.moe import Router
from fulgurite.parallel.placement import count_load


@contextmanager
def count_visits(model: nn.Module) -> Iterator[Tensor]:
    """A tensor [L, E] that fills while the model runs; rows in the order of the layers."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ArgumentError("this model has no experts, so there are no visits to count")
    device = routers[0].weight.device
    visits_LE = torch.zeros(len(routers), len(routers[0].weight), dtype=torch.int64, device=device)
    handles = [
        router.register_forward_hook(_counter(row_E))
        for router, row_E in zip(routers, visits_LE, strict=True)
    ]
    try:
        yield visits_LE
    finally:
        for handle in handles:
            handle.remove()


def _counter(row_E: Tensor) -> Callable[[nn.Module, Any, Any], None]:
    def add(router: nn.Module, inputs: Any, routes: Any) -> None:
        row_E.add_(count_load(routes.experts_Tk, len(row_E)))

    return add
