"""Model configuration: the fields of a config.json in, frozen dataclasses out.

A family's `read_config` turns config.json fields into one `ModelConfig`. Everything that differs
between layers (sliding window, chunk size, rotary embedding, MoE or dense) is resolved into one
`LayerConfig` per layer, so modules contain no per-family conditions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fulgurite.errors import WeightsError
from fulgurite.models.config_fields import ConfigFields as ConfigFields  # families read these

ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
# How hidden states are normalized: `ModelConfig.norm_type`.
RMS_NORM, LAYER_NORM, LAYER_NORM_WITHOUT_BIAS = "rms_norm", "layer_norm", "layer_norm_without_bias"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class RopeConfig:
    """One rotary embedding (RoPE), with its scaling.

    `mrope_sections` (multimodal models): how many pairs rotate by the time, the height and the width
    of a token's position. With `mrope_interleaved` the three alternate; otherwise they follow each
    other. All three are equal for text.
    """

    rope_type: str
    rotary_dim: int
    theta: float
    max_positions: int
    interleaved: bool = False
    factor: float = 1.0
    original_max_positions: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    mscale_all_dim: float = 0.0
    long_attention_factor: float | None = None
    mrope_sections: tuple[int, ...] = ()
    mrope_interleaved: bool = False

    @property
    def needs_sequence_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.rope_type == "dynamic" or self.switches_factors

    @property
    def switches_factors(self) -> bool:
        """Whether sequences longer than `original_max_positions` use other factors (LongRoPE)."""
        is_same = self.short_factors == self.long_factors and self.long_attention_factor is None
        return self.rope_type == "longrope" and not is_same

    @property
    def softmax_scale_factor(self) -> float:
        """DeepSeek's YaRN also multiplies the softmax scale by this factor."""
        if self.rope_type != "yarn" or not self.mscale_all_dim:
            return 1.0
        return yarn_mscale(self.factor, self.mscale_all_dim) ** 2


@dataclass(frozen=True)
class AttentionTemperature:
    """q *= 1 + attn_scale * log(1 + floor((position + offset) / floor_scale)).

    Llama 4 uses it in layers without RoPE (offset 1), Ministral 3 in every layer (offset 0).
    """

    floor_scale: float
    attn_scale: float
    offset: int = 1


@dataclass(frozen=True)
class LayerConfig:
    """The settings that may differ between the layers of a model."""

    rope: RopeConfig | None
    sliding_window: int | None = None
    attention_chunk_size: int | None = None
    is_moe: bool = False
    is_linear_attention: bool = False
    attention_temperature: AttentionTemperature | None = None


@dataclass(frozen=True)
class MoEConfig:
    """The MoE layers of a model: sizes, routing and activation."""

    num_experts: int
    top_k: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    renormalize: bool = False
    routed_scaling_factor: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    shared_expert_gate: bool = False
    jitter_eps: float = 0.0
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        if self.top_k > self.num_experts:
            raise WeightsError(f"top_k={self.top_k} must be at most num_experts={self.num_experts}")
        if self.num_experts % self.num_groups or self.topk_groups > self.num_groups:
            raise WeightsError(
                f"num_groups={self.num_groups} must divide num_experts={self.num_experts}, and "
                f"topk_groups={self.topk_groups} must be at most num_groups"
            )


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention: keys and values come from a vector of `kv_lora_rank`."""

    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class LinearAttentionConfig:
    """The layers with linear attention (gated DeltaNet), or with a short convolution only."""

    conv_taps: int
    num_key_heads: int = 0
    num_value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    conv_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_key_heads and self.num_value_heads % self.num_key_heads:
            raise WeightsError(
                f"linear_num_value_heads={self.num_value_heads} must be a multiple of "
                f"linear_num_key_heads={self.num_key_heads}"
            )


@dataclass(frozen=True)
class ModelConfig:
    """Everything that a family needs to build its modules.

    norm_type           "rms_norm", "layer_norm" or "layer_norm_without_bias"
    qk_norm_scope       "head": each head by itself; "projection": all heads of a token at once
    qk_norm_after_rope  whether queries and keys are normalized after the rotation
    qkv_clip            queries, keys and values are clamped to plus and minus this
    attention_output_gate    attention outputs are multiplied by sigmoid(gate_proj(x))
    residual_scale      the factor of a block's output when it is added to the residual
    logit_scale         the factor of the logits, before the soft cap
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    max_positions: int
    activation: str = "silu"
    tie_word_embeddings: bool = False
    dtype: torch.dtype = torch.float32
    attention_scale: float = 0.0
    qkv_bias: bool = False
    o_proj_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_scope: str = "head"
    qk_norm_after_rope: bool = False
    qkv_clip: float | None = None
    attention_output_gate: bool = False
    norm_type: str = RMS_NORM
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    lm_head_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    linear_attention: LinearAttentionConfig | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.attention_scale == 0.0:
            object.__setattr__(self, "attention_scale", self.head_dim**-0.5)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's scale of queries and keys for a context extended by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
