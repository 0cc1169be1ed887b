"""Weight mappings, sharding rules and GGUF metadata that most families share."""

from __future__ import annotations

from collections.abc import Mapping

from fulgurite.models.config import ConfigFields
from fulgurite.models.weight_mapping import (
    WeightMapping,
    slice_first_half,
    slice_second_half,
    view_all_gates,
    view_all_ups,
    view_expert,
    view_expert_gate,
    view_expert_up,
)

# ---- safetensors names ---------------------------------------------------------------------------

HF_LAYER = "model.layers.{layer}."
ROUTER = "layers.{layer}.feed_forward.router.weight"
GATE_UP_PROJ = "layers.{layer}.feed_forward.experts.gate_up_proj"
DOWN_PROJ = "layers.{layer}.feed_forward.experts.down_proj"

EMBED_NORM_HEAD = (
    WeightMapping("model.embed_tokens.weight", "embed_tokens.weight"),
    WeightMapping("model.norm.weight", "norm.weight"),
    WeightMapping("lm_head.weight", "lm_head.weight"),
)
NORMS = (
    WeightMapping(HF_LAYER + "input_layernorm.weight", "layers.{layer}.attention_norm.weight"),
    WeightMapping(
        HF_LAYER + "post_attention_layernorm.weight", "layers.{layer}.feed_forward_norm.weight"
    ),
)
ATTENTION = tuple(
    WeightMapping(f"{HF_LAYER}self_attn.{proj}.{kind}", f"layers.{{layer}}.attention.{proj}.{kind}")
    for proj in ("q_proj", "k_proj", "v_proj", "o_proj")
    for kind in ("weight", "bias")
)
QK_NORMS = tuple(
    WeightMapping(f"{HF_LAYER}self_attn.{norm}.weight", f"layers.{{layer}}.attention.{norm}.weight")
    for norm in ("q_norm", "k_norm")
)
MLP = tuple(
    WeightMapping(f"{HF_LAYER}mlp.{proj}.{kind}", f"layers.{{layer}}.feed_forward.{proj}.{kind}")
    for proj in ("gate_proj", "up_proj", "down_proj")
    for kind in ("weight", "bias")
)
EXPERTS = (
    WeightMapping(HF_LAYER + "mlp.gate.weight", ROUTER),
    WeightMapping(
        HF_LAYER + "mlp.experts.{expert}.gate_proj.weight",
        GATE_UP_PROJ,
        target_view=view_expert_gate,
    ),
    WeightMapping(
        HF_LAYER + "mlp.experts.{expert}.up_proj.weight", GATE_UP_PROJ, target_view=view_expert_up
    ),
    WeightMapping(
        HF_LAYER + "mlp.experts.{expert}.down_proj.weight", DOWN_PROJ, target_view=view_expert
    ),
)


def map_shared_expert(source: str) -> tuple[WeightMapping, ...]:
    """A shared expert that the checkpoint calls mlp.`source`."""
    return tuple(
        WeightMapping(
            f"{HF_LAYER}mlp.{source}.{proj}.{kind}",
            f"layers.{{layer}}.feed_forward.shared_expert.{proj}.{kind}",
        )
        for proj in ("gate_proj", "up_proj", "down_proj")
        for kind in ("weight", "bias")
    )


def map_norms(layer: str, names: Mapping[str, str]) -> tuple[WeightMapping, ...]:
    """Weights and biases of a layer's norms: the name in the checkpoint -> the name here."""
    return tuple(
        WeightMapping(f"{layer}{source}.{kind}", f"layers.{{layer}}.{target}.{kind}")
        for source, target in names.items()
        for kind in ("weight", "bias")
    )


