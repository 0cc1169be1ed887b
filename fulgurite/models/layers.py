"""`CausalLM`, the model of all families: token ids and positions in, logits out.

Its layers are in residual_layers.py; they consist of attention.py and blocks.py or moe.py. All
modules except attention work on each token by itself; attention goes through the KV cache. So
tokens may be flat, [T], or a batch, [B, T], and no module needs to know which.

Shapes: X token layout, [T] or [B, T]; D hidden size; O vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError
from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.gemm.modules import compute_logits
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.config import ModelConfig
from fulgurite.models.kv_cache import KVCache, NoKVCache
from fulgurite.models.load_report import LoadReport
from fulgurite.models.norms import build_norm
from fulgurite.models.rope import RotaryCosSin, RotaryEmbedding
from fulgurite.models.state_spec import StateSpec
from fulgurite.parallel.context import ContextParallel
from fulgurite.parallel.pipeline import Pipeline, PipelineStage


class CausalLM(nn.Module):
    """A decoder-only language model: embedding, layers, norm, LM head.

    `model(token_ids, positions, cache)` returns the logits of every token. An engine that needs
    logits of few tokens calls `compute_hidden_states`, then `compute_logits` on the rows it needs.

    `recompute_after`: LongRoPE rotates all keys by other factors once a sequence is longer than
    this. The sequence must then be run again from its start. None for all other models.
    `load_report`: what loading its checkpoint did; None for a model that was not loaded.
    `stage`: the layers that this rank has (pipeline_stage.py), and `pipeline` its links to other
    stages; None: all layers. `context`: ranks that share the tokens of a step (context parallelism).
    """

    load_report: LoadReport | None = None
    stage: PipelineStage | None = None
    pipeline: Pipeline | None = None
    context: ContextParallel | None = None

    def __init__(
        self, config: ModelConfig, layers: Sequence[nn.Module], norm_offset: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(layers)
        self.norm = build_norm(config, norm_offset)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
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
    def dtype(self) -> torch.dtype:
        """The compute dtype: of weights that are not quantized."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def compile_decoder(self, packs_linears: bool = False) -> None:
        """Compile what is not made of kernels: nothing here, the layers of other implementations."""

    @property
    def packed_weight_bytes(self) -> int:
        """Bytes of copies of weights that a compiled decoder keeps on a CPU."""
        return 0

    @property
    def no_capture_reason(self) -> str | None:
        """Why an engine can't capture decode steps of this model; None: it may try.

        What ranks allow is `serve.engine.communication`'s.
        """
        return None

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The attention spec of each layer with attention: what a cache must store for it."""
        specs = (layer.attention.spec for layer in self.layers)
        return tuple(spec for spec in specs if isinstance(spec, AttentionSpec))

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        """The state spec of each layer without attention."""
        specs = (layer.attention.spec for layer in self.layers)
        return tuple(spec for spec in specs if isinstance(spec, StateSpec))

    @property
    def no_prefix_cache_reason(self) -> str | None:
        """Why requests can't reuse the keys of an equal prefix; None: they can."""
        if self.state_specs:
            return "linear-attention layers keep one state a request, not one of each prefix"
        if self.needs_sequence_lengths:
            return "keys depend on the length of the whole sequence"
        return None

    def forward(
        self,
        token_ids_X: Tensor,
        positions_X: Tensor,
        cache: KVCache | None = None,
        **options: Tensor | None,
    ) -> Tensor:
        """The logits of every token; `options` are those of `compute_hidden_states`."""
        hidden_XD = self.compute_hidden_states(token_ids_X, positions_X, cache, **options)
        return self.compute_logits(hidden_XD)

    def compute_hidden_states(
        self,
        token_ids_X: Tensor,
        positions_X: Tensor,
        cache: KVCache | None = None,
        *,
        embeddings_XD: Tensor | None = None,
        rope_positions_3X: Tensor | None = None,
    ) -> Tensor:
        """The hidden state of every token after the last norm, [X, D].

        positions_X         the index of each token in its sequence, which the attention mask follows
        embeddings_XD       replace those of the tokens: images bring their own
        rope_positions_3X   time, height and width of each token, for models with M-RoPE; None: text
        """
        cache = NoKVCache() if cache is None else cache
        if rope_positions_3X is not None:
            cos_sins = self._rotate_multimodal(rope_positions_3X, positions_X, cache)
        else:
            cos_sins = self.rotate(positions_X, cache)
        if embeddings_XD is not None:
            return self.run_layers(embeddings_XD.to(self.dtype), positions_X, cos_sins, cache)
        # without a variable here, the embeddings are freed after the first layer
        return self.run_layers(self.embed_inputs(token_ids_X), positions_X, cos_sins, cache)

    def _rotate_multimodal(
        self, rope_positions_3X: Tensor, positions_X: Tensor, cache: KVCache
    ) -> list[RotaryCosSin]:
        has_mrope = all(rotary.config.mrope_sections for rotary in self.rotary_embeddings)
        if not has_mrope or rope_positions_3X.shape != (3, *positions_X.shape):
            raise ArgumentError(
                f"rope_positions_3X is {list(rope_positions_3X.shape)}; M-RoPE takes "
                f"{[3, *positions_X.shape]}"
                if has_mrope
                else f"{self.config.family} has no M-RoPE",
                next="leave out rope_positions_3X for text",
            )
        lengths_X = cache.sequence_lengths(positions_X) if self.needs_sequence_lengths else None
        return [
            rotary.rotate_multimodal(rope_positions_3X, lengths_X)
            for rotary in self.rotary_embeddings
        ]

    def embed(
        self, token_ids_X: Tensor, positions_X: Tensor, cache: KVCache
    ) -> tuple[Tensor, list[RotaryCosSin]]:
        """The inputs of the layers: embedded tokens, and cos and sin of their positions."""
        return self.embed_inputs(token_ids_X), self.rotate(positions_X, cache)

    def embed_inputs(self, token_ids_X: Tensor) -> Tensor:
        """The embedded tokens, scaled where a family does so."""
        x_XD: Tensor = self.embed_tokens(token_ids_X)
        if self.config.embedding_scale != 1.0 and (self.stage is None or self.stage.is_first):
            # Gemma and Granite were trained with the scale rounded to the dtype of the weights.
            x_XD = x_XD * x_XD.new_full((), self.config.embedding_scale)
        return x_XD

    def rotate(self, positions_X: Tensor, cache: KVCache) -> list[RotaryCosSin]:
        """Cos and sin of these positions, by rotary embedding."""
        lengths_X = cache.sequence_lengths(positions_X) if self.needs_sequence_lengths else None
        return [rotary(positions_X, lengths_X) for rotary in self.rotary_embeddings]

    def run_layers(
        self, x_XD: Tensor, positions_X: Tensor, cos_sins: Sequence[RotaryCosSin], cache: KVCache
    ) -> Tensor:
        """All layers and the last norm: the part of a step that only launches kernels.

        On a pipeline stage: its layers, and the norm if it is the last one.
        """
        for layer, index in zip(self.layers, self.rotary_index, strict=True):
            cos_sin = None if index is None else cos_sins[index]
            x_XD = layer(x_XD, positions_X, cos_sin, cache)
        if self.stage is not None and not self.stage.is_last:
            return x_XD
        normed_XD: Tensor = self.norm(x_XD)
        return normed_XD

    def compute_logits(self, hidden_XD: Tensor) -> Tensor:
        """The logits of the next token, [X, O]; none on pipeline stages after the first."""
        if self.stage is not None and not self.stage.is_first:
            return hidden_XD.new_empty(0, self.config.vocab_size)
        logits_XO = compute_logits(
            hidden_XD, self.embed_tokens if self.lm_head is None else self.lm_head
        )
        if self.config.logit_scale != 1.0:
            logits_XO = logits_XO * self.config.logit_scale
        cap = self.config.logit_softcap
        return logits_XO if cap is None else elementwise.activate(logits_XO / cap, "tanh") * cap
