"""Llama 4 (text): chunked attention with RoPE; every fourth layer has full attention without RoPE.

Layers with RoPE normalize queries and keys after the rotation, without norm weights. Layers without
RoPE scale queries with the position (attention temperature tuning). Router weights multiply the
input of an expert, not its output.

Shapes: X token layout; D hidden size; N query heads; K KV heads; H head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.models.attention import build_attention_spec, compute_temperature
from fulgurite.models.blocks import GatedMLP
from fulgurite.models.config import (
    AttentionTemperature,
    ConfigFields,
    LayerConfig,
    ModelConfig,
    MoEConfig,
)
from fulgurite.models.config_readers import read_layer_types, read_rope
from fulgurite.models.families import common
from fulgurite.models.families.common import HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import read_dense_config, read_gguf_fields
from fulgurite.models.kv_cache import KVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.moe import (
    Experts,
    MoE,
    Router,
    build_shared_expert,
    gated_activation,
    topk_then_sigmoid,
)
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.rope import RotaryCosSin, apply_rope
from fulgurite.models.weight_mapping import (
    WeightMapping,
    transpose,
    view_expert,
    view_expert_gate,
    view_expert_up,
)


def read_config(fields: ConfigFields) -> ModelConfig:
    config = read_dense_config("llama4", fields, theta=500_000.0)
    count = len(config.layers)
    rope = read_rope(fields, config.head_dim, theta=500_000.0, interleaved=True)
    interval = fields.get_positive_int("no_rope_layer_interval", 4)
    # In config.json, `no_rope_layers` is nonzero for the layers that use RoPE.
    uses_rope = fields.get_floats("no_rope_layers") or tuple(
        (i + 1) % interval for i in range(count)
    )
    if len(uses_rope) != count:
        raise fields.error(f"no_rope_layers has {len(uses_rope)} entries for {count} layers")
    default = ["chunked_attention" if rotated else "full_attention" for rotated in uses_rope]
    allowed = ("chunked_attention", "full_attention")
    types = read_layer_types(fields, count, default, allowed)
    step = fields.get_positive_int("interleave_moe_layer_step", 1)
    moe_layers = set(range(step - 1, count, step))
    if "moe_layers" in fields:
        moe_layers = {int(index) for index in fields.get_floats("moe_layers")}
    temperature = None
    if fields.values.get("attn_temperature_tuning", True):  # true, or a number in early files
        temperature = AttentionTemperature(
            fields.get_float("floor_scale", 8192.0), fields.get_float("attn_scale", 0.1)
        )
    chunk_size = fields.get_optional_positive_int("attention_chunk_size")
    layers = tuple(
        LayerConfig(
            rope=rope if uses_rope[index] else None,
            attention_chunk_size=chunk_size if types[index] == "chunked_attention" else None,
            is_moe=index in moe_layers,
            attention_temperature=None if uses_rope[index] else temperature,
        )
        for index in range(count)
    )
    bias = fields.get_bool("attention_bias", False)
    intermediate_size = fields.get_positive_int("intermediate_size")
    moe = MoEConfig(
        num_experts=fields.get_positive_int("num_local_experts"),
        top_k=fields.get_positive_int("num_experts_per_tok", 1),
        intermediate_size=intermediate_size,
        shared_intermediate_size=intermediate_size,
    )
    return replace(
        config,
        intermediate_size=fields.get_positive_int("intermediate_size_mlp"),
        layers=layers,
        moe=moe,
        qkv_bias=bias,
        o_proj_bias=bias,
        qk_norm=fields.get_bool("use_qk_norm", True),
    )


class Llama4Attention(nn.Module):
    """Grouped-query attention: RoPE and QK norm, or attention temperature without RoPE."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.spec = build_attention_spec(config, index)
        self.temperature = config.layers[index].attention_temperature
        self.norm_eps = config.norm_eps if config.qk_norm else None
        query_size = config.num_heads * config.head_dim
        key_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.o_proj_bias)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, cos_sin: RotaryCosSin | None, cache: KVCache
    ) -> Tensor:
        q_XNH = self.q_proj(x_XD).unflatten(-1, (-1, self.spec.key_dim))
        k_XKH = self.k_proj(x_XD).unflatten(-1, (-1, self.spec.key_dim))
        v_XKH = self.v_proj(x_XD).unflatten(-1, (-1, self.spec.value_dim))
        if cos_sin is not None:
            q_XNH = self._rotate_and_norm(q_XNH, cos_sin)
            k_XKH = self._rotate_and_norm(k_XKH, cos_sin)
        elif self.temperature is not None:
            scale_X = compute_temperature(self.temperature, positions_X)
            q_XNH = (q_XNH * scale_X[..., None, None]).to(q_XNH.dtype)
        out_XNH = cache.attend(self.spec, q_XNH, k_XKH, v_XKH, positions_X, None)
        out_XD: Tensor = self.o_proj(out_XNH.flatten(-2))
        return out_XD

    def _rotate_and_norm(self, x_XNH: Tensor, cos_sin: RotaryCosSin) -> Tensor:
        x_XNH = apply_rope(x_XNH, cos_sin, interleaved=True)
        if self.norm_eps is None:
            return x_XNH
        return F.rms_norm(x_XNH.float(), x_XNH.shape[-1:], eps=self.norm_eps).to(x_XNH.dtype)


