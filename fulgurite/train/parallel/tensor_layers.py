"""Modules of tensor-parallel training: modules with DTensor parameters in, the same ones, split, out.

`parallel/tensor.py` changes the class of a module to one of these. The module keeps its name and its
parameters, so state dicts have the names of one rank. Parameters are DTensors; inside a module they
read as their local tensors (`localize`), whose gradients become gradients of the DTensors.

    VocabParallelEmbedding, VocabParallelLinear   rows of the vocabulary; the loss reads local columns
    RowParallelLinear       columns of a linear; its output is reduced
    PartialRowLinear        the same without the reduction, which `TensorParallelMoE` does
    TensorParallelMoE       experts and the intermediate size of the shared expert are split
    LocalExperts            whole experts, a range of them on each rank

A parallel region begins with `Region.enter` and ends with `Region.leave`. Gradients inside it are partial
sums. With sequence parallelism tokens are split outside of it.

Shapes: X token layout; T tokens, flat; D hidden size; E experts; k experts of a token; O vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from fulgurite.kernels.moe.router_config import Routes
from fulgurite.models.moe import Experts, MoE
from fulgurite.models.norms import RMSNorm
from fulgurite.parallel.collectives import (
    all_gather_columns,
    copy_to_parallel_region,
    reduce_from_parallel_region,
    shard_range,
)
from fulgurite.parallel.layers import TokenSharding
from fulgurite.parallel.mesh import Axis
from fulgurite.train.loss import LossTable
from fulgurite.train.parallel.vocab_loss import SplitLoss, vocab_parallel_cross_entropy

Rows = tuple[int, int]
disable_capture = functools.partial(
    torch.compiler.disable, reason="the host reads how many tokens this rank's experts get"
)


@dataclass(frozen=True, eq=False)
class Region:
    """Where weights are split over an axis. `tokens`: how tokens are split outside; None: not."""

    axis: Axis
    tokens: TokenSharding | None = None

    def enter(self, x_XD: Tensor) -> Tensor:
        """All tokens, whose gradients are summed over ranks."""
        if self.tokens is None:
            return copy_to_parallel_region(x_XD, self.axis)
        return self.tokens.all_gather(x_XD)

    def leave(self, partial_XD: Tensor) -> Tensor:
        """The sum over ranks: of all tokens, or of this rank's tokens."""
        if self.tokens is None:
            return reduce_from_parallel_region(partial_XD, self.axis)
        return self.tokens.reduce_scatter(partial_XD)


# ---- parameters ------------------------------------------------------------------------------------


def localize(module: nn.Module, rows: dict[str, Rows] | None = None) -> None:
    """Make a module read its own DTensor parameters as local tensors; `rows` are parts of some."""
    names = tuple(name for name, p in module._parameters.items() if p is not None)
    if not names:
        return
    module.__class__ = _local_class(type(module), names)
    module._local_rows = rows or {}  # type: ignore[assignment]


_local_classes: dict[tuple[type, tuple[str, ...]], type] = {}


def _local_class(base: type, names: tuple[str, ...]) -> type:
    """A subclass with a property for each parameter."""
    key = (base, names)
    if key not in _local_classes:
        properties = {name: property(_make_getter(name)) for name in names}
        _local_classes[key] = type(f"Local{base.__name__}", (base,), properties)
    return _local_classes[key]


def _make_getter(name: str) -> Callable[[Any], Tensor | None]:
    def get(module: Any) -> Tensor | None:
        parameter = module._parameters[name]
        # FSDP reads attributes, too: its shards have data dimensions. In forward they are gathered.
        if not isinstance(parameter, DTensor) or parameter.device_mesh.ndim > 1:
            return parameter  # type: ignore[no-any-return]
        local = parameter.to_local()
        rows = module._local_rows.get(name)
        return local if rows is None else local[rows[0] : rows[1]]

    return get


# ---- modules ---------------------------------------------------------------------------------------


