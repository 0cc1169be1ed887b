"""A small transformer, for `fulgurite explain` without arguments, the docs and the tests.

In: token ids. Out: the loss of predicting each next token. Two layers of what large models are made of: RMS norm,
rotary positions, causal attention, a gated feed-forward.

    T  tokens    D  model width    N  heads    H  head width    V  vocabulary
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (x * scale).type_as(x) * self.weight


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turn each pair of channels by its position's angle."""
    left, right = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        qkv = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos_TH, sin_TH), rotate(k, cos_TH, sin_TH)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward_norm = RMSNorm(width)
        self.feed_forward = FeedForward(width, inner)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(
        self,
        layers: int = 2,
        width: int = 64,
        heads: int = 4,
        inner: int = 160,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.head_width = width // heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, inner) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def angles(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        channel = torch.arange(0, self.head_width, 2, device=x_BTD.device) / self.head_width
        position = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        angle = torch.outer(position, 10_000.0**-channel).repeat(1, 2)
        return angle.cos().to(x_BTD.dtype), angle.sin().to(x_BTD.dtype)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embedding(tokens_BT)
        cos, sin = self.angles(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


def example() -> tuple[Transformer, tuple[Tensor]]:
    """The model and an input, the same every time."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer()
    return model, (torch.randint(0, 256, (2, 32), generator=generator),)
