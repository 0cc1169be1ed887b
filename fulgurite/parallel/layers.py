"""Tensor-parallel modules and hooks: full modules in, modules of a rank's shard out.

    VocabParallelEmbedding   rows of an embedding or head: looks up and computes logits
    RowParallelLinear        columns of a linear; its output is reduced over the axis
    GatheredInputLinear      the same place in deterministic mode: rows of a linear, no sum over ranks
    GatheredHeadsNorm        a norm over all heads in deterministic mode
    LocalTokensLinear        a full linear, applied to this rank's tokens only
    TensorParallelExperts    a range of each expert's intermediate size
    TokenSharding            which tokens belong to which rank (sequence parallelism)

Shapes: X the layout of the tokens; T all of them, flat; D hidden size; O vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.kernels.gemm.fused_projections import ResidualLinear, fused_linear_add
from fulgurite.kernels.gemm.modules import VocabTable, compute_logits
from fulgurite.kernels.moe.router_config import Routes
from fulgurite.parallel.collectives import (
    all_gather_columns,
    all_gather_tokens,
    copy_to_parallel_region,
    reduce_from_parallel_region,
    reduce_scatter_tokens,
    shard_range,
)
from fulgurite.parallel.mesh import Axis


class TokenSharding:
    """Tokens sharded over an axis; `shape` is the layout of all tokens in the last lookup."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.shape = torch.Size((0,))

    def reduce_scatter(self, x_XD: Tensor) -> Tensor:
        """Sum over ranks; each rank keeps its own tokens."""
        return reduce_scatter_tokens(x_XD.flatten(0, -2), self.axis)

    def all_gather(self, x_TD: Tensor) -> Tensor:
        """The tokens of all ranks in their layout."""
        all_TD = all_gather_tokens(x_TD, self.axis, self.shape.numel())
        return all_TD.view(*self.shape, all_TD.shape[-1])

    def take_local(self, x_XD: Tensor) -> Tensor:
        """This rank's tokens of those that every rank has."""
        start, stop = shard_range(self.shape.numel(), self.axis.index, self.axis.size)
        return x_XD.flatten(0, -2)[start:stop]


class VocabParallelEmbedding(VocabTable):
    """A range of a vocabulary's rows. `inner` is the embedding or linear with these rows."""

    def __init__(
        self,
        inner: nn.Module,
        axis: Axis,
        total: int,
        alignment: int,
        token_sharding: TokenSharding | None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.axis, self.total, self.alignment = axis, total, alignment
        self.token_sharding = token_sharding
        self.start, self.stop = shard_range(total, axis.index, axis.size, alignment)

    def forward(self, ids_X: Tensor) -> Tensor:
        inside_X = (ids_X >= self.start) & (ids_X < self.stop)
        rows_X = (ids_X - self.start).where(inside_X, 0)
        x_XD = self.inner(rows_X)
        x_XD = x_XD.where(inside_X[..., None], x_XD.new_zeros(()))
        if self.token_sharding is None:
            return reduce_from_parallel_region(x_XD, self.axis)
        self.token_sharding.shape = ids_X.shape
        return self.token_sharding.reduce_scatter(x_XD)

    def compute_logits(self, x: Tensor) -> Tensor:
        # Sharded tokens were all-gathered just before, whose backward reduces the gradients.
        x = x if self.token_sharding is not None else copy_to_parallel_region(x, self.axis)
        return all_gather_columns(
            compute_logits(x, self.inner), self.axis, self.total, self.alignment
        )

    def extra_repr(self) -> str:
        return f"rows {self.start} to {self.stop - 1} of {self.total}"


class RowParallelLinear(nn.Module):
    """A range of a linear's columns: reduced over the axis, then the bias is added once."""

    def __init__(self, inner: nn.Module, axis: Axis, token_sharding: TokenSharding | None) -> None:
        super().__init__()
        self.bias = inner.bias
        inner.bias = None
        self.inner = inner
        self.axis, self.token_sharding = axis, token_sharding

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = (
            reduce_from_parallel_region(y, self.axis)
            if self.token_sharding is None
            else self.token_sharding.reduce_scatter(y)
        )
        return y if self.bias is None else y + self.bias


class GatheredInputLinear(ResidualLinear):
    """A linear whose input columns are on all ranks; each product has the full K.

    Sums over ranks round in another order than one rank does. So the input is all-gathered, `inner`
    has a range of the linear's rows, and its output is all-gathered: the bits of one rank. Two
    messages instead of one, and the weights of a shard. With sharded tokens `inner` has all rows,
    and computes this rank's tokens only.
    """

    def __init__(
        self,
        inner: nn.Module,
        axis: Axis,
        in_features: tuple[int, int],
        out_features: tuple[int, int],
        token_sharding: TokenSharding | None,
    ) -> None:
        super().__init__()
        self.inner, self.axis, self.token_sharding = inner, axis, token_sharding
        self.in_features, self.out_features = in_features, out_features  # total and alignment

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self._gather_input(x))
        return self._gather_output(y)

    def forward_add(self, residual: Tensor, x: Tensor) -> Tensor:
        if self.token_sharding is None:
            total, alignment = self.out_features
            start, stop = shard_range(total, self.axis.index, self.axis.size, alignment)
            residual = residual[..., start:stop]
        return self._gather_output(fused_linear_add(residual, self._gather_input(x), self.inner))

    def _gather_input(self, x: Tensor) -> Tensor:
        x = all_gather_columns(x, self.axis, *self.in_features)
        return x if self.token_sharding is None else self.token_sharding.take_local(x)

    def _gather_output(self, y: Tensor) -> Tensor:
        if self.token_sharding is not None:
            return y
        return all_gather_columns(y, self.axis, *self.out_features)


