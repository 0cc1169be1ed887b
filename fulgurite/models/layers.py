"""The pieces all families share: token ids and positions in, logits out.

Every module here works on one token at a time except attention, which goes through the cache; so
the tokens may come flat, [T], or in a batch, [B, T], and nothing in a model can tell.

Shapes: X the layout of the tokens, [T] or [B, T]; D hidden size; I inner size; N query heads;
K key heads; H head size; O vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.gemm.modules import project
from fulgurite.models.cache import AttentionSpec, Cache, WholeSequence
from fulgurite.models.config import ModelConfig
from fulgurite.models.rope import Rotary, Rotation


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * (offset + weight), in float32; Gemma's offset is 1."""

    def __init__(self, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x_XD: Tensor) -> Tensor:
        return ops.rms_norm(x_XD, self.weight, self.eps, self.offset)


class Block(nn.Module):
    """A part of a layer that takes the norm before it and the sum behind it along.

    `block(x, norm=norm, onto_XD=x)` is x + block(norm(x)), where it can in fewer kernels.
    """


class GatedMLP(Block):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int, activation: str, bias: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=bias)
        self.up = nn.Linear(hidden, inner, bias=bias)
        self.down = nn.Linear(inner, hidden, bias=bias)
        self.activation = activation

    def forward(
        self, x_XD: Tensor, *, norm: RMSNorm | None = None, onto_XD: Tensor | None = None
    ) -> Tensor:
        """Of norm(x) where one is given, and added onto `onto_XD`."""
        gate, up = self.together
        inner_XI = fused_projections.gated(x_XD, gate, up, self.activation, norm)
        return project_onto(onto_XD, inner_XI, self.down)

    @property
    def together(self) -> tuple[nn.Module, ...]:
        """The linears that read the same x."""
        return _children(self, "gate", "up")


class Attention(Block):
    """Grouped-query attention; optionally norms on each head of query and key, and sinks."""

    def __init__(
        self, config: ModelConfig, index: int, norm_offset: float = 0.0, sinks: bool = False
    ) -> None:
        super().__init__()
        layer = config.layers[index]
        self.spec = attention_spec(config, index)
        self.interleaved = layer.rope is not None and layer.rope.interleaved
        query_size, key_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden, query_size, bias=config.query_bias)
        self.key = nn.Linear(config.hidden, key_size, bias=config.query_bias)
        self.value = nn.Linear(config.hidden, key_size, bias=config.query_bias)
        self.output = nn.Linear(query_size, config.hidden, bias=config.output_bias)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_dim, config.norm_eps, norm_offset)
            self.key_norm = RMSNorm(config.head_dim, config.norm_eps, norm_offset)
        self.sinks = nn.Parameter(torch.empty(config.heads)) if sinks else None

    def forward(
        self,
        x_XD: Tensor,
        positions_X: Tensor,
        rotation: Rotation | None,
        cache: Cache,
        *,
        norm: RMSNorm | None = None,
        onto_XD: Tensor | None = None,
    ) -> Tensor:
        """Of norm(x) where one is given, and added onto `onto_XD`."""
        spec, sinks_N = self.spec, self.sinks
        q_X, k_X, v_X = fused_projections.linears(x_XD, self.together, norm)
        cos, sin = (None, None) if rotation is None else rotation
        heads = ops.Heads(
            q_X.unflatten(-1, (-1, spec.key_dim)),
            k_X.unflatten(-1, (-1, spec.key_dim)),
            v_X.unflatten(-1, (-1, spec.value_dim)),
            self._head_norms(),
            cos,
            sin,
            self.interleaved,
        )
        out_XNH = cache.attend_fresh(spec, heads, sinks_N)
        if out_XNH is None:
            q_XNH, k_XKH, v_XKH = ops.heads(*heads, cache.pages(spec))
            out_XNH = cache.attend(spec, q_XNH, k_XKH, v_XKH, positions_X, sinks_N)
        return project_onto(onto_XD, out_XNH.flatten(-2), self.output)

    @property
    def together(self) -> tuple[nn.Module, ...]:
        """The linears that read the same x."""
        return _children(self, "query", "key", "value")

    def _head_norms(self) -> ops.HeadNorms | None:
        query_norm, key_norm = self.query_norm, self.key_norm
        if query_norm is None or key_norm is None:
            return None
        return ops.HeadNorms(query_norm.weight, key_norm.weight, query_norm.eps, query_norm.offset)


def _children(module: nn.Module, *names: str) -> tuple[nn.Module, ...]:
    """By their names, past `nn.Module.__getattr__`: a step asks for them in every layer."""
    modules: dict[str, Any] = module._modules
    return tuple([modules[name] for name in names])