SHARED_EXPERTS = map_shared_expert("shared_experts")
CORRECTION_BIAS = (
    WeightMapping(
        HF_LAYER + "mlp.gate.e_score_correction_bias",
        "layers.{layer}.feed_forward.router.correction_bias",
    ),
)
FUSED_GATE_UP_MLP = (
    WeightMapping(
        HF_LAYER + "mlp.gate_up_proj.weight",
        "layers.{layer}.feed_forward.gate_proj.weight",
        slice_first_half,
    ),
    WeightMapping(
        HF_LAYER + "mlp.gate_up_proj.weight",
        "layers.{layer}.feed_forward.up_proj.weight",
        slice_second_half,
    ),
    WeightMapping(
        HF_LAYER + "mlp.down_proj.weight", "layers.{layer}.feed_forward.down_proj.weight"
    ),
)
# LayerNorm and an LM head with biases, in addition to EMBED_NORM_HEAD and NORMS.
NORM_BIASES = (
    WeightMapping("model.norm.bias", "norm.bias"),
    WeightMapping(HF_LAYER + "input_layernorm.bias", "layers.{layer}.attention_norm.bias"),
    WeightMapping(
        HF_LAYER + "post_attention_layernorm.bias", "layers.{layer}.feed_forward_norm.bias"
    ),
)
LM_HEAD_BIAS = (WeightMapping("lm_head.bias", "lm_head.bias"),)

# ---- sharding rules ------------------------------------------------------------------------------

EMBED_NORM_HEAD_SHARDING = {
    "embed_tokens": "vocabulary",
    "lm_head": "vocabulary",
    "norm": "final_norm",
}
ATTENTION_SHARDING = {
    "layers.*.attention": "attention",
    "layers.*.attention.q_proj": "query",
    "layers.*.attention.k_proj": "key",
    "layers.*.attention.v_proj": "key",
    "layers.*.attention.o_proj": "output",
}
MLP_SHARDING = {
    "layers.*.feed_forward": "feed_forward",
    "layers.*.feed_forward.gate_proj": "column",
    "layers.*.feed_forward.up_proj": "column",
    "layers.*.feed_forward.down_proj": "row",
}
EXPERTS_SHARDING = {
    "layers.*.feed_forward.experts": "experts",
    "layers.*.feed_forward.shared_expert.gate_proj": "column",
    "layers.*.feed_forward.shared_expert.up_proj": "column",
    "layers.*.feed_forward.shared_expert.down_proj": "row",
}
# A norm over all query or key heads of a token is sharded by heads, too.
PROJECTION_NORM_SHARDING = {
    "layers.*.attention.q_norm": "query",
    "layers.*.attention.k_norm": "key",
}
DENSE_SHARDING = EMBED_NORM_HEAD_SHARDING | ATTENTION_SHARDING | MLP_SHARDING

# ---- GGUF names and metadata ---------------------------------------------------------------------

GGUF_LAYER = "blk.{layer}."
# Fields that `GGUFCheckpoint` derives from the tensors: metadata does not tell.
HAS_QKV_BIAS, HAS_QK_NORM = "has_qkv_bias", "has_qk_norm"

