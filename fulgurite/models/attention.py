"""Grouped-query attention: hidden states and positions in, hidden states out.

Projections, norms and RoPE are here; the KV cache stores keys and values, and attends.

Shapes: X token layout, [T] or [B, T]; D hidden size; N query heads; K KV heads; H head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.gemm import fused_projections
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.blocks import ResidualBlock, get_children, project_add
from fulgurite.models.config import AttentionTemperature, ModelConfig
from fulgurite.models.kv_cache import KVCache
from fulgurite.models.norms import LayerNorm, RMSNorm, build_qk_norm
from fulgurite.models.rope import RotaryCosSin


class Attention(ResidualBlock):
    """Grouped-query attention, optionally with QK norm and attention sinks.

    The RMS norm of each head before RoPE runs in the kernel of RoPE. Other QK norms run apart.
    """

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
            self.q_norm = build_qk_norm(config, config.num_heads, norm_offset)
            self.k_norm = build_qk_norm(config, config.num_kv_heads, norm_offset)
        self.norm_after_rope = config.qk_norm and config.qk_norm_after_rope
        # A norm that the kernel of RoPE does not have runs right after the projections.
        self.norms_projections = config.qk_norm and (
            config.qk_norm_scope == "projection" or isinstance(self.q_norm, LayerNorm)
        )
        self.clip = config.qkv_clip
        self.temperature = layer.attention_temperature
        assert self.temperature is None or not config.qk_norm, "a norm would undo the temperature"
        self.transforms_projections = (
            self.norms_projections or self.clip is not None or self.temperature is not None
        )
        self.sinks = nn.Parameter(torch.empty(config.num_heads)) if sinks else None
        self.gate_proj = None
        if config.attention_output_gate:
            self.gate_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)

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
        q_X, k_X, v_X, *gates = fused_projections.fused_linears(x_XD, self.fused_projections, norm)
        if self.transforms_projections:
            q_X, k_X, v_X = self._transform_projections(q_X, k_X, v_X, positions_X)
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
        out_XNH = None if self.norm_after_rope else cache.attend_fused(spec, qkv, sinks_N)
        if self.norm_after_rope:
            q_XNH, k_XKH, v_XKH = elementwise.qk_norm_rope(*qkv)
            assert k_XKH is not None and self.q_norm is not None and self.k_norm is not None
            q_XNH, k_XKH = self.q_norm(q_XNH), self.k_norm(k_XKH)
            out_XNH = cache.attend(spec, q_XNH, k_XKH, v_XKH, positions_X, sinks_N)
        elif out_XNH is None:
            q_XNH, k_XKH, v_XKH = elementwise.qk_norm_rope(*qkv, cache.cache_slots(spec))
            out_XNH = cache.attend(spec, q_XNH, k_XKH, v_XKH, positions_X, sinks_N)
        out_X = out_XNH.flatten(-2)
        for gate_X in gates:  # one or none
            out_X = elementwise.activation_and_mul(gate_X, out_X, "sigmoid")
        return project_add(residual_XD, out_X, self.o_proj)

    @property
    def fused_projections(self) -> tuple[nn.Module, ...]:
        """The linears that read the same input."""
        gate = () if self.gate_proj is None else ("gate_proj",)
        return get_children(self, "q_proj", "k_proj", "v_proj", *gate)

    def _transform_projections(
        self, q_X: Tensor, k_X: Tensor, v_X: Tensor, positions_X: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What is computed between the projections and RoPE, except the RMS norm of each head."""
        if self.norms_projections:
            assert self.q_norm is not None and self.k_norm is not None
            q_X, k_X = self.q_norm(q_X), self.k_norm(k_X)
        if self.clip is not None:
            q_X, k_X, v_X = (x.clamp(-self.clip, self.clip) for x in (q_X, k_X, v_X))
        if self.temperature is not None:  # RoPE is linear, so queries may be scaled before it
            scale_X = compute_temperature(self.temperature, positions_X)
            q_X = (q_X * scale_X[..., None]).to(q_X.dtype)
        return q_X, k_X, v_X

    def _get_qk_norm(self) -> elementwise.QKNorm | None:
        """The norm that runs with RoPE."""
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None or self.norms_projections or self.norm_after_rope:
            return None
        return elementwise.QKNorm(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)


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


def compute_temperature(temperature: AttentionTemperature, positions_X: Tensor) -> Tensor:
    """The factor of each token's queries."""
    steps_X = torch.floor((positions_X.clamp(min=0) + temperature.offset) / temperature.floor_scale)
    return 1 + temperature.attn_scale * torch.log1p(steps_X)
