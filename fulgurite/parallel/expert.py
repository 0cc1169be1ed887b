"""Experts spread over ranks: `ExpertParallel` stands where a layer's experts stood.

In: a rank's tokens and their routes. Out: the weighted sum of each token's experts, wherever they are.

    routes ─ replica table ─▶ slots ─ transport.dispatch ─▶ rows of other ranks' tokens too
       ─ this rank's experts, each row by one of them ─▶ results ─ transport.combine ─▶ own tokens

Each rank keeps the experts of its own slots. A placement may put one expert into several slots, or order
them by measured load; it is applied right behind the router, and nothing after that knows of it.

Every rank of the axis must call its layers equally often, also when it has no tokens.

Shapes: T tokens; k experts of a token; S rows that arrive; D hidden size; E experts; P slots.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.kernels.moe.routing import Routes
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.placement import Placement, ReplicaTable, contiguous
from fulgurite.parallel.transport import Transport


class ExpertParallel(nn.Module):
    """`experts(x_TD, routes)` with the experts of all ranks.

    `experts` is a module of the same call that holds this rank's experts only, in the order of its
    slots. It weighs what goes in or what comes out, as it does with all experts at hand.
    """

    def __init__(
        self,
        experts: nn.Module,
        transport: Transport,
        placement: Placement,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.experts = experts
        self.transport = transport
        self.placement = placement
        self.slots = placement.slots_LS.shape[1]
        self.layer = layer

    def forward(self, x_TD: Tensor, routes: Routes) -> Tensor:
        return self.finish(self.send(x_TD, routes))

    def send(self, x_TD: Tensor, routes: Routes) -> Any:
        """Start the tokens on their way."""
        slots_Tk = routes.experts_Tk
        if self.table is not None:
            slots_Tk = self.table.remap(self.layer, slots_Tk, self.transport.axis.index)
        return self.transport.send(x_TD, slots_Tk, self.slots, routes.weights_Tk)

    def finish(self, sent: Any) -> Tensor:
        """What the experts of all ranks make of them."""
        arrived = self.transport.receive(sent)
        visits = Routes(arrived.weights_S[:, None], arrived.experts_S[:, None])
        y_SD: Tensor = self.experts(arrived.x_SD, visits)
        return self.transport.combine(y_SD, arrived)

    @cached_property
    def table(self) -> ReplicaTable | None:
        """The slots of each expert; None where they lie in order. On the device the weights are on once
        tokens come: they may be made on none and loaded later."""
        if self.placement.slots_LS[self.layer].tolist() == list(range(self.placement.experts)):
            return None
        return self.placement.table(next(self.experts.parameters()).device)

    @property
    def mine(self) -> tuple[int, ...]:
        """The experts in this rank's slots."""
        found: list[int] = self.placement.by_rank_LRP[
            self.layer, self.transport.axis.index
        ].tolist()
        return tuple(found)

    @property
    def redundant(self) -> bool:
        """Whether some expert lies in several slots."""
        return self.slots > self.placement.experts

    def extra_repr(self) -> str:
        axis = self.transport.axis
        mine = self.slots // axis.size
        first = axis.index * mine
        return f"slots {first} to {first + mine - 1} of {self.slots}, {axis}"


class SharedBeside(nn.Module):
    """A mixture whose shared expert runs while tokens are on their way to the others."""

    def __init__(self, router: nn.Module, experts: ExpertParallel, shared: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.experts = experts
        self.shared = shared

    def forward(self, x_XD: Tensor) -> Tensor:
        x_TD = x_XD.flatten(0, -2)
        sent = self.experts.send(x_TD, self.router(x_TD))
        shared_XD: Tensor = self.shared(x_XD)
        return self.experts.finish(sent).view(x_XD.shape) + shared_XD


def spread_experts(
    experts: nn.Module,
    transport: Transport,
    placement: Placement | None = None,
    layer: int = 0,
) -> ExpertParallel:
    """Keep this rank's experts of a module that has all of them, and put the transport around it.

    Every parameter of `experts` is stacked over experts in its first dimension.
    """
    axis = transport.axis
    count = _count(experts)
    if placement is None:
        placement, layer = contiguous(1, count, axis.size), 0
    _check(placement, layer, count, axis)
    mine = placement.by_rank_LRP[layer, axis.index].tolist()  # experts, by slot
    for name, parameter in list(experts.named_parameters(recurse=False)):
        stacked = take(parameter.detach(), mine)
        setattr(experts, name, nn.Parameter(stacked, parameter.requires_grad))
    return ExpertParallel(experts, transport, placement, layer)


def take(stack: Tensor, rows: list[int]) -> Tensor:
    """Rows of a stack, dense or packed, as a new tensor: the whole stack may then be let go."""
    first, last = rows[0], rows[-1] + 1
    if rows == list(range(first, last)):
        return stack[first:last].clone()
    return torch.cat([stack[row : row + 1] for row in rows])


def _count(experts: nn.Module) -> int:
    sizes = {name: p.shape[0] for name, p in experts.named_parameters(recurse=False)}
    if len(set(sizes.values())) != 1:
        raise ArgumentError(
            f"{type(experts).__name__} is no stack of experts: {sizes or 'it has no parameters'}",
            next="every parameter has the experts in its first dimension",
        )
    return next(iter(sizes.values()))


def _check(placement: Placement, layer: int, count: int, axis: Axis) -> None:
    if placement.experts != count or placement.ranks != axis.size:
        raise ArgumentError(
            f"a placement of {placement.experts} experts on {placement.ranks} ranks was given for "
            f"{count} experts on {axis.size}",
            next="make it for this model and this mesh (fulgurite.parallel.rebalance)",
        )
    if not 0 <= layer < placement.layers:
        raise ArgumentError(
            f"the placement has {placement.layers} layers, and no layer {layer}",
            next="a placement has one row for each layer with experts",
        )
