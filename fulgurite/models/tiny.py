"""A small transformer: the example of `fulgurite explain`, of the docs and of the tests.

In: token ids. Out: the loss of next-token prediction. Two layers with the usual parts of large
models: RMSNorm, rotary embeddings, causal attention and a gated MLP.

    B  batch    T  tokens    D  hidden size    N  heads    H  head size
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        return (x * scale).type_as(x) * self.weight


def apply_rope(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Rotate each pair of channels by the angle of its position."""
    left, right = x_BNTH.chunk(2, dim=-1)
    return x_BNTH * cos_TH + torch.cat((-right, left), dim=-1) * sin_TH


class Attention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        qkv = self.qkv_proj(x_BTD).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        q, k = apply_rope(q, cos_TH, sin_TH), apply_rope(k, cos_TH, sin_TH)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size)
        self.attention = Attention(hidden_size, num_heads)
        self.feed_forward_norm = RMSNorm(hidden_size)
        self.feed_forward = FeedForward(hidden_size, intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    def __init__(
        self,
        num_layers: int = 2,
        hidden_size: int = 64,
        num_heads: int = 4,
        intermediate_size: int = 160,
        vocab_size: int = 256,
    ) -> None:
        super().__init__()
        self.head_dim = hidden_size // num_heads
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            Layer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)
        )
        self.norm = RMSNorm(hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def compute_cos_sin(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        channel = torch.arange(0, self.head_dim, 2, device=x_BTD.device) / self.head_dim
        position = torch.arange(x_BTD.shape[1], device=x_BTD.device)
        angle = torch.outer(position, 10_000.0**-channel).repeat(1, 2)
        return angle.cos().to(x_BTD.dtype), angle.sin().to(x_BTD.dtype)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        cos, sin = self.compute_cos_sin(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten())


def build_example() -> tuple[Transformer, tuple[Tensor]]:
    """A model and an input, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Transformer()
    return model, (torch.randint(0, 256, (2, 32), generator=generator),)
