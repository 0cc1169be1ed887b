"""Expert parallelism in training: a model in; the same model with experts over data ranks out.

    routes ─ dispatch ─▶ rows of tokens of all ranks ─ this rank's experts ─▶ results ─ combine ─▶ own tokens

A rank keeps a contiguous range of experts: `gate_up_proj` and `down_proj` become DTensors, `Shard(0)`
over `ep` and replicated over `ep_replicate` (ranks with the same experts and other tokens). So optimizer
states and checkpoints know the full stack. Tokens travel by the project's dispatcher, and gradients take
the same way back: backward gives an expert the sum over all tokens of the ranks of `ep`. What is left to
reduce is the sum over `ep_replicate`. Losses are sums over tokens, so nothing is divided here.

Modules keep their places and parameters their names and full shapes, as on one rank: a checkpoint or an
export needs to know nothing of ranks. The shared expert of a layer runs while tokens are in flight, if the
dispatcher sends asynchronously. Every rank must run its layers equally often, also if it has no tokens.

**With tensor parallelism** a stack is `Shard(0)` over `ep` and then over `tp`. The tensor ranks of a group
have the same tokens and routes: each dispatches the rows of its own experts, to the ranks of its `ep`
group, and the sum over tensor ranks that ends a parallel region adds up the experts of a token.

Shapes: T tokens; D hidden size; k experts of a token; S rows of a rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.moe.ops import fused_experts
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.moe import Experts, MoE
from fulgurite.models.norms import RMSNorm
from fulgurite.parallel.collectives import copy_to_parallel_region, shard_range
from fulgurite.parallel.dispatch.all_to_all import AllToAllDispatcher
from fulgurite.parallel.dispatch.dispatcher import TokenDispatcher
from fulgurite.parallel.mesh import Axis
from fulgurite.train.parallel.layout_base import RankMesh, list_divisors

disable_capture = functools.partial(
    torch.compiler.disable, reason="the host reads how many rows each rank sends"
)


class EagerDispatcher:
    """A dispatcher that a compiled model calls between its graphs."""

    def __init__(self, dispatcher: TokenDispatcher) -> None:
        self.axis = dispatcher.axis
        self.start_dispatch = disable_capture(dispatcher.start_dispatch)
        self.finish_dispatch = disable_capture(dispatcher.finish_dispatch)
        self.combine = disable_capture(dispatcher.combine)


class ShardedExperts(Experts):
    """`experts(x_TD, routes)` with the experts of all ranks; parameters are DTensors.

    Expert e is on rank e // P of the axis, where P = ceil(experts / ranks).
    """

    dispatcher: EagerDispatcher
    num_slots: int  # P times the ranks; the last ranks may have empty ones

    def forward(
        self, x_TD: Tensor, routes: Routes, norm: Any = None, residual_TD: Tensor | None = None
    ) -> Tensor:
        assert norm is None and residual_TD is None, "the MoE layer applies them"
        return self.finish(self.start_dispatch(x_TD, routes))

    def start_dispatch(self, x_TD: Tensor, routes: Routes) -> Any:
        """Start to send the tokens to their experts."""
        return self.dispatcher.start_dispatch(
            x_TD, routes.experts_Tk, self.num_slots, routes.weights_Tk
        )

    def finish(self, pending: Any) -> Tensor:
        """Run this rank's experts on the received rows and combine the results of all ranks."""
        dispatched = self.dispatcher.finish_dispatch(pending)
        routes = Routes(dispatched.weights_S[:, None], dispatched.experts_S[:, None])
        y_SD = fused_experts(
            dispatched.x_SD,
            routes,
            read_shard(self.gate_up_proj),
            read_shard(self.down_proj),
            self.activation,
            gate_up_bias=read_shard(self.gate_up_proj_bias),
            down_bias=read_shard(self.down_proj_bias),
            apply_router_weight_on_input=self.apply_router_weight_on_input,
        )
        out_TD: Tensor = self.dispatcher.combine(y_SD, dispatched)
        return out_TD


class TensorShardedExperts(ShardedExperts):
    """The experts of one tensor rank: a partial sum over each token's experts.

    Of the ceil(experts / ep) experts of an `ep` rank, tensor rank t has the t-th part.
    """

    tensor_axis: Axis
    num_local: int  # experts of this rank

    def forward(
        self, x_TD: Tensor, routes: Routes, norm: Any = None, residual_TD: Tensor | None = None
    ) -> Tensor:
        assert norm is None and residual_TD is None, "TensorParallelMoE applies them"
        return self._run_own(x_TD, routes)

    @disable_capture
    def _run_own(self, x_TD: Tensor, routes: Routes) -> Tensor:
        weights_Tk = copy_to_parallel_region(routes.weights_Tk, self.tensor_axis)
        num_group = self.num_local * self.tensor_axis.size  # experts of an `ep` rank
        inside_Tk = routes.experts_Tk % num_group
        is_own_Tk = inside_Tk // self.num_local == self.tensor_axis.index
        slots_Tk = routes.experts_Tk // num_group * self.num_local + inside_Tk % self.num_local
        tokens_S, choices_S = is_own_Tk.nonzero(as_tuple=True)
        own = Routes(
            weights_Tk[tokens_S, choices_S][:, None], slots_Tk[tokens_S, choices_S][:, None]
        )
        y_SD = self.finish(self.start_dispatch(x_TD[tokens_S], own))
        return torch.zeros_like(x_TD).index_add(0, tokens_S, y_SD.to(x_TD.dtype))


