"""Norms: hidden states in, normalized hidden states out. All are computed in float32.

    RMSNorm         x / sqrt(mean(x^2) + eps) * (offset + weight)
    ProjectionNorm  the same over all heads of a projection; several ranks may have some heads each
    LayerNorm       (x - mean(x)) / sqrt(var(x) + eps) * weight + bias

Kernels fuse an `RMSNorm` with the linears behind it. The others run by themselves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.models.config import LAYER_NORM, LAYER_NORM_WITHOUT_BIAS, ModelConfig


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight), in float32. Gemma's offset is 1."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x_XD: Tensor) -> Tensor:
        return elementwise.rms_norm(x_XD, self.weight, self.eps, self.offset)


class ProjectionNorm(RMSNorm):
    """The RMS norm of all query (or key) heads of a token at once.

    If a rank has only some heads, `sum_over_ranks` adds the squares of the others, and `total_size`
    is the size of all heads.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.total_size = size
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_X: Tensor) -> Tensor:
        if self.sum_over_ranks is None:
            return super().forward(x_X)
        x = x_X.float()
        squares = self.sum_over_ranks(x.square().sum(dim=-1, keepdim=True))
        normed = x * torch.rsqrt(squares / self.total_size + self.eps)
        return (normed * self.weight.float()).to(x_X.dtype)


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension.

    With a weight [N, H] each of the N heads of x [X, N H] is normalized by itself.
    """

    def __init__(self, size: int | tuple[int, int], eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def forward(self, x_XD: Tensor) -> Tensor:
        weight, bias, shape = self.weight, self.bias, self.weight.shape
        if weight.dim() == 1 and weight.dtype == x_XD.dtype:  # one kernel, in float32 inside
            return F.layer_norm(x_XD, shape, weight, bias, self.eps)
        if weight.dim() == 1:
            bias = None if bias is None else bias.float()
            return F.layer_norm(x_XD.float(), shape, weight.float(), bias, self.eps).to(x_XD.dtype)
        heads_XNH = F.layer_norm(x_XD.float().unflatten(-1, shape), shape[-1:], eps=self.eps)
        return (heads_XNH * weight.float()).flatten(-2).to(x_XD.dtype)


def build_norm(config: ModelConfig, offset: float = 0.0) -> RMSNorm | LayerNorm:
    """A norm of hidden states, of the type that the model uses."""
    if config.norm_type == LAYER_NORM:
        return LayerNorm(config.hidden_size, config.norm_eps, bias=True)
    if config.norm_type == LAYER_NORM_WITHOUT_BIAS:
        return LayerNorm(config.hidden_size, config.norm_eps, bias=False)
    return RMSNorm(config.hidden_size, config.norm_eps, offset)


def build_qk_norm(config: ModelConfig, num_heads: int, offset: float) -> nn.Module:
    """The norm of `num_heads` query or key heads; see `ModelConfig.qk_norm_scope`."""
    if config.qk_norm_scope == "projection":
        return ProjectionNorm(num_heads * config.head_dim, config.norm_eps)
    if config.norm_type == LAYER_NORM_WITHOUT_BIAS:
        return LayerNorm((num_heads, config.head_dim), config.norm_eps, bias=False)
    return RMSNorm(config.head_dim, config.norm_eps, offset)
