"""Bidirectional encoders: token ids of whole sequences in, a hidden state a token out.

    x = norm(word + position + type)
    x = norm(x + attention(x)); x = norm(x + feed_forward(x))      a layer of BERT, RoBERTa, XLM-R

All modules except attention work on each token by itself, so the sequences of a batch lie end to end
without padding. Attention runs sequence by sequence.

Shapes: T tokens of all sequences; D hidden size; N heads; H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.models.norms import LayerNorm


@dataclass(frozen=True)
class EncoderConfig:
    """The shape of an encoder.

    padding_id   RoBERTa counts positions from padding_id + 1; None: from 0
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_positions: int
    num_types: int
    activation: str
    norm_eps: float
    dtype: torch.dtype
    padding_id: int | None = None

    @property
    def max_tokens(self) -> int:
        """The most tokens of a sequence."""
        return self.max_positions - (0 if self.padding_id is None else self.padding_id + 1)


class EncoderAttention(nn.Module):
    """Attention in which every token of a sequence sees all others."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        size = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size) for _ in "qkvo")

    def forward(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        q_TNH, k_TNH, v_TNH = (
            proj(x_TD).unflatten(-1, (self.num_heads, -1))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        outputs = [
            F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv))[0].transpose(
                0, 1
            )
            for qkv in zip(*(x.split(lengths) for x in (q_TNH, k_TNH, v_TNH)), strict=True)
        ]
        attended: Tensor = self.o_proj(torch.cat(outputs).flatten(-2))
        return attended


class EncoderLayer(nn.Module):
    """x = norm(x + attention(x)); x = norm(x + down_proj(activation(up_proj(x))))."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = EncoderAttention(config)
        self.attention_norm = LayerNorm(config.hidden_size, config.norm_eps, bias=True)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.output_norm = LayerNorm(config.hidden_size, config.norm_eps, bias=True)
        self.activation = config.activation

    def forward(self, x_TD: Tensor, lengths: list[int]) -> Tensor:
        x_TD = self.attention_norm(x_TD + self.attention(x_TD, lengths))
        up_TI = self.up_proj(x_TD)
        act_TI = elementwise.activate(up_TI, self.activation)
        out_TD: Tensor = self.output_norm(x_TD + self.down_proj(act_TI))
        return out_TD


class Encoder(nn.Module):
    """An encoder: `encoder(token_ids_T, lengths)` returns the hidden states [T, D].

    `lengths` are those of the sequences, which lie end to end in `token_ids_T`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, size)
        self.position_embeddings = nn.Embedding(config.max_positions, size)
        self.type_embeddings = nn.Embedding(config.num_types, size)
        self.embedding_norm = LayerNorm(size, config.norm_eps, bias=True)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))

    @property
    def device(self) -> torch.device:
        return self.word_embeddings.weight.device

    def forward(self, token_ids_T: Tensor, lengths: Sequence[int]) -> Tensor:
        lengths = list(lengths)
        positions_T = torch.cat([self._positions(ids) for ids in token_ids_T.split(lengths)])
        x_TD = self.word_embeddings(token_ids_T) + self.type_embeddings.weight[0]  # text is type 0
        x_TD = self.embedding_norm(x_TD + self.position_embeddings(positions_T))
        for layer in self.layers:
            x_TD = layer(x_TD, lengths)
        return x_TD

    def _positions(self, token_ids_T: Tensor) -> Tensor:
        """Positions of one sequence. RoBERTa does not count padding tokens, wherever they are."""
        padding_id = self.config.padding_id
        if padding_id is None:
            return torch.arange(len(token_ids_T), device=token_ids_T.device)
        is_token = token_ids_T != padding_id
        return is_token.cumsum(0) * is_token + padding_id
