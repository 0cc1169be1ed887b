"""DeepSeek-V2 and V3: latent attention, and experts chosen within groups.

Keys and values of all heads are linear in one latent vector c of `rank` numbers a token, plus one
rotary key r that the heads share. Only (c, r) is cached. With U_k and U_v the two parts of
`latent_up`,

    score = q_nope . (U_k c) + q_rope . r  =  (U_k^T q_nope, q_rope) . (c, r)
    out   = sum of weight * (U_v c)        =  U_v (sum of weight * c)

so with a cache this is attention with a single key head of size rank + rope, whose value is the
first `rank` numbers of its key: no cached key is ever expanded. Without a cache every key is used
at once and expanding is cheaper.

Shapes: X the layout of the tokens; D hidden size; N heads; P size without rope; R size with rope;
C latent rank; V value size.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fulgurite.models import family
from fulgurite.models.cache import AttentionSpec, Cache
from fulgurite.models.config import (
    ExpertsConfig,
    Fields,
    LatentConfig,
    LayerConfig,
    ModelConfig,
    read_rope,
)
from fulgurite.models.family import LAYER, Family, Rule
from fulgurite.models.layers import Decoder, GatedMLP, PreNormLayer, RMSNorm
from fulgurite.models.llama import read_dense_config
from fulgurite.models.moe import (
    Experts,
    MixtureOfExperts,
    Router,
    gated,
    grouped_sigmoid,
    grouped_softmax,
    shared_expert,
)
from fulgurite.models.rope import Rotation, rotate

LATENT_NORM_EPS = 1e-6  # of the norms on latents, whatever rms_norm_eps says


def read_v2(fields: Fields) -> ModelConfig:
    fields.require("norm_topk_prob", False, default=False)
    fields.require("scoring_func", "softmax", default="softmax")
    method = fields.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    return _read("deepseek_v2", fields, grouped=method == "group_limited_greedy", interleaved=True)


def read_v3(fields: Fields) -> ModelConfig:
    fields.require("scoring_func", "sigmoid", default="sigmoid")
    fields.require("topk_method", "noaux_tc", default="noaux_tc")
    interleaved = fields.boolean("rope_interleave", True)
    return _read("deepseek_v3", fields, grouped=True, interleaved=interleaved)


def _read(name: str, fields: Fields, grouped: bool, interleaved: bool) -> ModelConfig:
    fields.require("moe_layer_freq", 1, default=1)
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank"),
        query_rank=fields.optional_integer("q_lora_rank"),
        nope_dim=fields.integer("qk_nope_head_dim"),
        rope_dim=fields.integer("qk_rope_head_dim"),
        value_dim=fields.integer("v_head_dim"),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    config = read_dense_config(name, Fields({**fields.values, "head_dim": head_dim}, fields.where))
    rope = read_rope(fields, latent.rope_dim, interleaved=interleaved)
    first_sparse = fields.integer("first_k_dense_replace", 0)
    inner = fields.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        count=fields.integer("n_routed_experts"),
        per_token=fields.integer("num_experts_per_tok"),
        inner=inner,
        shared_inner=inner * fields.integer("n_shared_experts", 0),
        renormalise=fields.boolean("norm_topk_prob", False),
        scaling=fields.number("routed_scaling_factor", 1.0),
        groups=fields.integer("n_group", 1) if grouped else 1,
        groups_kept=fields.integer("topk_group", 1) if grouped else 1,
    )
    layers = [LayerConfig(rope, experts=i >= first_sparse) for i in range(len(config.layers))]
    bias = fields.boolean("attention_bias", False)
    return replace(
        config,
        layers=tuple(layers),
        attention_scale=head_dim**-0.5 * rope.softmax_factor,
        query_bias=bias,
        output_bias=bias,
        mlp_bias=fields.boolean("mlp_bias", False),
        experts=experts,
        latent=latent,
    )


class LatentAttention(nn.Module):
    """Multi-head latent attention; see the top of this file."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        rope = config.layers[index].rope
        assert config.latent is not None and rope is not None, "latent attention turns its keys"
        self.latent = latent = config.latent
        self.interleaved = rope.interleaved
        heads, hidden, bias = config.heads, config.hidden, config.query_bias
        expanded = AttentionSpec(
            layer=index,
            heads=heads,
            kv_heads=heads,
            key_dim=config.head_dim,
            value_dim=latent.value_dim,
            scale=config.attention_scale,
        )
        self.expanded = expanded
        self.spec = replace(
            expanded,
            kv_heads=1,
            key_dim=latent.rank + latent.rope_dim,
            value_dim=latent.rank,
            latent=True,
        )
        query_size = heads * config.head_dim
        if latent.query_rank is None:
            self.query = nn.Linear(hidden, query_size, bias=False)
        else:
            self.query = nn.Sequential(
                nn.Linear(hidden, latent.query_rank, bias=bias),
                RMSNorm(latent.query_rank, LATENT_NORM_EPS),
                nn.Linear(latent.query_rank, query_size, bias=False),
            )
        self.latent_down = nn.Linear(hidden, latent.rank + latent.rope_dim, bias=bias)
        self.latent_norm = RMSNorm(latent.rank, LATENT_NORM_EPS)
        up_size = heads * (latent.nope_dim + latent.value_dim)
        self.latent_up = nn.Linear(latent.rank, up_size, bias=False)
        self.output = nn.Linear(heads * latent.value_dim, hidden, bias=config.output_bias)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, rotation: Rotation, cache: Cache
    ) -> Tensor:
        sizes = (self.latent.nope_dim, self.latent.rope_dim)
        q_XNH = self.query(x_XD).unflatten(-1, (-1, sum(sizes)))
        q_XNP, q_XNR = q_XNH.split(sizes, dim=-1)
        q_XNR = rotate(q_XNR, rotation, self.interleaved)
        c_XC, r_XR = self.latent_down(x_XD).split((self.latent.rank, sizes[1]), dim=-1)
        c_X1C = self.latent_norm(c_XC)[..., None, :]
        r_X1R = rotate(r_XR[..., None, :], rotation, self.interleaved)
        if cache.persistent:
            out_XNV = self._absorbed(q_XNP, q_XNR, c_X1C, r_X1R, positions_X, cache)
        else:
            out_XNV = self._expanded(q_XNP, q_XNR, c_X1C, r_X1R, positions_X, cache)
        out_XD: Tensor = self.output(out_XNV.flatten(-2))
        return out_XD

    def _absorbed(
        self,
        q_XNP: Tensor,
        q_XNR: Tensor,
        c_X1C: Tensor,
        r_X1R: Tensor,
        positions_X: Tensor,
        cache: Cache,
    ) -> Tensor:
        up_NHC = self.latent_up.weight.unflatten(0, (self.expanded.heads, -1))
        up_key_NPC, up_value_NVC = up_NHC.split(
            (self.latent.nope_dim, self.latent.value_dim), dim=1
        )
        q_XNC = torch.einsum("...np,npc->...nc", q_XNP, up_key_NPC)
        q_XNH, k_X1H = torch.cat((q_XNC, q_XNR), dim=-1), torch.cat((c_X1C, r_X1R), dim=-1)
        out_XNC = cache.attend(self.spec, q_XNH, k_X1H, None, positions_X, None)
        return torch.einsum("...nc,nvc->...nv", out_XNC, up_value_NVC)

    def _expanded(
        self,
        q_XNP: Tensor,
        q_XNR: Tensor,
        c_X1C: Tensor,
        r_X1R: Tensor,
        positions_X: Tensor,
        cache: Cache,
    ) -> Tensor:
        up_XNH = self.latent_up(c_X1C.squeeze(-2)).unflatten(-1, (self.expanded.heads, -1))
        k_XNP, v_XNV = up_XNH.split((self.latent.nope_dim, self.latent.value_dim), dim=-1)
        k_XNH = torch.cat((k_XNP, r_X1R.expand(*k_XNP.shape[:-1], -1)), dim=-1)
        q_XNH = torch.cat((q_XNP, q_XNR), dim=-1)
        return cache.attend(self.expanded, q_XNH, k_XNH, v_XNV, positions_X, None)