GGUF_EMBED_NORM_HEAD = (
    WeightMapping("token_embd.weight", "embed_tokens.weight"),
    WeightMapping("output_norm.weight", "norm.weight"),
    WeightMapping("output.weight", "lm_head.weight"),
)
GGUF_NORMS = (
    WeightMapping(GGUF_LAYER + "attn_norm.weight", "layers.{layer}.attention_norm.weight"),
    WeightMapping(GGUF_LAYER + "ffn_norm.weight", "layers.{layer}.feed_forward_norm.weight"),
)
# Some architectures call the norm before the MLP the norm after attention.
GGUF_NORMS_AFTER_ATTENTION = (
    WeightMapping(GGUF_LAYER + "attn_norm.weight", "layers.{layer}.attention_norm.weight"),
    WeightMapping(
        GGUF_LAYER + "post_attention_norm.weight", "layers.{layer}.feed_forward_norm.weight"
    ),
)
GGUF_NORM_BIASES = (
    WeightMapping("output_norm.bias", "norm.bias"),
    WeightMapping(GGUF_LAYER + "attn_norm.bias", "layers.{layer}.attention_norm.bias"),
    WeightMapping(GGUF_LAYER + "ffn_norm.bias", "layers.{layer}.feed_forward_norm.bias"),
)
GGUF_ATTENTION = tuple(
    WeightMapping(f"{GGUF_LAYER}attn_{name}.{kind}", f"layers.{{layer}}.attention.{proj}.{kind}")
    for name, proj in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("output", "o_proj"))
    for kind in ("weight", "bias")
)
GGUF_QK_NORMS = tuple(
    WeightMapping(f"{GGUF_LAYER}attn_{norm}.weight", f"layers.{{layer}}.attention.{norm}.weight")
    for norm in ("q_norm", "k_norm")
)
GGUF_MLP = tuple(
    WeightMapping(
        f"{GGUF_LAYER}ffn_{name}.{kind}", f"layers.{{layer}}.feed_forward.{name}_proj.{kind}"
    )
    for name in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
GGUF_EXPERTS = (
    WeightMapping(GGUF_LAYER + "ffn_gate_inp.weight", ROUTER),
    WeightMapping(GGUF_LAYER + "ffn_gate_exps.weight", GATE_UP_PROJ, target_view=view_all_gates),
    WeightMapping(GGUF_LAYER + "ffn_up_exps.weight", GATE_UP_PROJ, target_view=view_all_ups),
    WeightMapping(GGUF_LAYER + "ffn_down_exps.weight", DOWN_PROJ),
)
GGUF_CORRECTION_BIAS = (
    WeightMapping(
        GGUF_LAYER + "exp_probs_b.bias", "layers.{layer}.feed_forward.router.correction_bias"
    ),
)
GGUF_SHARED_EXPERT = tuple(
    WeightMapping(
        f"{GGUF_LAYER}ffn_{name}_shexp.weight",
        f"layers.{{layer}}.feed_forward.shared_expert.{name}_proj.weight",
    )
    for name in ("gate", "up", "down")
)


def read_gguf_fields(fields: ConfigFields) -> dict[str, object]:
    """The GGUF metadata that all architectures have, as config.json fields.

    `fields` holds the metadata without the architecture's prefix.
    """
    hidden_size = fields.get_positive_int("embedding_length")
    num_heads = fields.get_positive_int("attention.head_count")
    result: dict[str, object] = {
        "hidden_size": hidden_size,
        "num_hidden_layers": fields.get_positive_int("block_count"),
        "intermediate_size": fields.get_int("feed_forward_length", 0),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get_positive_int("attention.head_count_kv", num_heads),
        "head_dim": fields.get_positive_int("attention.key_length", hidden_size // num_heads),
        "rms_norm_eps": fields.get_float(
            "attention.layer_norm_rms_epsilon",
            fields.get_optional_float("attention.layer_norm_epsilon"),
        ),
        "max_position_embeddings": fields.get_positive_int("context_length"),
        "rope_theta": fields.get_float("rope.freq_base", 10_000.0),
        "vocab_size": fields.get_int("vocab_size"),
        "tie_word_embeddings": fields.get_bool("tie_word_embeddings"),
    }
    scaling = fields.get_str("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        result["rope_scaling"] = {
            "rope_type": scaling,
            "factor": fields.get_float("rope.scaling.factor"),
            "original_max_position_embeddings": fields.get_int(
                "rope.scaling.original_context_length", fields.get_positive_int("context_length")
            ),
        }
    elif scaling != "none":
        raise fields.error(
            f"rope scaling {scaling!r} in GGUF is not supported; supported: linear, yarn"
        )
    if "expert_count" in fields and fields.get_int("expert_count"):
        result |= {
            "num_local_experts": fields.get_int("expert_count"),
            "num_experts": fields.get_int("expert_count"),
            "num_experts_per_tok": fields.get_int("expert_used_count"),
            "moe_intermediate_size": fields.get_int(
                "expert_feed_forward_length", fields.get_int("feed_forward_length", 0)
            ),
        }
    return result
