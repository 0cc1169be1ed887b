"""DeepSeek-V2 and V3: latent attention, and experts chosen within groups.

A token leaves one latent vector and one rotary key for all heads (`latent.py` has the formulas).
What happens to them is up to the cache: this module only projects.

Shapes: X the layout of the tokens; D hidden size; N heads; H size of a query; C latent rank;
L = C + the size of the rotary key; U rows of the up projection a head; V value size.
"""

from __future__ import annotations

from dataclasses import replace

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
from fulgurite.models.family import GGUF_LAYER, LAYER, Family, GGUFTable, Rule
from fulgurite.models.latent import LatentStep
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
from fulgurite.models.rope import Rotation

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
        rank=fields.size("kv_lora_rank"),
        query_rank=fields.optional_size("q_lora_rank"),
        nope_dim=fields.size("qk_nope_head_dim"),
        rope_dim=fields.size("qk_rope_head_dim"),
        value_dim=fields.size("v_head_dim"),
    )
    head_dim = latent.nope_dim + latent.rope_dim
    plain = Fields({**fields.values, "head_dim": head_dim}, fields.where)
    config = read_dense_config(name, plain, rotary=latent.rope_dim)
    rope = read_rope(fields, latent.rope_dim, interleaved=interleaved)
    first_sparse = fields.integer("first_k_dense_replace", 0)
    inner = fields.size("moe_intermediate_size")
    experts = ExpertsConfig(
        count=fields.size("n_routed_experts"),
        per_token=fields.size("num_experts_per_tok"),
        inner=inner,
        shared_inner=inner * fields.integer("n_shared_experts", 0),
        renormalise=fields.boolean("norm_topk_prob", False),
        scaling=fields.number("routed_scaling_factor", 1.0),
        groups=fields.size("n_group", 1) if grouped else 1,
        groups_kept=fields.size("topk_group", 1) if grouped else 1,
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


class LatentUp(nn.Linear):
    """What expands a latent into heads. It is read head by head, by columns as well as by rows, so it
    stays dense where other linears are packed: it is a small part of a layer."""


class LatentAttention(nn.Module):
    """Multi-head latent attention; see the top of this file."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        rope = config.layers[index].rope
        assert config.latent is not None and rope is not None, "latent attention turns its keys"
        latent = config.latent
        self.interleaved = rope.interleaved
        self.query_dim, self.up_dim = config.head_dim, latent.nope_dim + latent.value_dim
        heads, hidden, bias = config.heads, config.hidden, config.query_bias
        self.spec = AttentionSpec(
            layer=index,
            heads=heads,
            kv_heads=1,
            key_dim=latent.rank + latent.rope_dim,
            value_dim=latent.rank,
            scale=config.attention_scale,
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
        self.latent_up = LatentUp(latent.rank, heads * self.up_dim, bias=False)
        self.output = nn.Linear(heads * latent.value_dim, hidden, bias=config.output_bias)

    def forward(
        self, x_XD: Tensor, positions_X: Tensor, rotation: Rotation, cache: Cache
    ) -> Tensor:
        step = LatentStep(
            q_XNH=self.query(x_XD).unflatten(-1, (-1, self.query_dim)),
            latent_XL=self.latent_down(x_XD),
            norm_C=self.latent_norm.weight,
            eps=self.latent_norm.eps,
            up_NUC=self.latent_up.weight.unflatten(0, (-1, self.up_dim)),
            rotation=rotation,
            interleaved=self.interleaved,
        )
        out_XNV = cache.attend_latent(self.spec, step, positions_X)
        out_XD: Tensor = self.output(out_XNV.flatten(-2))
        return out_XD


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

# The latent is everybody's; what is made of it, head by head, is divided.
PLAN = (
    family.OUTSIDE_PLAN
    | {
        "layers.*.attention": "attention",
        "layers.*.attention.query": "query",
        "layers.*.attention.latent_up": "query",
        "layers.*.attention.output": "output",
    }
    | family.MLP_PLAN
    | family.EXPERTS_PLAN
)


def _gguf_fields(fields: Fields) -> dict[str, object]:
    """Files that split the up projection give the sizes of a latent where others give a head's."""
    result = family.gguf_fields(fields)
    rope = fields.integer("rope.dimension_count")
    key = fields.integer("attention.key_length_mla", fields.integer("attention.key_length"))
    value = fields.integer("attention.value_length_mla", fields.integer("attention.value_length"))
    groups = fields.integer("expert_group_count", 1)
    return result | {
        "num_key_value_heads": fields.integer("attention.head_count"),
        "kv_lora_rank": fields.integer("attention.kv_lora_rank"),
        "q_lora_rank": fields.optional_integer("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": fields.integer("leading_dense_block_count", 0),
        "n_routed_experts": fields.integer("expert_count"),
        "n_shared_experts": fields.integer("expert_shared_count", 0),
        "routed_scaling_factor": fields.number("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.boolean("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": fields.integer("expert_group_used_count", groups),
        "rope_scaling": _gguf_scaling(fields, result.get("rope_scaling")),
    }


def _gguf_v2_fields(fields: Fields) -> dict[str, object]:
    result = _gguf_fields(fields)
    grouped = fields.integer("expert_group_count", 1) > 1
    return result | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _gguf_scaling(fields: Fields, scaling: object) -> object:
    """A file keeps a tenth of mscale_all_dim; mscale is taken to be the same, as in every release."""
    if not isinstance(scaling, dict) or scaling["rope_type"] != "yarn":
        return scaling
    return scaling | {
        "attention_factor": 1.0,
        "mscale_all_dim": 10 * fields.number("rope.scaling.yarn_log_multiplier", 0.0),
        "beta_fast": fields.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.number("rope.scaling.yarn_beta_slow", 1.0),
    }


GGUF_WEIGHTS = (
    family.GGUF_OUTSIDE_LAYERS
    + family.GGUF_NORMS
    + family.GGUF_MLP
    + family.GGUF_EXPERTS
    + family.GGUF_SHARED_EXPERT
    + tuple(
        Rule(f"{GGUF_LAYER}{theirs}", f"layers.{{layer}}.{ours}")
        for theirs, ours in (
            ("attn_q.weight", "attention.query.weight"),
            ("attn_q_a.weight", "attention.query.0.weight"),
            ("attn_q_a_norm.weight", "attention.query.1.weight"),
            ("attn_q_b.weight", "attention.query.2.weight"),
            ("attn_kv_a_mqa.weight", "attention.latent_down.weight"),
            ("attn_kv_a_norm.weight", "attention.latent_norm.weight"),
            ("attn_output.weight", "attention.output.weight"),
            ("exp_probs_b.bias", "feed_forward.router.choice_bias"),
        )
    )
)
_UP = "layers.{layer}.attention.latent_up.weight"
GGUF_UP = (
    (
        Rule(GGUF_LAYER + "attn_k_b.weight", _UP, family.transposed, family.key_rows),
        Rule(GGUF_LAYER + "attn_v_b.weight", _UP, put=family.value_rows),
    ),
    (Rule(GGUF_LAYER + "attn_kv_b.weight", _UP),),
)
GGUF_V2 = GGUFTable(_gguf_v2_fields, GGUF_WEIGHTS, either=GGUF_UP)
GGUF_V3 = GGUFTable(_gguf_fields, GGUF_WEIGHTS, either=GGUF_UP)

DEEPSEEK_V2 = Family("deepseek_v2", read_v2, build_v2, WEIGHTS, gguf=GGUF_V2, plan=PLAN)
DEEPSEEK_V3 = Family("deepseek_v3", read_v3, build_v3, WEIGHTS, IGNORED_V3, GGUF_V3, PLAN)
