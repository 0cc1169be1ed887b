"""Llama 4, text: chunked attention with RoPE, and on every fourth layer full attention without.

Where there is RoPE, queries and keys are normed (without weights) after it; where there is none,
queries grow slowly with their position instead. The router's sigmoid multiplies what goes into an
expert, not what comes out.

Shapes: X the layout of the tokens; D hidden size; N query heads; K key heads; H head size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fulgurite.models import family
from fulgurite.models.cache import Cache
from fulgurite.models.config import (
    ExpertsConfig,
    Fields,
    LayerConfig,
    ModelConfig,
    TemperatureConfig,
    read_layer_types,
    read_rope,
)
from fulgurite.models.family import LAYER, Family, GGUFTable, Rule
from fulgurite.models.layers import Decoder, GatedMLP, PreNormLayer, attention_spec
from fulgurite.models.llama import gguf_fields, read_dense_config
from fulgurite.models.moe import (
    Experts,
    MixtureOfExperts,
    Router,
    gated,
    shared_expert,
    top_k_then_sigmoid,
)
from fulgurite.models.rope import Rotation, rotate


def read_config(fields: Fields) -> ModelConfig:
    config = read_dense_config("llama4", fields, theta=500_000.0)
    count = len(config.layers)
    rope = read_rope(fields, config.head_dim, theta=500_000.0, interleaved=True)
    interval = fields.size("no_rope_layer_interval", 4)
    turned = fields.numbers("no_rope_layers") or tuple((i + 1) % interval for i in range(count))
    if len(turned) != count:
        raise fields.error(f"no_rope_layers has {len(turned)} entries for {count} layers")
    default = ["chunked_attention" if turn else "full_attention" for turn in turned]
    types = read_layer_types(fields, count, default)
    step = fields.size("interleave_moe_layer_step", 1)
    sparse = set(range(step - 1, count, step))
    if "moe_layers" in fields:
        sparse = {int(index) for index in fields.numbers("moe_layers")}
    temperature = None
    if fields.values.get("attn_temperature_tuning", True):  # true, or a number in early files
        temperature = TemperatureConfig(
            fields.number("floor_scale", 8192.0), fields.number("attn_scale", 0.1)
        )
    chunk = fields.optional_size("attention_chunk_size")
    layers = tuple(
        LayerConfig(
            rope=rope if turned[index] else None,
            chunk=chunk if types[index] == "chunked_attention" else None,
            experts=index in sparse,
            temperature=None if turned[index] else temperature,
        )
        for index in range(count)
    )
    bias = fields.boolean("attention_bias", False)
    inner = fields.size("intermediate_size")
    experts = ExpertsConfig(
        count=fields.size("num_local_experts"),
        per_token=fields.size("num_experts_per_tok", 1),
        inner=inner,
        shared_inner=inner,
    )
    return replace(
        config,
        inner=fields.size("intermediate_size_mlp"),
        layers=layers,
        experts=experts,
        query_bias=bias,
        output_bias=bias,
        qk_norm=fields.boolean("use_qk_norm", True),
    )


class Llama4Attention(nn.Module):
    """Grouped-query attention with norms after the rotation, or with temperature instead of one."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.spec = attention_spec(config, index)
        self.temperature = config.layers[index].temperature
        self.norm_eps = config.norm_eps if config.qk_norm else None
        query_size, key_size = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.query = nn.Linear(config.hidden, query_size, bias=config.query_bias)
        self.key = nn.Linear(config.hidden, key_size, bias=config.query_bias)
        self.value = nn.Linear(config.hidden, key_size, bias=config.query_bias)
        self.output = nn.Linear(query_size, config.hidden, bias=config.output_bias)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, rotation: Rotation | None, cache: Cache
    ) -> Tensor:
        q_XNH = self.query(x_XD).unflatten(-1, (-1, self.spec.key_dim))
        k_XKH = self.key(x_XD).unflatten(-1, (-1, self.spec.key_dim))
        v_XKH = self.value(x_XD).unflatten(-1, (-1, self.spec.value_dim))
        if rotation is not None:
            q_XNH, k_XKH = self._turn(q_XNH, rotation), self._turn(k_XKH, rotation)
        elif self.temperature is not None:
            steps_X = torch.floor((positions_X.clamp(min=0) + 1) / self.temperature.floor)
            growth_X = 1 + self.temperature.scale * torch.log1p(steps_X)
            q_XNH = (q_XNH * growth_X[..., None, None]).to(q_XNH.dtype)
        out_XNH = cache.attend(self.spec, q_XNH, k_XKH, v_XKH, positions_X, None)
        out_XD: Tensor = self.output(out_XNH.flatten(-2))
        return out_XD

    def _turn(self, x_XNH: Tensor, rotation: Rotation) -> Tensor:
        x_XNH = rotate(x_XNH, rotation, interleaved=True)
        if self.norm_eps is None:
            return x_XNH
        return F.rms_norm(x_XNH.float(), x_XNH.shape[-1:], eps=self.norm_eps).to(x_XNH.dtype)


