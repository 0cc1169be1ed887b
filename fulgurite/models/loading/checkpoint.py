"""Checkpoints: a path in; family, configuration and tensors out.

    open_checkpoint   config.json or GGUF metadata -> family, ModelConfig, tensor source

The headers of the files are read, and no weights. A checkpoint keeps its files open until `close`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.logs import LOG
from fulgurite.models.config import ConfigFields, ModelConfig
from fulgurite.models.config_readers import merge_rope_scaling
from fulgurite.models.families.encoders import is_encoder
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.multimodal import (
    TEXT_CONFIG,
    add_text_defaults,
    find_text_decoder,
)
from fulgurite.models.families.registry import find_family, find_gguf_family, has_family
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, TensorEntry
from fulgurite.models.loading.gguf_checkpoint import GGUFCheckpoint
from fulgurite.models.loading.hub import PICKLE_SUFFIXES
from fulgurite.models.loading.quantization_config import (
    CheckpointQuantization,
    read_quantization,
)
from fulgurite.models.loading.safetensors_checkpoint import (
    SafetensorsCheckpoint,
    find_shard_files,
    reject_pickle,
)
from fulgurite.models.transformers_backend.family import (
    TransformersFamily,
    make_transformers_family,
)
from fulgurite.models.weight_mapping import WeightMapping

# Prefixes of the language model in multimodal checkpoints -> the prefixes of weight mappings.
MULTIMODAL_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
)
# Names in a checkpoint of the bare decoder, without an LM head (embedding models).
BARE_PREFIXES = tuple((name, f"model.{name}") for name in ("embed_tokens.", "layers.", "norm."))
SHARED_FIELDS = ("dtype", "torch_dtype", "tie_word_embeddings", "bos_token_id", "eos_token_id")
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COMPARED_ROWS = 4096
# Dtypes of models, the likelier first: of equal shares in a file it counts.
FILE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
IMPLEMENTATIONS = ("auto", "fulgurite", "transformers")


class TensorSource(Protocol):
    """The tensors of a checkpoint, from safetensors or GGUF files."""

    def entries(self) -> Mapping[str, TensorEntry]: ...

    def get_tensor(self, name: str) -> CheckpointTensor: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: its config and the headers of its files are read, its tensors are not."""

    path: Path
    family: ModelFamily
    config: ModelConfig
    source: TensorSource
    weights: tuple[WeightMapping, ...]
    ignored: tuple[str, ...]
    quantization: CheckpointQuantization = field(default_factory=CheckpointQuantization)

    def check_can_shard(self) -> None:
        """Raise if the model can't run on several ranks."""
        if isinstance(self.family, TransformersFamily):
            raise ArgumentError(
                f"{self.family.architecture} runs on one rank: transformers' modules aren't sharded",
                where=str(self.path),
                next="use data=1, tensor=1 and expert=1",
            )

    def entries(self) -> dict[str, TensorEntry]:
        """Every weight in file order, by its name in weight mappings."""
        return rename_entries(self.source)

    def read_kv_scales(self) -> dict[int, KVScales]:
        """Layer -> the scales of an FP8 KV cache, where the checkpoint has them."""
        if not isinstance(self.source, SafetensorsCheckpoint):
            return {}
        result = {}
        for module, names in self.source.kv_scales.items():
            match = re.match(r"model\.layers\.(\d+)\.", strip_multimodal_prefix(module))
            if match is not None:
                result[int(match[1])] = KVScales(*(self._read_scale(name) for name in names))
        return result

    def _read_scale(self, name: str) -> float:
        """One scale; of several (one a head) the largest, which holds for every head."""
        assert isinstance(self.source, SafetensorsCheckpoint), "only these have KV scales"
        value = float(self.source.read_tensor(name).float().amax())
        if not 0.0 < value < float("inf"):
            raise WeightsError(
                f"{name} is {value}; the scale of a KV cache must be positive and finite",
                where=str(self.path),
                next="download the checkpoint again, or remove the tensor",
            )
        return value

    def close(self) -> None:
        """Close the files. What was loaded from them stays valid."""
        self.source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class KVScales(NamedTuple):
    """Factors of the keys and values in an FP8 KV cache."""

    key: float
    value: float


