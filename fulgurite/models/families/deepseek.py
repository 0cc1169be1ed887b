"""DeepSeek-V2 and V3: multi-head latent attention (MLA) and group-limited expert routing.

In: hidden states. Out: hidden states. `mla.py` has the formulas of MLA. This module only projects;
the KV cache decides how to attend.

Shapes: X token layout; D hidden size; N heads; H query head size; C kv_lora_rank;
L = C + qk_rope_head_dim; U rows of kv_b_proj per head; V value head size.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from fulgurite.kernels.gemm import fused_projections
from fulgurite.models.attention_spec import AttentionSpec
from fulgurite.models.blocks import GatedMLP, ResidualBlock, get_children, project_add
from fulgurite.models.config import ConfigFields, LayerConfig, MLAConfig, ModelConfig, MoEConfig
from fulgurite.models.config_readers import read_rope
from fulgurite.models.families import common
from fulgurite.models.families.common import GGUF_LAYER, HF_LAYER
from fulgurite.models.families.family import GGUFMapping, ModelFamily
from fulgurite.models.families.llama import read_dense_config
from fulgurite.models.kv_cache import KVCache
from fulgurite.models.layers import CausalLM
from fulgurite.models.mla import MLAInputs
from fulgurite.models.moe import (
    Experts,
    MoE,
    Router,
    build_shared_expert,
    gated_activation,
    grouped_sigmoid,
    grouped_softmax,
)
from fulgurite.models.norms import RMSNorm
from fulgurite.models.residual_layers import PreNormLayer
from fulgurite.models.rope import RotaryCosSin
from fulgurite.models.weight_mapping import (
    WeightMapping,
    transpose,
    view_kv_b_keys,
    view_kv_b_values,
)

MLA_NORM_EPS = 1e-6  # of q_a_norm and kv_a_norm, independent of rms_norm_eps


def read_v2(fields: ConfigFields) -> ModelConfig:
    fields.require("norm_topk_prob", False, default=False)
    fields.require("scoring_func", "softmax", default="softmax")
    method = fields.get_choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    return read_mla_config(
        "deepseek_v2", fields, grouped=method == "group_limited_greedy", interleaved=True
    )


def read_v3(fields: ConfigFields) -> ModelConfig:
    fields.require("scoring_func", "sigmoid", default="sigmoid")
    fields.require("topk_method", "noaux_tc", default="noaux_tc")
    interleaved = fields.get_bool("rope_interleave", True)
    fields = fields.with_defaults(
        norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1
    )
    return read_mla_config("deepseek_v3", fields, grouped=True, interleaved=interleaved)


def read_mla_config(
    name: str, fields: ConfigFields, grouped: bool, interleaved: bool
) -> ModelConfig:
    """The config of a model with MLA and the experts of DeepSeek."""
    fields.require("moe_layer_freq", 1, default=1)
    mla = MLAConfig(
        kv_lora_rank=fields.get_positive_int("kv_lora_rank"),
        q_lora_rank=fields.get_optional_positive_int("q_lora_rank"),
        qk_nope_head_dim=fields.get_positive_int("qk_nope_head_dim"),
        qk_rope_head_dim=fields.get_positive_int("qk_rope_head_dim"),
        v_head_dim=fields.get_positive_int("v_head_dim"),
    )
    head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    dense_fields = ConfigFields({**fields.values, "head_dim": head_dim}, fields.where)
    config = read_dense_config(name, dense_fields, rotary_dim=mla.qk_rope_head_dim)
    rope = read_rope(fields, mla.qk_rope_head_dim, interleaved=interleaved)
    first_moe_layer = fields.get_int("first_k_dense_replace", 0)
    moe = read_grouped_moe(fields, grouped)
    layers = [LayerConfig(rope, is_moe=i >= first_moe_layer) for i in range(len(config.layers))]
    bias = fields.get_bool("attention_bias", False)
    return replace(
        config,
        layers=tuple(layers),
        attention_scale=head_dim**-0.5 * rope.softmax_scale_factor,
        qkv_bias=bias,
        o_proj_bias=bias,
        mlp_bias=fields.get_bool("mlp_bias", False),
        moe=moe,
        mla=mla,
    )


def read_grouped_moe(fields: ConfigFields, grouped: bool = True) -> MoEConfig:
    """The experts of DeepSeek, and of families with its routing (GLM-4.5, dots.llm1)."""
    intermediate_size = fields.get_positive_int("moe_intermediate_size")
    return MoEConfig(
        num_experts=fields.get_positive_int("n_routed_experts"),
        top_k=fields.get_positive_int("num_experts_per_tok"),
        intermediate_size=intermediate_size,
        shared_intermediate_size=intermediate_size * fields.get_int("n_shared_experts", 0),
        renormalize=fields.get_bool("norm_topk_prob", False),
        routed_scaling_factor=fields.get_float("routed_scaling_factor", 1.0),
        num_groups=fields.get_positive_int("n_group", 1) if grouped else 1,
        topk_groups=fields.get_positive_int("topk_group", 1) if grouped else 1,
    )


class KVUpProjection(nn.Linear):
    """kv_b_proj, which expands the compressed KV vector into the keys and values of all heads.

    MLA reads its weight per head, by rows and by columns. So it stays dense in a quantized model;
    it is a small part of a layer.
    """


class MLAttention(ResidualBlock):
    """Multi-head latent attention; see `mla.py` for the formulas.

    q_a_proj (q_proj in a model without q_lora_rank) and kv_a_proj read the same input. They run as
    fused projections, with the norm before them.
    """

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        rope, mla = config.layers[index].rope, config.mla
        assert mla is not None and rope is not None, "MLA needs a rotary embedding"
        self.interleaved = rope.interleaved
        self.query_dim, self.kv_b_dim = config.head_dim, mla.qk_nope_head_dim + mla.v_head_dim
        num_heads, hidden_size, bias = config.num_heads, config.hidden_size, config.qkv_bias
        self.spec = AttentionSpec(
            layer_index=index,
            num_heads=num_heads,
            num_kv_heads=1,
            key_dim=mla.kv_lora_rank + mla.qk_rope_head_dim,
            value_dim=mla.kv_lora_rank,
            scale=config.attention_scale,
            is_mla=True,
            mla_head_dims=(mla.qk_nope_head_dim, mla.v_head_dim),
        )
        query_size = num_heads * config.head_dim
        self.has_q_lora = mla.q_lora_rank is not None
        if mla.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden_size, query_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden_size, mla.q_lora_rank, bias=bias)
            self.q_a_norm = RMSNorm(mla.q_lora_rank, MLA_NORM_EPS)
            self.q_b_proj = nn.Linear(mla.q_lora_rank, query_size, bias=False)
        kv_a_size = mla.kv_lora_rank + mla.qk_rope_head_dim
        self.kv_a_proj = nn.Linear(hidden_size, kv_a_size, bias=bias)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, MLA_NORM_EPS)
        self.kv_b_proj = KVUpProjection(mla.kv_lora_rank, num_heads * self.kv_b_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * mla.v_head_dim, hidden_size, bias=config.o_proj_bias)

    def forward(
        self,
        x_XD: Tensor,
        positions_X: Tensor,
        cos_sin: RotaryCosSin,
        cache: KVCache,
        *,
        norm: RMSNorm | None = None,
        residual_XD: Tensor | None = None,
    ) -> Tensor:
        """Apply `norm` to x first if given, and add the output to `residual_XD` if given."""
        q_X, kv_a_XL = fused_projections.fused_linears(x_XD, self.fused_projections, norm)
        if self.has_q_lora:
            q_b_proj = get_children(self, "q_b_proj")
            (q_X,) = fused_projections.fused_linears(q_X, q_b_proj, self.q_a_norm)
        inputs = MLAInputs(
            q_XNH=q_X.unflatten(-1, (-1, self.query_dim)),
            kv_a_XL=kv_a_XL,
            kv_a_norm_C=self.kv_a_norm.weight,
            eps=self.kv_a_norm.eps,
            kv_b_NUC=self.kv_b_proj.weight.unflatten(0, (-1, self.kv_b_dim)),
            cos_sin=cos_sin,
            interleaved=self.interleaved,
        )
        out_XNV = cache.attend_mla(self.spec, inputs, positions_X)
        return project_add(residual_XD, out_XNV.flatten(-2), self.o_proj)

    @property
    def fused_projections(self) -> tuple[nn.Module, ...]:
        """The linears that read the same input."""
        return get_children(self, "q_a_proj" if self.has_q_lora else "q_proj", "kv_a_proj")


def build_v2(config: ModelConfig) -> nn.Module:
    layers = [_build_layer(config, index, is_v3=False) for index in range(len(config.layers))]
    return CausalLM(config, layers)


def build_v3(config: ModelConfig) -> nn.Module:
    layers = [_build_layer(config, index, is_v3=True) for index in range(len(config.layers))]
    return CausalLM(config, layers)


def _build_layer(config: ModelConfig, index: int, is_v3: bool) -> nn.Module:
    attention = MLAttention(config, index)
    if not config.layers[index].is_moe:
        return PreNormLayer(config, attention, GatedMLP.from_config(config))
    assert config.moe is not None, "DeepSeek has experts"
    routing = grouped_sigmoid if is_v3 else grouped_softmax
    router = Router(config.hidden_size, config.moe, routing, correction_bias=is_v3)
    experts = Experts(config.hidden_size, config.moe, gated_activation(config.activation))
    return PreNormLayer(config, attention, MoE(router, experts, build_shared_expert(config)))


_HF_ATTENTION, _ATTENTION = HF_LAYER + "self_attn.", "layers.{layer}.attention."

WEIGHT_MAPPINGS = (
    common.EMBED_NORM_HEAD
    + common.NORMS
    + common.MLP
    + common.EXPERTS
    + tuple(
        WeightMapping(f"{_HF_ATTENTION}{source}", f"{_ATTENTION}{target}")
        for source, target in (
            ("q_proj.weight", "q_proj.weight"),
            ("q_a_proj.weight", "q_a_proj.weight"),
            ("q_a_proj.bias", "q_a_proj.bias"),
            ("q_a_layernorm.weight", "q_a_norm.weight"),
            ("q_b_proj.weight", "q_b_proj.weight"),
            ("kv_a_proj_with_mqa.weight", "kv_a_proj.weight"),
            ("kv_a_proj_with_mqa.bias", "kv_a_proj.bias"),
            ("kv_a_layernorm.weight", "kv_a_norm.weight"),
            ("kv_b_proj.weight", "kv_b_proj.weight"),
            ("o_proj.weight", "o_proj.weight"),
            ("o_proj.bias", "o_proj.bias"),
        )
    )
    + common.SHARED_EXPERTS
    + common.CORRECTION_BIAS
)
# The layer after the last one is for multi-token prediction (MTP), which is not supported.
IGNORED_V3 = (r"model\.layers\.{num_layers}\..*",)

# kv_a_proj is replicated on all ranks. The projections to and from heads are sharded by heads.
SHARDING_RULES = (
    common.EMBED_NORM_HEAD_SHARDING
    | {
        "layers.*.attention": "attention",
        "layers.*.attention.q_proj": "query",
        "layers.*.attention.q_b_proj": "query",
        "layers.*.attention.kv_b_proj": "query",
        "layers.*.attention.o_proj": "output",
    }
    | common.MLP_SHARDING
    | common.EXPERTS_SHARDING
)


def _read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    """GGUF metadata as config.json fields.

    Files that split kv_b_proj store MLA sizes in `key_length` and `value_length`. They store the
    sizes per head in `key_length_mla` and `value_length_mla`.
    """
    result = common.read_gguf_fields(fields)
    rope = fields.get_int("rope.dimension_count")
    key = fields.get_int("attention.key_length_mla", fields.get_int("attention.key_length"))
    value = fields.get_int("attention.value_length_mla", fields.get_int("attention.value_length"))
    groups = fields.get_int("expert_group_count", 1)
    return result | {
        "num_key_value_heads": fields.get_int("attention.head_count"),
        "kv_lora_rank": fields.get_int("attention.kv_lora_rank"),
        "q_lora_rank": fields.get_optional_int("attention.q_lora_rank"),
        "qk_nope_head_dim": key - rope,
        "qk_rope_head_dim": rope,
        "v_head_dim": value,
        "first_k_dense_replace": fields.get_int("leading_dense_block_count", 0),
        "n_routed_experts": fields.get_int("expert_count"),
        "n_shared_experts": fields.get_int("expert_shared_count", 0),
        "routed_scaling_factor": fields.get_float("expert_weights_scale", 1.0),
        "norm_topk_prob": fields.get_bool("expert_weights_norm", False),
        "n_group": groups,
        "topk_group": fields.get_int("expert_group_used_count", groups),
        "rope_scaling": _read_gguf_rope_scaling(fields, result.get("rope_scaling")),
    }


def _read_gguf_v2_fields(fields: ConfigFields) -> dict[str, object]:
    result = _read_gguf_fields(fields)
    grouped = fields.get_int("expert_group_count", 1) > 1
    return result | {"topk_method": "group_limited_greedy" if grouped else "greedy"}


def _read_gguf_rope_scaling(fields: ConfigFields, scaling: object) -> object:
    """YaRN fields. A file stores mscale_all_dim / 10; mscale equals mscale_all_dim in every
    release.
    """
    if not isinstance(scaling, dict) or scaling["rope_type"] != "yarn":
        return scaling
    return scaling | {
        "attention_factor": 1.0,
        "mscale_all_dim": 10 * fields.get_float("rope.scaling.yarn_log_multiplier", 0.0),
        "beta_fast": fields.get_float("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": fields.get_float("rope.scaling.yarn_beta_slow", 1.0),
    }


GGUF_WEIGHT_MAPPINGS = (
    common.GGUF_EMBED_NORM_HEAD
    + common.GGUF_NORMS
    + common.GGUF_MLP
    + common.GGUF_EXPERTS
    + common.GGUF_SHARED_EXPERT
    + common.GGUF_CORRECTION_BIAS
    + tuple(
        WeightMapping(f"{GGUF_LAYER}{source}", f"layers.{{layer}}.{target}")
        for source, target in (
            ("attn_q.weight", "attention.q_proj.weight"),
            ("attn_q_a.weight", "attention.q_a_proj.weight"),
            ("attn_q_a_norm.weight", "attention.q_a_norm.weight"),
            ("attn_q_b.weight", "attention.q_b_proj.weight"),
            ("attn_kv_a_mqa.weight", "attention.kv_a_proj.weight"),
            ("attn_kv_a_norm.weight", "attention.kv_a_norm.weight"),
            ("attn_output.weight", "attention.o_proj.weight"),
        )
    )
)
_KV_B_PROJ = "layers.{layer}.attention.kv_b_proj.weight"
GGUF_KV_B_PROJ = (
    (
        WeightMapping(GGUF_LAYER + "attn_k_b.weight", _KV_B_PROJ, transpose, view_kv_b_keys),
        WeightMapping(GGUF_LAYER + "attn_v_b.weight", _KV_B_PROJ, target_view=view_kv_b_values),
    ),
    (WeightMapping(GGUF_LAYER + "attn_kv_b.weight", _KV_B_PROJ),),
)
GGUF_V2 = GGUFMapping(_read_gguf_v2_fields, GGUF_WEIGHT_MAPPINGS, alternatives=GGUF_KV_B_PROJ)
GGUF_V3 = GGUFMapping(_read_gguf_fields, GGUF_WEIGHT_MAPPINGS, alternatives=GGUF_KV_B_PROJ)

DEEPSEEK_V2 = ModelFamily(
    "deepseek_v2", read_v2, build_v2, WEIGHT_MAPPINGS, gguf=GGUF_V2, sharding_rules=SHARDING_RULES
)
DEEPSEEK_V3 = ModelFamily(
    "deepseek_v3", read_v3, build_v3, WEIGHT_MAPPINGS, IGNORED_V3, GGUF_V3, SHARDING_RULES
)