def build(config: ModelConfig) -> nn.Module:
    return Decoder(config, [_layer(config, index) for index in range(len(config.layers))])


def _layer(config: ModelConfig, index: int) -> nn.Module:
    attention = Llama4Attention(config, index)
    if not config.layers[index].experts:
        mlp = GatedMLP(config.hidden, config.inner, config.activation)
        return PreNormLayer(config, attention, mlp)
    assert config.experts is not None, "llama4 has experts"
    router = Router(config.hidden, config.experts, top_k_then_sigmoid)
    experts = Experts(config.hidden, config.experts, gated(config.activation), weigh_input=True)
    return PreNormLayer(config, attention, MixtureOfExperts(router, experts, shared_expert(config)))


_THEIRS, _OURS = LAYER + "feed_forward.", "layers.{layer}.feed_forward."

WEIGHTS = (
    family.OUTSIDE_LAYERS
    + family.NORMS
    + family.ATTENTION
    + (
        Rule(_THEIRS + "router.weight", _OURS + "router.weight"),
        Rule(_THEIRS + "experts.gate_up_proj", _OURS + "experts.gate_up", family.transposed),
        Rule(_THEIRS + "experts.down_proj", _OURS + "experts.down", family.transposed),
    )
    + tuple(
        Rule(f"{_THEIRS}{theirs}{name}_proj.weight", f"{_OURS}{ours}{name}.weight")
        for theirs, ours in (("", ""), ("shared_expert.", "shared."))
        for name in ("gate", "up", "down")
    )
)
IGNORED = (r"(model\.)?vision_model\..*", r"(model\.)?multi_modal_projector\..*")

PLAN = family.DENSE_PLAN | family.EXPERTS_PLAN


GGUF_CHUNK, GGUF_FLOOR, GGUF_SCALE = 8192, 8192.0, 0.1  # of every release; files don't say them
NORMLESS = 128  # experts of the release without norms on queries and keys; nor do they say this


def _gguf_fields(fields: Fields) -> dict[str, object]:
    """What llama.cpp runs these files with where they say nothing."""
    experts, chunked = fields.size("expert_count"), True
    if "attention.sliding_window" in fields:
        chunked = fields.integer("attention.sliding_window") > 0
    every = fields.integer("block_count")
    return gguf_fields(fields) | {
        "intermediate_size": fields.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": fields.integer("feed_forward_length"),
        "num_local_experts": experts,
        "interleave_moe_layer_step": fields.size("interleave_moe_layer_step"),
        "attention_chunk_size": GGUF_CHUNK if chunked else None,
        "no_rope_layers": None if chunked else [1] * every,
        "floor_scale": GGUF_FLOOR,
        "attn_scale": GGUF_SCALE,
        "use_qk_norm": experts != NORMLESS,
    }


GGUF = GGUFTable(
    _gguf_fields,
    family.GGUF_OUTSIDE_LAYERS
    + family.GGUF_NORMS
    + family.GGUF_ATTENTION
    + family.GGUF_MLP
    + family.GGUF_EXPERTS
    + family.GGUF_SHARED_EXPERT,
)

LLAMA4 = Family("llama4", read_config, build, WEIGHTS, IGNORED, GGUF, PLAN)