def open_checkpoint(path: Path, implementation: str = "auto") -> Checkpoint:
    """Read the configuration and the list of tensors, but no weights.

    implementation   whose modules: `fulgurite`, `transformers`, or `auto`: fulgurite's if it has the
                     architecture
    """
    if implementation not in IMPLEMENTATIONS:
        raise ArgumentError(
            f"implementation={implementation!r} is not known",
            next=f"one of {', '.join(IMPLEMENTATIONS)}",
        )
    if path.is_file() and path.suffix in PICKLE_SUFFIXES:
        reject_pickle([path], path.parent)
    if path.suffix == ".gguf":
        return _open_gguf(GGUFCheckpoint(path))
    folder = path.parent if path.is_file() else path
    fields = read_config_file(folder)
    find_shard_files(path)  # reports missing weights before an unsupported architecture
    if is_encoder(fields):
        raise WeightsError(
            f"{fields.get_list('architectures')[0]} is an encoder: it generates no text",
            where=fields.where,
            next="embed text with it: fulgurite.EmbeddingModel(folder), or fulgurite embed",
        )
    if implementation == "transformers" or (implementation == "auto" and not has_family(fields)):
        family: ModelFamily = make_transformers_family(fields, path)
    else:
        family = find_family(fields)
    quantization = read_quantization(fields, folder)
    return _open_safetensors(path, family, get_language_model_fields(fields), quantization)


def open_bare_decoder(path: Path, fields: ConfigFields) -> Checkpoint | None:
    """A checkpoint of a decoder without an LM head, such as MistralModel; None for any other.

    It computes hidden states. Its logits are meaningless: the embedding takes the place of the head.
    """
    names = [str(name) for name in fields.get_list("architectures")]
    causal = [
        twin
        for name in names
        if name.endswith("Model") and (twin := name.removesuffix("Model") + "ForCausalLM")
    ]
    text_fields = get_language_model_fields(fields)
    fields = ConfigFields({**fields.values, "architectures": causal}, fields.where)
    if not causal or not has_family(fields):
        return None
    folder = path.parent if path.is_file() else path
    headless = ConfigFields({**text_fields.values, "tie_word_embeddings": True}, fields.where)
    family = find_family(fields)
    quantization = read_quantization(fields, folder)
    return _open_safetensors(path, family, headless, quantization)


def _open_safetensors(
    path: Path, family: ModelFamily, fields: ConfigFields, quantization: CheckpointQuantization
) -> Checkpoint:
    source = SafetensorsCheckpoint(path, quantization.section)
    if "dtype" not in fields and "torch_dtype" not in fields:
        fields = fields.with_defaults(dtype=find_dtype(source))
    config = family.read_config(fields)
    weights, ignored = family.weights, family.ignored
    if source.is_saved_model:
        weights, ignored = saved_mappings(family, config), ()
    elif not isinstance(family, TransformersFamily):
        entries = rename_entries(source)
        weights = family.select_weights(entries)
        config = replace(config, tie_word_embeddings=is_head_tied(config, entries, path))
    return Checkpoint(path, family, config, source, weights, ignored, quantization)


def find_dtype(source: TensorSource) -> str:
    """The dtype that most dense weights have, for a config.json that names none."""
    sizes = dict.fromkeys(FILE_DTYPES, 0)
    for entry in source.entries().values():
        dtype = torch.float32 if entry.dtype == torch.float64 else entry.dtype
        if dtype in sizes:
            sizes[dtype] += math.prod(entry.shape)
    largest = max(sizes, key=lambda dtype: sizes[dtype])
    return str(largest).removeprefix("torch.")


