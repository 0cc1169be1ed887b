"""transformers' configuration of a checkpoint: a folder in, its config out, or why it can't run.

What is refused here is known from config.json alone. `probe.py` and `check.py` refuse what only the
modules show.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields, LayerConfig, ModelConfig
from fulgurite.models.config_readers import read_dtype

# Names of the number of positions, in the order of preference.
POSITION_FIELDS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length")
BATCH_DEPENDENT_ROPE = ("dynamic", "longrope")
QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")


def import_transformers(what: str, where: str) -> Any:
    """The transformers package; `what` needs it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise WeightsError(
            f"{what}, and transformers, which may have it, can't be imported: {error}",
            where=where,
            next="pip install transformers",
        ) from error


def refuse(architecture: str, reason: str, where: str) -> WeightsError:
    """The error of a model that transformers' modules can't run behind our KV cache."""
    return WeightsError(
        f"{architecture} can't run through transformers here: {reason}",
        where=where,
        next="use transformers itself for this model",
    )


def find_auto_class(config: Any, where: str) -> Any:
    """transformers' class that builds and loads models of a config."""
    transformers = import_transformers("the modules are transformers'", where)
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def read_transformers_config(fields: ConfigFields, folder: Path) -> tuple[str, Any]:
    """The name of the architecture and transformers' config, or the reason against it."""
    names = [str(name) for name in fields.get_list("architectures")]
    if not names:
        raise fields.error("config.json names no architecture")
    name = names[0]
    transformers = import_transformers(f"{name} is not an architecture of fulgurite", fields.where)
    model_type = fields.get_str("model_type", "")
    if model_type not in transformers.CONFIG_MAPPING:
        code = ", and the code of a checkpoint (auto_map) is never run" * ("auto_map" in fields)
        raise refuse(
            name,
            f"transformers {transformers.__version__} has no model_type {model_type!r}{code}",
            fields.where,
        )
    config = transformers.AutoConfig.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True
    )
    for section in (config, config.get_text_config(decoder=True)):
        for attribute in QUANTIZATION_FIELDS:  # weights are read and dequantized here
            section.__dict__.pop(attribute, None)
    if config.is_encoder_decoder:
        raise refuse(name, "it has an encoder and a decoder", fields.where)
    known = [
        classes[type(config)].__name__
        for classes in (
            transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
            transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        )
        if type(config) in classes
    ]
    if name not in known:
        instead = f"; its causal LM is {known[0]}" if known else ""
        raise refuse(name, f"it is no causal LM of transformers{instead}", fields.where)
    text = config.get_text_config(decoder=True)
    for rope_type in _rope_types(text):
        if rope_type in BATCH_DEPENDENT_ROPE:
            raise refuse(
                name,
                f"its rotary embedding ({rope_type}) depends on the longest request of the batch",
                fields.where,
            )
    others = {kind for kind in getattr(text, "layer_types", None) or () if kind not in LAYER_TYPES}
    if others:
        kinds = ", ".join(sorted(map(str, others)))
        raise refuse(name, f"it has layers of type {kinds}, which need another cache", fields.where)
    return name, config


def convert_config(name: str, config: Any, fields: ConfigFields) -> ModelConfig:
    """What the engine and the plan read of a config.

    Sizes of keys and of MLPs are not known here: `AttentionSpec`s come from the modules, and the plan
    runs them. Of a multimodal config, the text decoder's.
    """
    config = config.get_text_config(decoder=True)
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(getattr(config, field, None), int):
            raise refuse(
                name,
                f"its config.json has no {field}: it is no model of attention layers",
                fields.where,
            )
    heads = int(config.num_attention_heads)
    eos = getattr(config, "eos_token_id", None)
    return ModelConfig(
        family=f"transformers {name}",
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=4 * int(config.hidden_size),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=int(config.hidden_size) // heads,
        layers=(LayerConfig(rope=None),) * int(config.num_hidden_layers),
        norm_eps=1e-5,
        max_positions=_max_positions(name, config, fields),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        dtype=_dtype(config, fields),
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_ids=() if eos is None else tuple(eos if isinstance(eos, list) else [eos]),
    )


def _max_positions(name: str, config: Any, fields: ConfigFields) -> int:
    for field in POSITION_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, int) and value > 1:
            return value
    raise refuse(
        name,
        f"its config.json says no number of positions ({' or '.join(POSITION_FIELDS)})",
        fields.where,
    )


def _dtype(config: Any, fields: ConfigFields) -> torch.dtype:
    """The dtype of the checkpoint."""
    return config.dtype if isinstance(config.dtype, torch.dtype) else read_dtype(fields)


def _rope_types(config: Any) -> Iterator[str]:
    """The rope_type of the config, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for section in (parameters, *parameters.values()):
        if isinstance(section, dict) and isinstance(section.get("rope_type"), str):
            yield section["rope_type"]