class VocabParallel(LossTable):
    """Rows `start` to `stop` of a vocabulary of `total`."""

    region: Region
    start: int
    stop: int
    total: int
    weight: Tensor

    def compute_local_logits(self, x_XD: Tensor) -> Tensor:
        """The logits of this rank's rows. Tokens that were split are all-gathered already."""
        if self.region.tokens is None:
            x_XD = copy_to_parallel_region(x_XD, self.region.axis)
        return F.linear(x_XD, self.weight, getattr(self, "bias", None))

    def compute_logits(self, x: Tensor) -> Tensor:
        """All logits, for sampling and evaluation. A loss reads `compute_local_logits`."""
        return all_gather_columns(self.compute_local_logits(x), self.region.axis, self.total)

    def sum_cross_entropy(
        self, hidden_TD: Tensor, labels_T: Tensor, z_weight: float, scale: float, cap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sums of loss + z_weight * z, of loss and of z, from chunks of this rank's columns."""
        if self.region.tokens is None:
            hidden_TD = copy_to_parallel_region(hidden_TD, self.region.axis)
        axis = self.region.axis
        _, most_columns = shard_range(self.total, 0, axis.size)
        options = SplitLoss(axis, self.start, z_weight, scale, cap, most_columns)
        bias = getattr(self, "bias", None)
        return vocab_parallel_cross_entropy(hidden_TD, self.weight, bias, labels_T, options)


class VocabParallelEmbedding(VocabParallel, nn.Embedding):
    """An embedding, and the head of a model with tied embeddings."""

    def forward(self, ids_X: Tensor) -> Tensor:
        inside_X = (ids_X >= self.start) & (ids_X < self.stop)
        x_XD = F.embedding((ids_X - self.start).where(inside_X, 0), self.weight)
        x_XD = x_XD.where(inside_X[..., None], x_XD.new_zeros(()))
        if self.region.tokens is not None:
            self.region.tokens.shape = ids_X.shape
        return self.region.leave(x_XD)


class VocabParallelLinear(VocabParallel, nn.Linear):
    """A head."""

    def forward(self, x: Tensor) -> Tensor:
        return self.compute_logits(x)


class RowParallelLinear(nn.Linear):
    """Columns of a linear: the bias is added once, after the reduction."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        y = self.region.leave(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class PartialRowLinear(nn.Linear):
    """Columns of a linear: a partial sum; the first rank adds the bias."""

    region: Region

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias
        if bias is not None and self.region.axis.index:
            bias = bias * 0.0  # in the graph, so that every rank has a gradient
        return F.linear(x, self.weight, bias)


class LocalExperts(Experts):
    """Experts `first` to `first + count - 1`: a partial sum over each token's experts."""

    region: Region
    first: int
    count: int

    def forward(
        self, x_TD: Tensor, routes: Routes, norm: Any = None, residual_TD: Tensor | None = None
    ) -> Tensor:
        assert norm is None and residual_TD is None, "TensorParallelMoE applies them"
        return self._run_local(x_TD, routes)

    @disable_capture
    def _run_local(self, x_TD: Tensor, routes: Routes) -> Tensor:
        weights_Tk = copy_to_parallel_region(routes.weights_Tk, self.region.axis)
        local_Tk = routes.experts_Tk - self.first
        is_local_Tk = (local_Tk >= 0) & (local_Tk < self.count)
        tokens_S, choices_S = is_local_Tk.nonzero(as_tuple=True)
        local = Routes(
            weights_Tk[tokens_S, choices_S][:, None], local_Tk[tokens_S, choices_S][:, None]
        )
        y_SD = Experts.forward(self, x_TD[tokens_S], local)
        return torch.zeros_like(x_TD).index_add(0, tokens_S, y_SD.to(x_TD.dtype))


class TensorParallelMoE(MoE):
    """All tokens go through the router of every rank, and through this rank's experts.

    The router sees all tokens on every rank, so its gradients, and those of a loss on its scores, are
    complete on each. They are divided by the ranks before the sum that ends the region in backward.
    """

    region: Region

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, residual_XD: Tensor | None = None
    ) -> Tensor:
        x_XD = x_XD if norm is None else norm(x_XD)
        all_XD = self.region.enter(x_XD)
        all_TD = all_XD.flatten(0, -2)
        routes = self.router(_ScaleGradient.apply(all_TD, 1 / self.region.axis.size))
        partial_TD = self.experts(all_TD, routes)
        if self.shared_expert is not None:
            partial_TD = partial_TD + self.shared_expert(all_XD).flatten(0, -2)
        out = self.region.leave(partial_TD.view(all_XD.shape))
        return out if residual_XD is None else residual_XD + out


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * ctx.scale, None
