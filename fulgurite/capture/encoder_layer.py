"""The decomposition of torch's fused encoder layer on CPUs.

In: ATen's `_transformer_encoder_layer_fwd`, which `nn.TransformerEncoderLayer` calls in inference. Out: linears,
attention and norms, so that weights are packed and what is between the products is fused. On other devices, and
for nested tensors, the op stays whole.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# What `mask_type` says: the mask's shape is [L, L], [B, L] or [B, num_heads, L, L].
ATTENTION_MASK, PADDING_MASK = 0, 1


def decompose_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Any:
    """x + attention(norm(x)), then x + ffn(norm(x)); or each norm after its residual."""
    if not _can_decompose(src, mask, mask_type):
        return NotImplemented

    def attend(x: Tensor) -> Tensor:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _attend(x, num_heads, weights, mask, mask_type)

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else hidden.relu(), ffn_weight_2, ffn_bias_2)

    def norm_1(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_1, norm_bias_1, eps)

    def norm_2(x: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), norm_weight_2, norm_bias_2, eps)

    if norm_first:
        x = src + attend(norm_1(src))
        return x + feed_forward(norm_2(x))
    x = norm_1(src + attend(src))
    return norm_2(x + feed_forward(x))


def _can_decompose(x: Tensor, mask: Tensor | None, mask_type: int | None) -> bool:
    if x.is_nested or x.device.type != "cpu" or x.dim() != 3:
        return False
    return mask is None or mask_type in (0, 1, 2)


def _attend(
    x: Tensor,
    num_heads: int,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Tensor | None,
    mask_type: int | None,
) -> Tensor:
    """The projected context of a batch x [B, L, D]."""
    qkv_weight, qkv_bias, proj_weight, proj_bias = weights
    batch, length, width = x.shape
    qkv = F.linear(x, qkv_weight, qkv_bias).view(batch, length, 3, num_heads, width // num_heads)
    query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if mask is None:
        context = F.scaled_dot_product_attention(query, key, value)
    else:  # fused attention returns 0, not NaN, for a query whose keys are all hidden
        scores = (query / math.sqrt(width // num_heads)) @ key.transpose(-2, -1)
        scores = scores.masked_fill(_expand_mask(mask, mask_type), -math.inf)
        context = scores.softmax(-1) @ value
    context = context.transpose(1, 2).reshape(batch, length, width)
    return F.linear(context, proj_weight, proj_bias)


def _expand_mask(mask: Tensor, mask_type: int | None) -> Tensor:
    """The mask as booleans that broadcast to [B, H, L, L]: true hides a key. Eager takes numbers so, too."""
    hidden = mask.to(torch.bool)
    if mask_type == ATTENTION_MASK:
        return hidden[None, None]
    return hidden[:, None, None] if mask_type == PADDING_MASK else hidden


ENCODER_LAYER_DECOMPOSITIONS = {
    torch.ops.aten._transformer_encoder_layer_fwd.default: decompose_encoder_layer
}
