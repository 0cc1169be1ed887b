"""Expert load: how many tokens each expert receives; a running model in, counts [layers, experts]
out.

    with record_expert_load(model) as load_LE:
        model(token_ids, positions)
    rebalance_experts(load_LE, ranks=8)

Hooks on the routers count the tokens. Replayed steps (CUDA graphs, recorded native calls) do not
call the routers, so run the model eagerly while counting.

Shapes: L MoE layers; E experts; T tokens; k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.models.moe import Router
from fulgurite.parallel.placement import count_expert_load


@contextmanager
def record_expert_load(model: nn.Module) -> Iterator[Tensor]:
    """A tensor [L, E] that counts tokens per expert while the model runs; rows in layer order."""
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if not routers:
        raise ArgumentError("this model has no experts, so there is no expert load to record")
    device = routers[0].weight.device
    load_LE = torch.zeros(len(routers), len(routers[0].weight), dtype=torch.int64, device=device)
    handles = [
        router.register_forward_hook(_make_hook(row_E))
        for router, row_E in zip(routers, load_LE, strict=True)
    ]
    try:
        yield load_LE
    finally:
        for handle in handles:
            handle.remove()


def _make_hook(row_E: Tensor) -> Callable[[nn.Module, Any, Any], None]:
    def add(router: nn.Module, inputs: Any, routes: Any) -> None:
        row_E.add_(count_expert_load(routes.experts_Tk, len(row_E)))

    return add
