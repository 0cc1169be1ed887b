"""The modules that stand where weights were divided, and the hooks that take tokens in and out.

    VocabularyTable   rows of an embedding or head; looks up and scores
    RowLinear         columns of a linear; its sums are taken over the axis
    OwnLinear         all of a linear, for a rank's own tokens
    DividedExperts    a share of each expert's inner size
    Tokens            which tokens are whose, where they are divided between attention and attention

Shapes: X the layout of the tokens; T all of them in a row; D hidden size; O vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.kernels.gemm.modules import Table, project
from fulgurite.kernels.moe.routing import Routes
from fulgurite.parallel.collectives import (
    enter,
    gather_columns,
    gather_tokens,
    leave,
    scatter_tokens,
    share,
)
from fulgurite.parallel.mesh import Axis


class Tokens:
    """Tokens divided over an axis; `shape` is the layout of all of them, from the last look-up."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.shape = torch.Size((0,))

    def scatter(self, x_XD: Tensor) -> Tensor:
        """Sums over ranks, of which each keeps its own tokens."""
        return scatter_tokens(x_XD.flatten(0, -2), self.axis)

    def gather(self, x_TD: Tensor) -> Tensor:
        """The tokens of all ranks in their layout."""
        whole = gather_tokens(x_TD, self.axis, self.shape.numel())
        return whole.view(*self.shape, whole.shape[-1])

    def own(self, x_XD: Tensor) -> Tensor:
        """Of tokens that every rank has, this rank's."""
        start, stop = share(self.shape.numel(), self.axis.index, self.axis.size)
        return x_XD.flatten(0, -2)[start:stop]


class VocabularyTable(Table):
    """A range of a vocabulary's rows. `inner` is the embedding or linear that holds them."""

    def __init__(
        self, inner: nn.Module, axis: Axis, total: int, step: int, tokens: Tokens | None
    ) -> None:
        super().__init__()
        self.inner = inner
        self.axis, self.total, self.step, self.tokens = axis, total, step, tokens
        self.start, self.stop = share(total, axis.index, axis.size, step)

    def forward(self, ids_X: Tensor) -> Tensor:
        inside_X = (ids_X >= self.start) & (ids_X < self.stop)
        rows_X = (ids_X - self.start).where(inside_X, 0)
        x_XD = self.inner(rows_X)
        x_XD = x_XD.where(inside_X[..., None], x_XD.new_zeros(()))
        if self.tokens is None:
            return leave(x_XD, self.axis)
        self.tokens.shape = ids_X.shape
        return self.tokens.scatter(x_XD)

    def project(self, x: Tensor) -> Tensor:
        # Divided tokens were gathered just before, which sums gradients on its way back.
        x = x if self.tokens is not None else enter(x, self.axis)
        return gather_columns(project(x, self.inner), self.axis, self.total, self.step)

    def extra_repr(self) -> str:
        return f"rows {self.start} to {self.stop - 1} of {self.total}"


class RowLinear(nn.Module):
    """A share of a linear's columns: sums over the axis, then the bias once."""

    def __init__(self, inner: nn.Module, axis: Axis, tokens: Tokens | None) -> None:
        super().__init__()
        self.bias = inner.bias
        inner.bias = None
        self.inner = inner
        self.axis, self.tokens = axis, tokens

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y = leave(y, self.axis) if self.tokens is None else self.tokens.scatter(y)
        return y if self.bias is None else y + self.bias


class OwnLinear(nn.Module):
    """The last linear of a module that runs whole on every rank: of this rank's own tokens only."""

    def __init__(self, inner: nn.Module, tokens: Tokens) -> None:
        super().__init__()
        self.inner, self.tokens = inner, tokens

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(self.tokens.own(x))
        return y


class DividedExperts(nn.Module):
    """Experts of which this rank has a range of the inner size; sums over the axis.

    The bias of `down` belongs to the sum, so the first rank alone adds it, to its part.
    """

    def __init__(self, experts: nn.Module, axis: Axis, inner: tuple[int, int]) -> None:
        super().__init__()
        self.axis = axis
        self.weigh_input = bool(getattr(experts, "weigh_input", False))
        self.down_bias = experts.down_bias
        experts.down_bias = None  # a parameter, or nothing already
        start, stop = inner
        for name in ("gate_up", "gate_up_bias"):
            parameter = getattr(experts, name)
            if parameter is not None:
                whole = parameter.detach()
                half = whole.shape[1] // 2
                parts = (whole[:, start:stop], whole[:, half + start : half + stop])
                _put(experts, name, torch.cat(parts, dim=1), parameter)
        down = experts.get_parameter("down")
        _put(experts, "down", down.detach()[:, :, start:stop].clone(), down)
        self.experts = experts

    def forward(self, x_TD: Tensor, routes: Routes) -> Tensor:
        part_TD = self.experts(x_TD, routes)
        if self.down_bias is not None and self.axis.index == 0:
            bias_TkD = self.down_bias[routes.experts_Tk]
            if not self.weigh_input:
                bias_TkD = bias_TkD * routes.weights_Tk[..., None]
            part_TD = part_TD + bias_TkD.sum(dim=1).to(part_TD.dtype)
        return leave(part_TD, self.axis)


def _put(module: nn.Module, name: str, value: Tensor, before: Tensor) -> None:
    setattr(module, name, nn.Parameter(value, before.requires_grad))


# ---- hooks -----------------------------------------------------------------------------------------


def enter_whole(module: nn.Module, axis: Axis, tokens: Tokens | None) -> None:
    """All tokens go into a module whose inside is divided; its first argument are the tokens.

    A norm that was handed in to be taken along stays outside: it belongs to what all ranks have.
    """

    def before(
        module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x, *rest = arguments
        norm = named.get("norm")
        if norm is not None:
            x, named = norm(x), named | {"norm": None}
        return (enter(x, axis) if tokens is None else tokens.gather(x), *rest), named

    module.register_forward_pre_hook(before, with_kwargs=True)


def gather_at_end(module: nn.Module, tokens: Tokens) -> None:
    """Behind this module every rank has all tokens again."""
    module.register_forward_hook(lambda module, arguments, out: tokens.gather(out))