def build_v2(config: ModelConfig) -> nn.Module:
    return Decoder(config, [_layer(config, index, False) for index in range(len(config.layers))])


def build_v3(config: ModelConfig) -> nn.Module:
    return Decoder(config, [_layer(config, index, True) for index in range(len(config.layers))])


def _layer(config: ModelConfig, index: int, is_v3: bool) -> nn.Module:
    attention = LatentAttention(config, index)
    if not config.layers[index].experts:
        mlp = GatedMLP(config.hidden, config.inner, config.activation, config.mlp_bias)
        return PreNormLayer(config, attention, mlp)
    assert config.experts is not None, "deepseek has experts"
    rule = grouped_sigmoid if is_v3 else grouped_softmax
    router = Router(config.hidden, config.experts, rule, choice_bias=is_v3)
    experts = Experts(config.hidden, config.experts, gated(config.activation))
    return PreNormLayer(config, attention, MixtureOfExperts(router, experts, shared_expert(config)))


_THEIRS, _OURS = LAYER + "self_attn.", "layers.{layer}.attention."

WEIGHTS = (
    family.OUTSIDE_LAYERS
    + family.NORMS
    + family.MLP
    + family.EACH_EXPERT
    + tuple(
        Rule(f"{_THEIRS}{theirs}", f"{_OURS}{ours}")
        for theirs, ours in (
            ("q_proj.weight", "query.weight"),
            ("q_a_proj.weight", "query.0.weight"),
            ("q_a_proj.bias", "query.0.bias"),
            ("q_a_layernorm.weight", "query.1.weight"),
            ("q_b_proj.weight", "query.2.weight"),
            ("kv_a_proj_with_mqa.weight", "latent_down.weight"),
            ("kv_a_proj_with_mqa.bias", "latent_down.bias"),
            ("kv_a_layernorm.weight", "latent_norm.weight"),
            ("kv_b_proj.weight", "latent_up.weight"),
            ("o_proj.weight", "output.weight"),
            ("o_proj.bias", "output.bias"),
        )
    )
    + tuple(
        Rule(
            f"{LAYER}mlp.shared_experts.{name}_proj.{kind}",
            f"layers.{{layer}}.feed_forward.shared.{name}.{kind}",
        )
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    )
    + (
        Rule(
            LAYER + "mlp.gate.e_score_correction_bias",
            "layers.{layer}.feed_forward.router.choice_bias",
        ),
    )
)
# Layers past the last are for predicting several tokens at once, which is not built here.
IGNORED_V3 = (r"model\.layers\.{past}\..*",)

DEEPSEEK_V2 = Family("deepseek_v2", read_v2, build_v2, WEIGHTS)
DEEPSEEK_V3 = Family("deepseek_v3", read_v3, build_v3, WEIGHTS, IGNORED_V3)
