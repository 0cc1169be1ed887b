"""Encoder families: the config.json and tensor names of BERT, RoBERTa and XLM-RoBERTa.

MiniLM, BGE, GTE and E5 are one of these. Heads for other tasks (masked words, classes) and the
"pooler" are not read: an embedding model pools the hidden states (`models/pooling.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fulgurite.errors import WeightsError
from fulgurite.models.config import ACTIVATIONS, ConfigFields
from fulgurite.models.config_readers import read_dtype
from fulgurite.models.encoder import EncoderConfig

# Names in checkpoints, without the prefix "bert." or "roberta." -> parameters, weight and bias.
EMBEDDINGS = {
    "embeddings.word_embeddings": "word_embeddings",
    "embeddings.position_embeddings": "position_embeddings",
    "embeddings.token_type_embeddings": "type_embeddings",
    "embeddings.LayerNorm": "embedding_norm",
}
LAYER = {
    "attention.self.query": "attention.q_proj",
    "attention.self.key": "attention.k_proj",
    "attention.self.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "up_proj",
    "output.dense": "down_proj",
    "output.LayerNorm": "output_norm",
}
PREFIXES = ("bert.", "roberta.")
# Tensors that embeddings don't need: heads, and positions that old files store.
IGNORED = ("pooler.", "cls.", "lm_head.", "classifier.", "embeddings.position_ids")


def read_bert(fields: ConfigFields) -> EncoderConfig:
    fields.require("position_embedding_type", "absolute", "absolute")
    fields.require("is_decoder", False, False)
    hidden_size = fields.get_positive_int("hidden_size")
    num_heads = fields.get_positive_int("num_attention_heads")
    if hidden_size % num_heads:
        raise fields.error(
            f"hidden_size={hidden_size} must be a multiple of num_attention_heads={num_heads}"
        )
    return EncoderConfig(
        family="bert",
        vocab_size=fields.get_positive_int("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.get_positive_int("intermediate_size"),
        num_layers=fields.get_positive_int("num_hidden_layers"),
        num_heads=num_heads,
        max_positions=fields.get_positive_int("max_position_embeddings", 512),
        num_types=fields.get_positive_int("type_vocab_size", 2),
        activation=fields.get_choice("hidden_act", ACTIVATIONS, "gelu"),
        norm_eps=fields.get_float("layer_norm_eps", 1e-12),
        dtype=read_dtype(fields),
    )


def read_roberta(fields: ConfigFields) -> EncoderConfig:
    config = read_bert(fields.with_defaults(type_vocab_size=1, layer_norm_eps=1e-5))
    return replace(config, family="roberta", padding_id=fields.get_int("pad_token_id", 1))


ENCODERS = {
    "Bert": read_bert,
    "Roberta": read_roberta,
    "XLMRoberta": read_roberta,
    "Camembert": read_roberta,
}
SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification")


def is_encoder(fields: ConfigFields) -> bool:
    """Whether a config.json describes an encoder of this file."""
    return _find_reader_name(fields) is not None


def read_encoder_config(fields: ConfigFields) -> EncoderConfig:
    name = _find_reader_name(fields)
    if name is None:
        raise WeightsError(
            f"architectures {list(fields.get_list('architectures'))} is no supported encoder",
            where=fields.where,
            next=f"supported: {', '.join(f'{name}Model' for name in ENCODERS)}",
        )
    return ENCODERS[name](fields)


def _find_reader_name(fields: ConfigFields) -> str | None:
    for architecture in map(str, fields.get_list("architectures")):
        for suffix in SUFFIXES:
            if architecture.endswith(suffix) and architecture.removesuffix(suffix) in ENCODERS:
                return architecture.removesuffix(suffix)
    return None


def map_names(num_layers: int) -> Mapping[str, str]:
    """Tensor names in a checkpoint without prefix -> parameter names."""
    modules = dict(EMBEDDINGS)
    for layer in range(num_layers):
        modules |= {
            f"encoder.layer.{layer}.{source}": f"layers.{layer}.{target}"
            for source, target in LAYER.items()
        }
    return {
        f"{source}.{kind}": f"{target}.{kind}"
        for source, target in modules.items()
        for kind in ("weight", "bias")
        if kind == "weight" or "_embeddings" not in source
    }
