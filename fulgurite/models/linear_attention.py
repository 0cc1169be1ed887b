"""Layers with a state of fixed size: hidden states in, hidden states out; the state is in the cache.

    GatedDeltaNet   q, k, v = conv(in_proj(x)); linear attention; gated norm; out_proj (Qwen3-Next)
    ShortConv       y = out_proj(c * conv(b * x)), with b, c, x from in_proj (LFM2)

Both take the place of attention in a layer, and go through `KVCache` as attention does.

Shapes: X token layout, [T] or [B, T]; C channels; K key heads; N value heads; D key size; V value
size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fulgurite.kernels.elementwise import ops as elementwise
from fulgurite.kernels.gemm import fused_projections
from fulgurite.kernels.linear_attention.metadata import DeltaRuleInputs
from fulgurite.models.blocks import ResidualBlock, project_add
from fulgurite.models.config import LinearAttentionConfig, ModelConfig
from fulgurite.models.kv_cache import ConvWeights, KVCache
from fulgurite.models.norms import RMSNorm
from fulgurite.models.rope import RotaryCosSin
from fulgurite.models.state_spec import StateSpec


class CausalConv(nn.Module):
    """The weights of a short convolution over time, [taps, channels]."""

    def __init__(self, taps: int, channels: int, activation: str | None, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.activation = activation

    @property
    def weights(self) -> ConvWeights:
        return ConvWeights(self.weight, self.bias, self.activation)


class GatedDeltaNet(ResidualBlock):
    """Linear attention with the gated delta rule, a short convolution before it and a gate after it.

    `in_proj` gives queries, keys, values and the output gate z; `gates_proj` the decay gate a and the
    update gate b. y = out_proj(norm(attention) * silu(z)).
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        linear = config.linear_attention
        assert linear is not None, f"{config.family} has no linear attention"
        self.config = linear
        self.key_size = linear.num_key_heads * linear.key_dim
        self.value_size = linear.num_value_heads * linear.value_dim
        channels = 2 * self.key_size + self.value_size
        self.spec = build_delta_net_spec(linear, index)
        self.in_proj = nn.Linear(config.hidden_size, channels + self.value_size, bias=False)
        self.gates_proj = nn.Linear(config.hidden_size, 2 * linear.num_value_heads, bias=False)
        self.conv = CausalConv(linear.conv_taps, channels, "silu", linear.conv_bias)
        self.A_log = nn.Parameter(torch.empty(linear.num_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(linear.num_value_heads, dtype=torch.float32))
        self.norm = RMSNorm(linear.value_dim, config.norm_eps)
        self.out_proj = nn.Linear(self.value_size, config.hidden_size, bias=False)

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
        x_XD = x_XD if norm is None else norm(x_XD)
        projected_XC: Tensor = self.in_proj(x_XD)
        qkv_XC, z_X = projected_XC.split_with_sizes(self._sizes(), dim=-1)
        a_XN, b_XN = self.gates_proj(x_XD).chunk(2, dim=-1)
        qkv_XC = cache.causal_conv(self.spec, qkv_XC, self.conv.weights, positions_X)
        q_X, k_X, v_X = qkv_XC.split_with_sizes(
            [self.key_size, self.key_size, self.value_size], dim=-1
        )
        inputs = DeltaRuleInputs(
            q_X.unflatten(-1, (-1, self.config.key_dim)),
            k_X.unflatten(-1, (-1, self.config.key_dim)),
            v_X.unflatten(-1, (-1, self.config.value_dim)),
            a_XN,
            b_XN,
            self.A_log,
            self.dt_bias,
        )
        out_XNV = self.norm(cache.gated_delta_rule(self.spec, inputs, positions_X))
        gated_X = elementwise.activation_and_mul(z_X, out_XNV.flatten(-2), "silu")
        return project_add(residual_XD, gated_X, self.out_proj)

    def _sizes(self) -> list[int]:
        return [2 * self.key_size + self.value_size, self.value_size]


class ShortConv(ResidualBlock):
    """A gated short convolution: y = out_proj(c * conv(b * x)), with b, c, x = in_proj(input)."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        linear = config.linear_attention
        assert linear is not None, f"{config.family} has no convolutions"
        size, bias = config.hidden_size, linear.conv_bias
        self.spec = StateSpec(index, (linear.conv_taps - 1, size))
        self.in_proj = nn.Linear(size, 3 * size, bias=bias)
        self.conv = CausalConv(linear.conv_taps, size, None, bias)
        self.out_proj = nn.Linear(size, size, bias=bias)

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
        (projected_X,) = fused_projections.fused_linears(x_XD, (self.in_proj,), norm)
        b_XD, c_XD, input_XD = projected_X.chunk(3, dim=-1)
        gated_XD = elementwise.activation_and_mul(b_XD, input_XD, "identity")
        mixed_XD = cache.causal_conv(self.spec, gated_XD, self.conv.weights, positions_X)
        mixed_XD = elementwise.activation_and_mul(c_XD, mixed_XD, "identity")
        return project_add(residual_XD, mixed_XD, self.out_proj)


def build_delta_net_spec(config: LinearAttentionConfig, index: int) -> StateSpec:
    channels = 2 * config.num_key_heads * config.key_dim + config.num_value_heads * config.value_dim
    return StateSpec(
        index,
        (config.conv_taps - 1, channels),
        (config.num_value_heads, config.key_dim, config.value_dim),
    )