def is_head_tied(config: ModelConfig, entries: Mapping[str, TensorEntry], path: Path) -> bool:
    """Whether the LM head is the embedding.

    Fine-tuned checkpoints may declare it, and store a head of their own. Then that is used, as
    transformers 5 does.
    """
    head, embedding = entries.get(LM_HEAD), entries.get(EMBEDDING)
    if not config.tie_word_embeddings or head is None or embedding is None:
        return config.tie_word_embeddings
    if head.shape == embedding.shape and not head.is_quantized and not embedding.is_quantized:
        pair = (entry.load().data.split(COMPARED_ROWS) for entry in (head, embedding))
        if all(torch.equal(one.to(other.dtype), other) for one, other in zip(*pair, strict=True)):
            return True
    LOG.warning(
        "load: config.json of %s ties the LM head to the embedding, but %s is stored and differs; "
        "it is used",
        path,
        LM_HEAD,
    )
    return False


def _open_gguf(file: GGUFCheckpoint) -> Checkpoint:
    family = find_gguf_family(
        file.architecture, file.has_experts, file.gating_function, str(file.path)
    )
    assert family.gguf is not None, f"{family.name} is in GGUF_ARCHITECTURES without a mapping"
    fields = ConfigFields(
        family.gguf.read_config_fields(file.fields) | file.read_token_fields(), str(file.path)
    )
    config = family.read_config(fields)
    ignored = family.gguf.ignored + file.ignored
    weights = family.gguf.select_mappings(file.shapes().keys())
    return Checkpoint(file.path, family, config, file, weights, ignored)


def read_config_file(folder: Path) -> ConfigFields:
    """Read the config.json of a checkpoint folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise WeightsError(
            "this folder has no config.json", where=str(folder), next=_suggest_path(folder)
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"cannot parse config.json: {error}", where=str(file), next="download it again"
        ) from error
    if not isinstance(values, dict):
        raise WeightsError(
            "config.json is not a JSON object", where=str(file), next="download it again"
        )
    return ConfigFields(values, str(file))


def _suggest_path(folder: Path) -> str:
    """Suggest a path to pass instead, from the contents of the folder."""
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        return f"pass one of its files: {ggufs[0]}"
    if (folder / "adapter_config.json").is_file():
        merged = folder.parent / "export"
        if merged.is_dir():
            return f"this folder has adapters only; pass the merged checkpoint: {merged}"
        return (
            "this folder has adapters only: load their base model, or merge them first "
            "(load_adapters and merge_adapters, or PEFT's merge_and_unload)"
        )
    if any(folder.glob("*.safetensors")):
        return "download config.json from the model repository into this folder"
    inside = sorted(file.parent for file in folder.glob("*/config.json"))
    if inside:
        return f"pass the checkpoint's own folder: {inside[0]}"
    return "pass a checkpoint folder (config.json, weights, tokenizer.json) or a .gguf file"


def get_language_model_fields(fields: ConfigFields) -> ConfigFields:
    """The fields of the language model. A multimodal config.json nests them in `text_config`."""
    if TEXT_CONFIG not in fields:
        return merge_rope_scaling(fields)
    shared = {name: fields.values[name] for name in SHARED_FIELDS if name in fields}
    text = fields.get_section(TEXT_CONFIG).with_defaults(**shared)
    decoder = find_text_decoder(fields)
    return merge_rope_scaling(text if decoder is None else add_text_defaults(text, decoder))


def rename_entries(source: TensorSource) -> dict[str, TensorEntry]:
    """The entries by their names in weight mappings."""
    entries = source.entries()
    if isinstance(source, SafetensorsCheckpoint) and not source.is_saved_model:
        return {strip_multimodal_prefix(name): entry for name, entry in entries.items()}
    return dict(entries)


def strip_multimodal_prefix(name: str) -> str:
    """A tensor name without the prefix that multimodal checkpoints add.

    Checkpoints of bare decoders lack the prefix `model.`, which is added.
    """
    for prefix, replacement in (*MULTIMODAL_PREFIXES, *BARE_PREFIXES):
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


# ---- models that fulgurite.quantize.save wrote ---------------------------------------------------


def saved_mappings(family: ModelFamily, config: ModelConfig) -> tuple[WeightMapping, ...]:
    """Mappings of a saved `state_dict`: every tensor has the name of its parameter."""
    with torch.device("meta"):
        model = family.build(config)
    names = (re.sub(r"^layers\.\d+\.", "layers.{layer}.", n) for n, _ in model.named_parameters())
    return tuple(WeightMapping(name, name) for name in dict.fromkeys(names))
