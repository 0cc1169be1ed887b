"""What a family is, and the rules by which names in a checkpoint become parameters.

A `Rule` names one tensor of a checkpoint and the parameter it fills. `take` changes the tensor as
read, `put` says which part of the parameter it fills; both are plain functions of tensors that also
work on the meta device, so a checkpoint's shapes are checked with the very functions that load it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

from fulgurite.models.config import Fields, ModelConfig

Take = Callable[[Tensor, ModelConfig], Tensor]
Put = Callable[[Tensor, ModelConfig, int], Tensor]


def whole(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The tensor as it is."""
    return tensor


def everything(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """All of the parameter."""
    return parameter


@dataclass(frozen=True)
class Rule:
    """`source`, a name with {layer} and {expert} in it, fills (part of) the parameter `target`."""

    source: str
    target: str
    take: Take = whole
    put: Put = everything


@dataclass(frozen=True)
class GGUFTable:
    """How a family is written in GGUF files: metadata as config.json fields, and tensors.

    `either` are several ways to write the same weights: a file has the names of one of them.
    """

    read_fields: Callable[[Fields], dict[str, object]]
    weights: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    either: tuple[tuple[Rule, ...], ...] = ()

    def rules(self, names: Collection[str]) -> tuple[Rule, ...]:
        """The rules of a file with tensors of these names."""
        for way in self.either:
            if any(rule.source.replace("{layer}", "0") in names for rule in way):
                return self.weights + way
        return self.weights + (self.either[0] if self.either else ())


@dataclass(frozen=True, eq=False)
class Family:
    """One family of models.

    `ignored` are patterns of names that are known and not needed; `plan` says how modules are divided
    over ranks, in the words of `fulgurite.parallel.tensor`.
    """

    name: str
    read_config: Callable[[Fields], ModelConfig]
    build: Callable[[ModelConfig], nn.Module]
    weights: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    gguf: GGUFTable | None = None
    plan: Mapping[str, str] = field(default_factory=dict)


# What `take` can do.


def transposed(tensor: Tensor, config: ModelConfig) -> Tensor:
    """[E, in, out] as [E, out, in]."""
    return tensor.transpose(-1, -2)


def minus_one(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Norm weights that a file keeps with Gemma's 1 already added."""
    return tensor - 1


def gate_before_up(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows gate, up, gate, up, ... as all gates and then all ups (dimension 1)."""
    return tensor.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def transposed_gate_before_up(tensor: Tensor, config: ModelConfig) -> Tensor:
    return gate_before_up(tensor.transpose(-1, -2), config)


def fused_query(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The query rows of a fused query, key, value weight."""
    return tensor[: config.heads * config.head_dim]


def fused_key(tensor: Tensor, config: ModelConfig) -> Tensor:
    start = config.heads * config.head_dim
    return tensor[start : start + config.kv_heads * config.head_dim]


def fused_value(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor[(config.heads + config.kv_heads) * config.head_dim :]


def first_half(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.chunk(2)[0]


def second_half(tensor: Tensor, config: ModelConfig) -> Tensor:
    return tensor.chunk(2)[1]


def half_from_interleaved(tensor: Tensor, config: ModelConfig) -> Tensor:
    """GGUF's llama rows pair dimensions (2i, 2i + 1) of a head; ours pair (i, i + H / 2)."""
    heads = tensor.unflatten(0, (-1, config.head_dim // 2, 2))
    return heads.transpose(1, 2).flatten(0, 2)


# What `put` can do: parts of stacked experts, and of a projection of all heads.


def one_expert(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter[expert]


def gate_of_expert(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter[expert].chunk(2)[0]


def up_of_expert(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter[expert].chunk(2)[1]


def gate_of_experts(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter.chunk(2, dim=1)[0]


def up_of_experts(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    return parameter.chunk(2, dim=1)[1]


def _up_heads(parameter: Tensor, config: ModelConfig) -> Tensor:
    return parameter.unflatten(0, (config.heads, -1))


def key_rows(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    """The rows of a latent's up projection that make keys, head by head."""
    assert config.latent is not None, f"{config.family} has no latent"
    return _up_heads(parameter, config)[:, : config.latent.nope_dim]


def value_rows(parameter: Tensor, config: ModelConfig, expert: int) -> Tensor:
    assert config.latent is not None, f"{config.family} has no latent"
    return _up_heads(parameter, config)[:, config.latent.nope_dim :]


# Rules that most families share.

LAYER = "model.layers.{layer}."

OUTSIDE_LAYERS = (
    Rule("model.embed_tokens.weight", "embedding.weight"),
    Rule("model.norm.weight", "norm.weight"),
    Rule("lm_head.weight", "head.weight"),
)
NORMS = (
    Rule(LAYER + "input_layernorm.weight", "layers.{layer}.attention_norm.weight"),
    Rule(LAYER + "post_attention_layernorm.weight", "layers.{layer}.feed_forward_norm.weight"),
)
ATTENTION = tuple(
    Rule(LAYER + f"self_attn.{theirs}_proj.{kind}", f"layers.{{layer}}.attention.{ours}.{kind}")
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))
    for kind in ("weight", "bias")
)
HEAD_NORMS = tuple(
    Rule(LAYER + f"self_attn.{short}_norm.weight", f"layers.{{layer}}.attention.{name}_norm.weight")
    for short, name in (("q", "query"), ("k", "key"))
)
MLP = tuple(
    Rule(LAYER + f"mlp.{name}_proj.{kind}", f"layers.{{layer}}.feed_forward.{name}.{kind}")
    for name in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
EACH_EXPERT = (
    Rule(LAYER + "mlp.gate.weight", "layers.{layer}.feed_forward.router.weight"),
    Rule(
        LAYER + "mlp.experts.{expert}.gate_proj.weight",
        "layers.{layer}.feed_forward.experts.gate_up",
        put=gate_of_expert,
    ),
    Rule(
        LAYER + "mlp.experts.{expert}.up_proj.weight",
        "layers.{layer}.feed_forward.experts.gate_up",
        put=up_of_expert,
    ),
    Rule(
        LAYER + "mlp.experts.{expert}.down_proj.weight",
        "layers.{layer}.feed_forward.experts.down",
        put=one_expert,
    ),
)

# How modules are divided over ranks.

OUTSIDE_PLAN = {"embedding": "vocabulary", "head": "vocabulary", "norm": "last"}
ATTENTION_PLAN = {
    "layers.*.attention": "attention",
    "layers.*.attention.query": "query",
    "layers.*.attention.key": "key",
    "layers.*.attention.value": "key",
    "layers.*.attention.output": "output",
}
MLP_PLAN = {
    "layers.*.feed_forward": "feed_forward",
    "layers.*.feed_forward.gate": "column",
    "layers.*.feed_forward.up": "column",
    "layers.*.feed_forward.down": "row",
}
EXPERTS_PLAN = {
    "layers.*.feed_forward.experts": "experts",
    "layers.*.feed_forward.shared.gate": "column",
    "layers.*.feed_forward.shared.up": "column",
    "layers.*.feed_forward.shared.down": "row",
}
DENSE_PLAN = OUTSIDE_PLAN | ATTENTION_PLAN | MLP_PLAN

# The same in GGUF names.

GGUF_LAYER = "blk.{layer}."

GGUF_OUTSIDE_LAYERS = (
    Rule("token_embd.weight", "embedding.weight"),
    Rule("output_norm.weight", "norm.weight"),
    Rule("output.weight", "head.weight"),
)
GGUF_NORMS = (
    Rule(GGUF_LAYER + "attn_norm.weight", "layers.{layer}.attention_norm.weight"),
    Rule(GGUF_LAYER + "ffn_norm.weight", "layers.{layer}.feed_forward_norm.weight"),
)
GGUF_ATTENTION = tuple(
    Rule(GGUF_LAYER + f"attn_{theirs}.{kind}", f"layers.{{layer}}.attention.{ours}.{kind}")
    for theirs, ours in (("q", "query"), ("k", "key"), ("v", "value"), ("output", "output"))
    for kind in ("weight", "bias")
)
GGUF_HEAD_NORMS = tuple(
    Rule(GGUF_LAYER + f"attn_{short}_norm.weight", f"layers.{{layer}}.attention.{name}_norm.weight")
    for short, name in (("q", "query"), ("k", "key"))
)
GGUF_MLP = tuple(
    Rule(GGUF_LAYER + f"ffn_{name}.{kind}", f"layers.{{layer}}.feed_forward.{name}.{kind}")
    for name in ("gate", "up", "down")
    for kind in ("weight", "bias")
)
GGUF_EXPERTS = (
    Rule(GGUF_LAYER + "ffn_gate_inp.weight", "layers.{layer}.feed_forward.router.weight"),
    Rule(
        GGUF_LAYER + "ffn_gate_exps.weight",
        "layers.{layer}.feed_forward.experts.gate_up",
        put=gate_of_experts,
    ),
    Rule(
        GGUF_LAYER + "ffn_up_exps.weight",
        "layers.{layer}.feed_forward.experts.gate_up",
        put=up_of_experts,
    ),
    Rule(GGUF_LAYER + "ffn_down_exps.weight", "layers.{layer}.feed_forward.experts.down"),
)
GGUF_SHARED_EXPERT = tuple(
    Rule(
        GGUF_LAYER + f"ffn_{name}_shexp.weight",
        f"layers.{{layer}}.feed_forward.shared.{name}.weight",
    )
    for name in ("gate", "up", "down")
)


def gguf_fields(fields: Fields) -> dict[str, object]:
    """The metadata every architecture has (here without its prefix) as config.json fields."""
    hidden, heads = fields.size("embedding_length"), fields.size("attention.head_count")
    result: dict[str, object] = {
        "hidden_size": hidden,
        "num_hidden_layers": fields.size("block_count"),
        "intermediate_size": fields.integer("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": fields.size("attention.key_length", hidden // heads),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": fields.size("context_length"),
        "rope_theta": fields.number("rope.freq_base", 10_000.0),
        "vocab_size": fields.integer("vocab_size"),
        "tie_word_embeddings": fields.boolean("tied"),
    }
    scaling = fields.text("rope.scaling.type", "none")
    if scaling in ("linear", "yarn"):
        result["rope_scaling"] = {
            "rope_type": scaling,
            "factor": fields.number("rope.scaling.factor"),
            "original_max_position_embeddings": fields.integer(
                "rope.scaling.original_context_length", fields.size("context_length")
            ),
        }
    elif scaling != "none":
        raise fields.error(f"rope scaling {scaling!r} in GGUF is not supported")
    if "expert_count" in fields and fields.integer("expert_count"):
        result |= {
            "num_local_experts": fields.integer("expert_count"),
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer(
                "expert_feed_forward_length", fields.integer("feed_forward_length", 0)
            ),
        }
    return result
