"""The layers of a decoder: hidden states in, hidden states out. They differ in the place of norms.

    PreNormLayer    x + block(norm(x))            most families
    PostNormLayer   x + norm(block(x))            OLMo 2 and 3, EXAONE 4
    SandwichLayer   x + norm(block(norm(x)))      Gemma 2 and 3, GLM-4
    ParallelLayer   x + attention(n) + feed_forward(n), n = norm(x)      Cohere

A block is the attention, then the feed-forward. Parameters have the same names in all layers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.models.blocks import ResidualBlock
from fulgurite.models.config import ModelConfig
from fulgurite.models.kv_cache import KVCache
from fulgurite.models.norms import LayerNorm, RMSNorm, build_norm
from fulgurite.models.rope import RotaryCosSin


class PreNormLayer(nn.Module):
    """h = x + attention(norm(x)); out = h + feed_forward(norm(h)): the layer of most families.

    Granite multiplies the outputs of both blocks by `residual_scale`.
    """

    def __init__(
        self,
        config: ModelConfig,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention_norm = build_norm(config, norm_offset)
        self.attention = attention
        self.feed_forward_norm = build_norm(config, norm_offset)
        self.feed_forward = feed_forward
        self.residual_scale = config.residual_scale

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, cos_sin: RotaryCosSin | None, cache: KVCache
    ) -> Tensor:
        arguments, scale = (positions_X, cos_sin, cache), self.residual_scale
        h_XD = apply_residual_block(
            self.attention, self.attention_norm, x_XD, *arguments, scale=scale
        )
        return apply_residual_block(self.feed_forward, self.feed_forward_norm, h_XD, scale=scale)


def apply_residual_block(
    block: nn.Module, norm: RMSNorm | LayerNorm, x_XD: Tensor, *args: Any, scale: float = 1.0
) -> Tensor:
    """x + scale * block(norm(x)), in fewer kernels where possible."""
    if not isinstance(block, ResidualBlock):
        return elementwise.add(x_XD, block(norm(x_XD), *args), scale)
    fused_norm = norm if isinstance(norm, RMSNorm) else None
    normed_XD: Tensor = x_XD if isinstance(norm, RMSNorm) else norm(x_XD)
    if scale != 1.0:
        return elementwise.add(x_XD, block(normed_XD, *args, norm=fused_norm), scale)
    out_XD: Tensor = block(normed_XD, *args, norm=fused_norm, residual_XD=x_XD)
    return out_XD


class PostNormLayer(nn.Module):
    """h = x + norm(attention(x)); out = h + norm(feed_forward(h))."""

    def __init__(self, config: ModelConfig, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_out_norm = build_norm(config)
        self.feed_forward_out_norm = build_norm(config)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, cos_sin: RotaryCosSin | None, cache: KVCache
    ) -> Tensor:
        attention_XD = self.attention(x_XD, positions_X, cos_sin, cache)
        x_XD = elementwise.add(x_XD, self.attention_out_norm(attention_XD))
        return elementwise.add(x_XD, self.feed_forward_out_norm(self.feed_forward(x_XD)))


class SandwichLayer(nn.Module):
    """h = x + norm(attention(norm(x))); out = h + norm(feed_forward(norm(h)))."""

    def __init__(
        self,
        config: ModelConfig,
        attention: nn.Module,
        feed_forward: nn.Module,
        norm_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm = build_norm(config, norm_offset)
        self.attention_out_norm = build_norm(config, norm_offset)
        self.feed_forward_norm = build_norm(config, norm_offset)
        self.feed_forward_out_norm = build_norm(config, norm_offset)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, cos_sin: RotaryCosSin | None, cache: KVCache
    ) -> Tensor:
        attention_XD = self.attention(self.attention_norm(x_XD), positions_X, cos_sin, cache)
        x_XD = elementwise.add(x_XD, self.attention_out_norm(attention_XD))
        mlp_XD = self.feed_forward(self.feed_forward_norm(x_XD))
        return elementwise.add(x_XD, self.feed_forward_out_norm(mlp_XD))


class ParallelLayer(nn.Module):
    """out = x + attention(n) + feed_forward(n), where n = norm(x)."""

    def __init__(
        self, config: ModelConfig, attention: ResidualBlock, feed_forward: ResidualBlock
    ) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward
        self.attention_norm = build_norm(config)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, cos_sin: RotaryCosSin | None, cache: KVCache
    ) -> Tensor:
        normed_XD = self.attention_norm(x_XD)
        h_XD = self.attention(normed_XD, positions_X, cos_sin, cache, residual_XD=x_XD)
        out_XD: Tensor = self.feed_forward(normed_XD, residual_XD=h_XD)
        return out_XD