class GatheredHeadsNorm(nn.Module):
    """A norm over the heads of all ranks, computed of all of them: no sum over ranks.

    `replicas` ranks have the same heads.
    """

    def __init__(self, inner: nn.Module, axis: Axis, replicas: int) -> None:
        super().__init__()
        self.inner, self.axis, self.replicas = inner, axis, replicas

    def forward(self, x: Tensor) -> Tensor:
        size, local = self.axis.size, x.shape[-1]
        all_heads = all_gather_columns(x, self.axis, size * local).unflatten(-1, (size, local))
        distinct = all_heads[..., :: self.replicas, :]
        normed: Tensor = self.inner(distinct.flatten(-2))
        return normed.view(distinct.shape)[..., self.axis.index // self.replicas, :]


class LocalTokensLinear(ResidualLinear):
    """The last linear of a replicated module, applied to this rank's tokens only."""

    def __init__(self, inner: nn.Module, token_sharding: TokenSharding) -> None:
        super().__init__()
        self.inner, self.token_sharding = inner, token_sharding

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.token_sharding.take_local(x))
        return y

    def forward_add(self, residual: Tensor, x: Tensor) -> Tensor:
        return fused_linear_add(residual, self.token_sharding.take_local(x), self.inner)


class TensorParallelExperts(nn.Module):
    """Experts with a range of their intermediate size; outputs are reduced over the axis.

    The bias of `down_proj` is added once, by the first rank.
    """

    def __init__(self, experts: nn.Module, axis: Axis, kept: tuple[int, int]) -> None:
        super().__init__()
        self.axis = axis
        typed_experts: Any = experts
        self.apply_router_weight_on_input = bool(typed_experts.apply_router_weight_on_input)
        self.down_proj_bias = experts.down_proj_bias
        experts.down_proj_bias = None  # a parameter, or nothing already
        start, stop = kept
        for name in ("gate_up_proj", "gate_up_proj_bias"):
            parameter = getattr(experts, name)
            if parameter is not None:
                full = parameter.detach()
                half = full.shape[1] // 2
                shards = (full[:, start:stop], full[:, half + start : half + stop])
                _replace_parameter(experts, name, torch.cat(shards, dim=1), parameter)
        down = experts.get_parameter("down_proj")
        _replace_parameter(experts, "down_proj", down.detach()[:, :, start:stop].clone(), down)
        self.experts = experts

    def forward(self, x_TD: Tensor, routes: Routes) -> Tensor:
        partial_TD = self.experts(x_TD, routes)
        if self.down_proj_bias is not None and self.axis.index == 0:
            bias_TkD = self.down_proj_bias[routes.experts_Tk]
            if not self.apply_router_weight_on_input:
                bias_TkD = bias_TkD * routes.weights_Tk[..., None]
            partial_TD = partial_TD + bias_TkD.sum(dim=1).to(partial_TD.dtype)
        return reduce_from_parallel_region(partial_TD, self.axis)


def _replace_parameter(module: nn.Module, name: str, value: Tensor, previous: Tensor) -> None:
    setattr(module, name, nn.Parameter(value, previous.requires_grad))


# ---- hooks -----------------------------------------------------------------------------------------


def add_input_hook(module: nn.Module, axis: Axis, token_sharding: TokenSharding | None) -> None:
    """Give all tokens to a module with sharded weights; the tokens are its first argument.

    A `norm` argument is applied before: it is replicated, so it stays outside the parallel region.
    """

    def enter_region(
        module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, *rest = arguments
        norm = named.get("norm")
        if norm is not None:
            x, named = norm(x), named | {"norm": None}
        if token_sharding is None:
            x = copy_to_parallel_region(x, axis)
        else:
            x = token_sharding.all_gather(x)
        return (x, *rest), named

    module.register_forward_pre_hook(enter_region, with_kwargs=True)


def add_gather_hook(module: nn.Module, token_sharding: TokenSharding) -> None:
    """All-gather the tokens behind a module."""
    module.register_forward_hook(lambda module, arguments, out: token_sharding.all_gather(out))
