"""The layers that all families share: token ids and positions in, logits out.

All modules except attention work on each token by itself; attention goes through the KV cache. So
tokens may be flat, [T], or a batch, [B, T], and no module needs to know which.

Shapes: X token layout, [T] or [B, T]; D hidden size; I intermediate size; N query heads; K KV
heads; H head size; O vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.gemm.modules import compute_logits
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.config import ModelConfig
from fulgurite.models.kv_cache import KVCache, NoKVCache
from fulgurite.models.rope import RotaryCosSin, RotaryEmbedding


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight), in float32. Gemma's offset is 1."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x_XD: Tensor) -> Tensor:
        return elementwise.rms_norm(x_XD, self.weight, self.eps, self.offset)


class ResidualBlock(nn.Module):
    """A module that can fuse the norm before it and the residual add after it.

    `block(x, norm=norm, residual_XD=x)` is x + block(norm(x)), in fewer kernels where possible.
    """


class GatedMLP(ResidualBlock):
    """y = down_proj(activation(gate_proj(x)) * up_proj(x))."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = activation

    @classmethod
    def from_config(cls, config: ModelConfig) -> GatedMLP:
        """The MLP of a dense layer."""
        return cls(config.hidden_size, config.intermediate_size, config.activation, config.mlp_bias)

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, residual_XD: Tensor | None = None
    ) -> Tensor:
        """Apply `norm` to x first if given, and add the output to `residual_XD` if given."""
        gate, up = self.fused_projections
        intermediate_XI = fused_projections.fused_gate_up(x_XD, gate, up, self.activation, norm)
        return project_add(residual_XD, intermediate_XI, self.down_proj)

    @property
    def fused_projections(self) -> tuple[nn.Module, ...]:
        """The linears that read the same input."""
        return _get_children(self, "gate_proj", "up_proj")


class Attention(ResidualBlock):
    """Grouped-query attention, optionally with QK norm and attention sinks."""

    def __init__(
        self, config: ModelConfig, index: int, norm_offset: float = 0.0, sinks: bool = False
    ) -> None:
        super().__init__()
        layer = config.layers[index]
        self.spec = build_attention_spec(config, index)
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        query_size = config.num_heads * config.head_dim
        key_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.o_proj_bias)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, config.norm_eps, norm_offset)
            self.k_norm = RMSNorm(config.head_dim, config.norm_eps, norm_offset)
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if sinks else None

    def forward(
        self,
        x_XD: Tensor,
        positions_X: Tensor,
        cos_sin: RotaryCosSin | None,
        cache: KVCache,
        *,
        norm: RMSNorm | None = None,
        residual_XD: Tensor | None = None,
    ) -> Tensor:
        """Apply `norm` to x first if given, and add the output to `residual_XD` if given."""
        spec, sinks_N = self.spec, self.sinks
        q_X, k_X, v_X = fused_projections.fused_linears(x_XD, self.fused_projections, norm)
        cos, sin = (None, None) if cos_sin is None else cos_sin
        qkv = elementwise.ProjectedQKV(
            q_X.unflatten(-1, (-1, spec.key_dim)),
            k_X.unflatten(-1, (-1, spec.key_dim)),
            v_X.unflatten(-1, (-1, spec.value_dim)),
            self._get_qk_norm(),
            cos,
            sin,
            self.interleaved,
        )
        out_XNH = cache.attend_fused(spec, qkv, sinks_N)
        if out_XNH is None:
            q_XNH, k_XKH, v_XKH = elementwise.qk_norm_rope(*qkv, cache.cache_slots(spec))
            out_XNH = cache.attend(spec, q_XNH, k_XKH, v_XKH, positions_X, sinks_N)
        return project_add(residual_XD, out_XNH.flatten(-2), self.o_proj)

    @property
    def fused_projections(self) -> tuple[nn.Module, ...]:
        """The linears that read the same input."""
        return _get_children(self, "q_proj", "k_proj", "v_proj")

    def _get_qk_norm(self) -> elementwise.QKNorm | None:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return None
        return elementwise.QKNorm(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)


def _get_children(module: nn.Module, *names: str) -> tuple[nn.Module, ...]:
    """Children by name. It bypasses the slow `nn.Module.__getattr__`: every layer calls it each
    step.
    """
    modules: dict[str, Any] = module._modules
    return tuple([modules[name] for name in names])


def project_add(residual_XD: Tensor | None, x: Tensor, linear: nn.Module) -> Tensor:
    """linear(x), plus the residual if given."""
    if residual_XD is None:
        out_XD: Tensor = linear(x)
        return out_XD
    return fused_projections.fused_linear_add(residual_XD, x, linear)