def build(config: ModelConfig) -> nn.Module:
    return CausalLM(config, [_build_layer(config, index) for index in range(len(config.layers))])


def _build_layer(config: ModelConfig, index: int) -> nn.Module:
    attention = Llama4Attention(config, index)
    if not config.layers[index].is_moe:
        return PreNormLayer(config, attention, GatedMLP.from_config(config))
    assert config.moe is not None, "Llama 4 has experts"
    router = Router(config.hidden_size, config.moe, topk_then_sigmoid)
    experts = Experts(
        config.hidden_size,
        config.moe,
        gated_activation(config.activation),
        apply_router_weight_on_input=True,
    )
    return PreNormLayer(config, attention, MoE(router, experts, build_shared_expert(config)))


_HF_FEED_FORWARD, _FEED_FORWARD = HF_LAYER + "feed_forward.", "layers.{layer}.feed_forward."

WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.NORMS
    + common.ATTENTION
    + (
        WeightMapping(_HF_FEED_FORWARD + "router.weight", _FEED_FORWARD + "router.weight"),
        WeightMapping(
            _HF_FEED_FORWARD + "experts.gate_up_proj",
            _FEED_FORWARD + "experts.gate_up_proj",
            transpose,
        ),
        WeightMapping(
            _HF_FEED_FORWARD + "experts.down_proj",
            _FEED_FORWARD + "experts.down_proj",
            transpose,
        ),
    )
    + tuple(
        WeightMapping(
            f"{_HF_FEED_FORWARD}{prefix}{proj}.weight", f"{_FEED_FORWARD}{prefix}{proj}.weight"
        )
        for prefix in ("", "shared_expert.")
        for proj in ("gate_proj", "up_proj", "down_proj")
    )
)
# Quantized checkpoints store experts one by one.
NAMED_EXPERTS = tuple(
    WeightMapping(
        f"{_HF_FEED_FORWARD}experts.{{expert}}.{proj}.weight",
        f"{_FEED_FORWARD}experts.{target}",
        target_view=view,
    )
    for proj, target, view in (
        ("gate_proj", "gate_up_proj", view_expert_gate),
        ("up_proj", "gate_up_proj", view_expert_up),
        ("down_proj", "down_proj", view_expert),
    )
)
IGNORED = (r"(model\.)?vision_model\..*", r"(model\.)?multi_modal_projector\..*")

SHARDING_RULES = common.DENSE_SHARDING | common.EXPERTS_SHARDING


# GGUF files do not store these values; they are the same in every release.
GGUF_CHUNK_SIZE, GGUF_FLOOR_SCALE, GGUF_ATTN_SCALE = 8192, 8192.0, 0.1
# The release with this many experts (Maverick) has no QK norm. GGUF files do not store this,
# either.
EXPERTS_WITHOUT_QK_NORM = 128


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    """GGUF metadata as config.json fields, with llama.cpp's defaults for missing fields."""
    num_experts, chunked = fields.get_positive_int("expert_count"), True
    if "attention.sliding_window" in fields:
        chunked = fields.get_int("attention.sliding_window") > 0
    num_layers = fields.get_int("block_count")
    return read_gguf_fields(fields) | {
        "intermediate_size": fields.get_int("expert_feed_forward_length"),
        "intermediate_size_mlp": fields.get_int("feed_forward_length"),
        "num_local_experts": num_experts,
        "interleave_moe_layer_step": fields.get_positive_int("interleave_moe_layer_step"),
        "attention_chunk_size": GGUF_CHUNK_SIZE if chunked else None,
        "no_rope_layers": None if chunked else [1] * num_layers,
        "floor_scale": GGUF_FLOOR_SCALE,
        "attn_scale": GGUF_ATTN_SCALE,
        "use_qk_norm": num_experts != EXPERTS_WITHOUT_QK_NORM,
    }


GGUF = GGUFMapping(
    _read_gguf_fields,
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS
    + common.GGUF_ATTENTION
    + common.GGUF_MLP
    + common.GGUF_EXPERTS
    + common.GGUF_SHARED_EXPERT,
)

LLAMA4 = ModelFamily(
    "llama4",
    read_config,
    build,
    WEIGHT_MAPPINGS,
    IGNORED,
    GGUF,
    SHARDING_RULES,
    named_experts=NAMED_EXPERTS,
)