class OverlappedMoE(MoE):
    """The shared expert runs while tokens are in flight."""

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, residual_XD: Tensor | None = None
    ) -> Tensor:
        x_XD = x_XD if norm is None else norm(x_XD)
        x_TD, experts = x_XD.flatten(0, -2), self.experts
        assert isinstance(experts, ShardedExperts) and self.shared_expert is not None
        pending = experts.start_dispatch(x_TD, self.router(x_TD))
        shared_XD = self.shared_expert(x_XD, residual_XD=residual_XD)
        return elementwise.add(shared_XD, experts.finish(pending).view(x_XD.shape))


def read_shard(parameter: Any) -> Any:
    """This rank's experts; other tensors, or None, as they are. The gradient is a DTensor with the same placements."""
    if not isinstance(parameter, DTensor):
        return parameter
    return parameter.to_local(grad_placements=parameter.placements)


def is_expert_shard(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a stack of experts that `distribute_experts` sharded."""
    if not isinstance(parameter, DTensor):
        return False
    return "ep" in (parameter.device_mesh.mesh_dim_names or ())


def check_experts(num_experts: int, degree: int, tensor: int = 1) -> None:
    """Raise if a rank would have no experts, or tensor ranks different numbers of them."""
    if degree > 1 and not num_experts:
        raise ArgumentError(
            f"parallel.expert={degree}, but the model has no experts", next="parallel.expert=1"
        )
    start, stop = shard_range(num_experts, degree - 1, degree)
    if degree > 1 and start == stop:
        raise ArgumentError(
            f"parallel.expert={degree}: {num_experts} experts leave the last rank without one",
            next=f"one of {list_divisors(num_experts)}",
        )
    if degree > 1 and tensor > 1 and num_experts % (degree * tensor):
        raise ArgumentError(
            f"parallel.expert={degree} x parallel.tensor={tensor} = {degree * tensor} ranks must "
            f"divide the {num_experts} experts",
            next="parallel.expert=1 distributes experts over the tensor ranks alone; or a product "
            f"that is one of {list_divisors(num_experts)}",
        )


def distribute_experts(
    model: nn.Module, ranks: RankMesh, dispatcher: TokenDispatcher | None = None
) -> int:
    """Keep this rank's experts in every MoE layer, in place; returns the number of layers.

    `dispatcher` None: all-to-all.
    """
    dispatcher = dispatcher or AllToAllDispatcher(ranks.axis("ep"))
    layers = [(name, moe) for name, moe in model.named_modules() if isinstance(moe, MoE)]
    for name, moe in layers:
        if not isinstance(moe.experts, Experts):
            raise ArgumentError(
                f"{type(moe.experts).__name__} can't be distributed over ranks",
                where=f"{name}.experts",
                next="parallel.expert=1",
            )
        shard_experts(moe.experts, dispatcher, ranks)
        if moe.shared_expert is not None and ranks.degrees.tp == 1:
            moe.__class__ = OverlappedMoE
    if not layers:
        check_experts(0, ranks.degrees.ep)
    return len(layers)


def shard_experts(experts: Experts, dispatcher: TokenDispatcher, ranks: RankMesh) -> None:
    """Replace the stacks of a layer by this rank's shards, in place."""
    axis, tensor, (mesh, placements) = dispatcher.axis, ranks.axis("tp"), expert_placements(ranks)
    num_experts = experts.gate_up_proj.shape[0]
    check_experts(num_experts, axis.size, tensor.size)
    start, stop = shard_range(num_experts, axis.index, axis.size)
    inner_start, inner_stop = shard_range(stop - start, tensor.index, tensor.size)
    start, stop = start + inner_start, start + inner_stop
    for name, parameter in list(experts.named_parameters(recurse=False)):
        full = parameter.detach()
        shard = DTensor.from_local(
            full[start:stop].clone(),
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        setattr(experts, name, nn.Parameter(shard, parameter.requires_grad))
    experts.__class__ = ShardedExperts if tensor.size == 1 else TensorShardedExperts
    assert isinstance(experts, ShardedExperts)
    experts.dispatcher = EagerDispatcher(dispatcher)
    experts.num_slots = -(-num_experts // axis.size) * axis.size
    if isinstance(experts, TensorShardedExperts):
        experts.tensor_axis, experts.num_local = tensor, stop - start
        experts.num_slots = num_experts // tensor.size


def expert_placements(ranks: RankMesh) -> tuple[DeviceMesh, list[Placement]]:
    """The dimensions over which experts are replicated and sharded, and how."""
    dims: dict[str, Placement] = {"ep_replicate": Replicate(), "ep": Shard(0), "tp": Shard(0)}
    names = [name for name in dims if name == "ep" or getattr(ranks.degrees, name) > 1]
    return ranks.expert_mesh[tuple(names)], [dims[name] for name in names]