def build_attention_spec(config: ModelConfig, index: int) -> AttentionSpec:
    """The attention spec of layer `index`, without MLA."""
    layer = config.layers[index]
    return AttentionSpec(
        layer_index=index,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        scale=config.attention_scale,
        sliding_window=layer.sliding_window,
        chunk_size=layer.attention_chunk_size,
        softcap=config.attention_softcap,
    )


class PreNormLayer(nn.Module):
    """h = x + attention(norm(x)); out = h + feed_forward(norm(h)): the layer of most families."""

    def __init__(self, config: ModelConfig, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, cos_sin: RotaryCosSin | None, cache: KVCache
    ) -> Tensor:
        h_XD = apply_residual_block(
            self.attention, self.attention_norm, x_XD, positions_X, cos_sin, cache
        )
        return apply_residual_block(self.feed_forward, self.feed_forward_norm, h_XD)


def apply_residual_block(block: nn.Module, norm: RMSNorm, x_XD: Tensor, *args: Any) -> Tensor:
    """x + block(norm(x))."""
    if isinstance(block, ResidualBlock):
        out_XD: Tensor = block(x_XD, *args, norm=norm, residual_XD=x_XD)
        return out_XD
    return elementwise.add(x_XD, block(norm(x_XD), *args))


class CausalLM(nn.Module):
    """A decoder-only language model: embedding, layers, norm, LM head.

    `model(token_ids, positions, cache)` returns the logits of every token. An engine that needs
    logits of few tokens calls `compute_hidden_states`, then `compute_logits` on the rows it needs.

    `recompute_after`: LongRoPE rotates all keys by other factors once a sequence is longer than
    this. The sequence must then be run again from its start. None for all other models.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], norm_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, norm_offset)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
        self.rotary_embeddings = nn.ModuleList(RotaryEmbedding(rope) for rope in ropes)
        self.rotary_index = tuple(
            None if layer.rope is None else ropes.index(layer.rope) for layer in config.layers
        )
        self.needs_sequence_lengths = any(rope.needs_sequence_length for rope in ropes)
        switches = [rope.original_max_positions for rope in ropes if rope.switches_factors]
        self.recompute_after = min(switches, default=None)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention spec of each layer: what a cache must store for it."""
        return tuple(layer.attention.spec for layer in self.layers)

    def forward(
        self, token_ids_X: Tensor, positions_X: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        return self.compute_logits(self.compute_hidden_states(token_ids_X, positions_X, cache))

    def compute_hidden_states(
        self, token_ids_X: Tensor, positions_X: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """The hidden state of every token after the last norm, [X, D]."""
        cache = NoKVCache() if cache is None else cache
        x_XD, cos_sins = self.embed(token_ids_X, positions_X, cache)
        return self.run_layers(x_XD, positions_X, cos_sins, cache)

    def embed(
        self, token_ids_X: Tensor, positions_X: Tensor, cache: KVCache
    ) -> tuple[Tensor, list[RotaryCosSin]]:
        """The inputs of the layers: embedded tokens, and cos and sin of their positions."""
        lengths_X = cache.sequence_lengths(positions_X) if self.needs_sequence_lengths else None
        cos_sins = [rotary(positions_X, lengths_X) for rotary in self.rotary_embeddings]
        x_XD = self.embed_tokens(token_ids_X)
        if self.config.embedding_scale != 1.0:
            # Gemma was trained with the scale rounded to the dtype of the weights.
            x_XD = x_XD * x_XD.new_full((), self.config.embedding_scale)
        return x_XD, cos_sins

    def run_layers(
        self, x_XD: Tensor, positions_X: Tensor, cos_sins: Sequence[RotaryCosSin], cache: KVCache
    ) -> Tensor:
        """All layers and the last norm: the part of a step that only launches kernels."""
        for layer, index in zip(self.layers, self.rotary_index, strict=True):
            cos_sin = None if index is None else cos_sins[index]
            x_XD = layer(x_XD, positions_X, cos_sin, cache)
        normed_XD: Tensor = self.norm(x_XD)
        return normed_XD

    def compute_logits(self, hidden_XD: Tensor) -> Tensor:
        """The logits of the next token, [X, O]."""
        logits_XO = compute_logits(
            hidden_XD, self.embed_tokens if self.lm_head is None else self.lm_head
        )
        cap = self.config.logit_softcap
        return logits_XO if cap is None else torch.tanh(logits_XO / cap) * cap