def project_onto(onto_XD: Tensor | None, x: Tensor, linear: nn.Module) -> Tensor:
    """linear(x), added onto what there is."""
    if onto_XD is None:
        out_XD: Tensor = linear(x)
        return out_XD
    return fused_projections.add_linear(onto_XD, x, linear)


def attention_spec(config: ModelConfig, index: int) -> AttentionSpec:
    """The plain attention of layer `index`."""
    layer = config.layers[index]
    return AttentionSpec(
        layer=index,
        heads=config.heads,
        kv_heads=config.kv_heads,
        key_dim=config.head_dim,
        value_dim=config.head_dim,
        scale=config.attention_scale,
        window=layer.window,
        chunk=layer.chunk,
        softcap=config.attention_softcap,
    )


class PreNormLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): the layer of most families."""

    def __init__(self, config: ModelConfig, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = attention
        self.feed_forward_norm = RMSNorm(config.hidden, config.norm_eps)
        self.feed_forward = feed_forward

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, rotation: Rotation | None, cache: Cache
    ) -> Tensor:
        x_XD = around(self.attention, self.attention_norm, x_XD, positions_X, rotation, cache)
        return around(self.feed_forward, self.feed_forward_norm, x_XD)


def around(block: nn.Module, norm: RMSNorm, x_XD: Tensor, *rest: Any) -> Tensor:
    """x + block(norm(x))."""
    if isinstance(block, Block):
        out_XD: Tensor = block(x_XD, *rest, norm=norm, onto_XD=x_XD)
        return out_XD
    return ops.add(x_XD, block(norm(x_XD), *rest))


class Decoder(nn.Module):
    """A language model: embedding, layers, norm, head.

    `model(token_ids, positions, cache)` gives the logits of every token. An engine that needs only
    some calls `hidden` and then `logits` on the rows it wants.

    `stale_after`: a sequence that grows past this many tokens has to be run once more from its
    start, since LongRoPE then turns all of its keys by other factors; None for every other model.
    """

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], norm_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden, config.norm_eps, norm_offset)
        self.head = None if config.tied else nn.Linear(config.hidden, config.vocabulary, bias=False)
        ropes = list(dict.fromkeys(layer.rope for layer in config.layers if layer.rope is not None))
        self.rotaries = nn.ModuleList(Rotary(rope) for rope in ropes)
        self.rotary_of_layer = tuple(
            None if layer.rope is None else ropes.index(layer.rope) for layer in config.layers
        )
        self.needs_extent = any(rope.needs_extent for rope in ropes)
        switches = [rope.original_positions for rope in ropes if rope.switches]
        self.stale_after = min(switches, default=None)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One a layer: what a cache has to keep for it."""
        return tuple(layer.attention.spec for layer in self.layers)

    def forward(
        self, token_ids_X: Tensor, positions_X: Tensor, cache: Cache | None = None
    ) -> Tensor:
        return self.logits(self.hidden(token_ids_X, positions_X, cache))

    def hidden(
        self, token_ids_X: Tensor, positions_X: Tensor, cache: Cache | None = None
    ) -> Tensor:
        """The normed hidden state of every token, [X, D]."""
        cache = WholeSequence() if cache is None else cache
        x_XD, rotations = self.begin(token_ids_X, positions_X, cache)
        return self.run_layers(x_XD, positions_X, rotations, cache)

    def begin(
        self, token_ids_X: Tensor, positions_X: Tensor, cache: Cache
    ) -> tuple[Tensor, list[Rotation]]:
        """What the layers start from: embedded tokens, and the angles of their positions."""
        extent_X = cache.extent(positions_X) if self.needs_extent else None
        rotations = [rotary(positions_X, extent_X) for rotary in self.rotaries]
        x_XD = self.embedding(token_ids_X)
        if self.config.embedding_scale != 1.0:
            # Rounded to the weights' dtype first, as Gemma was trained.
            x_XD = x_XD * x_XD.new_full((), self.config.embedding_scale)
        return x_XD, rotations

    def run_layers(
        self, x_XD: Tensor, positions_X: Tensor, rotations: Sequence[Rotation], cache: Cache
    ) -> Tensor:
        """All layers and the last norm: the part of a step that is nothing but kernels."""
        for layer, rotary in zip(self.layers, self.rotary_of_layer, strict=True):
            rotation = None if rotary is None else rotations[rotary]
            x_XD = layer(x_XD, positions_X, rotation, cache)
        normed_XD: Tensor = self.norm(x_XD)
        return normed_XD

    def logits(self, hidden_XD: Tensor) -> Tensor:
        """The scores of the next token, [X, O]."""
        logits_XO = project(hidden_XD, self.embedding if self.head is None else self.head)
        cap = self.config.logit_softcap
        return logits_XO if cap is None else torch.tanh(logits_XO / cap) * cap
