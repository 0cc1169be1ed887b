"""Builds the model that is trained: a config in; a `CausalLM`, its family and its config.json fields out.

    init_from is None    a family of `models.ARCHITECTURES`, initialized by name and seed
    init_from=NAME       the weights of a folder, a file or a name on the Hub

**Initialization.** A matrix has a standard deviation of 1 / sqrt(its inputs); projections into the
residual stream (`o_proj`, `down_proj`) are smaller by sqrt(2 layers), so that its variance does not grow
with depth. Embeddings, heads and routers are small, norms 1, biases 0. A parameter's numbers depend on
its name and the seed alone, not on the device or on how ranks share it.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fulgurite.errors import ArgumentError, WeightsError
from fulgurite.models.config import DTYPES, ConfigFields, ModelConfig
from fulgurite.models.families.family import ModelFamily
from fulgurite.models.families.multimodal import find_text_decoder
from fulgurite.models.families.registry import ARCHITECTURES, read_architectures
from fulgurite.models.layers import CausalLM
from fulgurite.models.linear_attention import CausalConv, GatedDeltaNet
from fulgurite.models.loading import hub
from fulgurite.models.loading.checkpoint import (
    Checkpoint,
    get_language_model_fields,
    open_checkpoint,
    read_config_file,
)
from fulgurite.models.loading.gguf_checkpoint import GGUFCheckpoint
from fulgurite.models.loading.load_plan import build_model
from fulgurite.models.loading.loader import allocate_parameters, load_checkpoint
from fulgurite.models.moe import Router
from fulgurite.models.norms import LayerNorm, RMSNorm
from fulgurite.models.transformers_backend.family import TransformersFamily
from fulgurite.train.config import TrainConfig

EMBEDDING_STD = 0.02  # of embeddings and heads, as in GPT-2
ROUTER_STD = 0.02  # nearly even scores, so that balancing starts from an even load
RESIDUAL_OUTPUTS = ("o_proj", "down_proj", "out_proj")  # modules and stacked experts


@dataclass(frozen=True)
class BuiltModel:
    """A model, and what is needed to save it in the published layout.

    Attributes:
        fields: of its config.json.
    """

    model: CausalLM
    family: ModelFamily
    fields: dict[str, Any]


def build_training_model(
    config: TrainConfig, vocab_size: int, device: torch.device | str
) -> BuiltModel:
    """The model of a run, in training mode, with gradients for all weights that are trained.

    `config` is resolved (`sizes.py`). `vocab_size` is that of the tokenizer.
    """
    if config.model.init_from is not None:
        built = _load(config, vocab_size, device)
    else:
        built = build_from_scratch(
            {**config.model.fields, "vocab_size": vocab_size},
            config.model.architecture or "",
            dtype=get_dtype(config.model.dtype),
            device=device,
            seed=config.seed,
        )
    freeze_selection_biases(built.model)
    built.model.train()
    return built


def get_dtype(name: str | None) -> torch.dtype:
    """float32 or bfloat16. float16 has no room for gradients without loss scaling."""
    if name not in ("float32", "bfloat16"):
        raise ArgumentError(
            f"model.dtype={name!r} can't be trained", next="use float32 or bfloat16"
        )
    return DTYPES[name]


def read_model_config(fields: dict[str, Any], architecture: str) -> tuple[ModelFamily, ModelConfig]:
    """The family of an architecture, and its config from config.json fields."""
    if architecture not in ARCHITECTURES:
        names = {name.lower(): name for name in ARCHITECTURES}
        asked = architecture.lower().removesuffix("forcausallm") + "forcausallm"
        near = difflib.get_close_matches(asked, names, n=1)
        raise ArgumentError(
            f"model.architecture={architecture!r} is not known",
            next=(f"did you mean {names[near[0]]}? " if near else "")
            + f"one of {', '.join(sorted(ARCHITECTURES))}",
        )
    family = ARCHITECTURES[architecture]
    try:
        return family, family.read_config(ConfigFields(fields, "model.fields"))
    except WeightsError as error:
        raise ArgumentError(
            f"{architecture} can't be built: {error.what}",
            where="the fields of config.json, from model.fields and the size",
            next="set it with --model.fields.NAME VALUE, or in the table [model.fields]",
        ) from error


def build_from_scratch(
    fields: dict[str, Any],
    architecture: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
) -> BuiltModel:
    """A model with initialized weights."""
    family, model_config = read_model_config(fields, architecture)
    model = build_model(model_config, family, dtype)
    allocate_parameters(model, device)
    initialize(model, seed)
    name = str(dtype).removeprefix("torch.")
    return BuiltModel(model, family, {"architectures": [architecture], **fields, "dtype": name})


def _load(config: TrainConfig, vocab_size: int, device: torch.device | str) -> BuiltModel:
    assert config.model.init_from is not None, "the caller has checked it"
    path = hub.resolve_model_path(config.model.init_from)
    with open_checkpoint(path) as checkpoint:
        if isinstance(checkpoint.family, TransformersFamily):
            raise ArgumentError(
                f"{checkpoint.family.architecture} can't be trained: its modules are transformers'",
                where=str(path),
                next=f"use one of {', '.join(sorted(ARCHITECTURES))}",
            )
        if vocab_size > checkpoint.config.vocab_size:
            raise ArgumentError(
                f"the tokenizer has {vocab_size} tokens, the model only "
                f"{checkpoint.config.vocab_size}",
                where=str(path),
                next="leave out data.tokenizer to use the tokenizer of the model",
            )
        model = load_checkpoint(checkpoint, dtype=get_dtype(config.model.dtype), device=device)
        fields = (
            read_gguf_fields(checkpoint) if path.suffix == ".gguf" else read_checkpoint_fields(path)
        )
        return BuiltModel(model, checkpoint.family, fields)


def read_gguf_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    """Fields of a config.json that describes the model of a GGUF file."""
    file, family = checkpoint.source, checkpoint.family
    assert isinstance(file, GGUFCheckpoint) and family.gguf is not None, "a GGUF file"
    names = [name for name, one in ARCHITECTURES.items() if one is family]
    fields = family.gguf.read_config_fields(file.fields) | file.read_token_fields()
    return {"architectures": names[:1], **fields}


def read_checkpoint_fields(path: Any) -> dict[str, Any]:
    """The config.json of a checkpoint folder; weights are no longer quantized after training.

    Of a multimodal checkpoint whose text decoder alone is loaded, the decoder's config.json.
    """
    folder = path.parent if path.is_file() else path
    fields = read_config_file(folder)
    values = dict(fields.values)
    if find_text_decoder(fields) is not None:
        text = get_language_model_fields(fields)
        values = {**text.values, "architectures": read_architectures(fields)}
    values.pop("quantization_config", None)
    return values


def freeze_selection_biases(model: nn.Module) -> None:
    """Balancing sets the routers' correction biases; gradients don't reach them."""
    for module in model.modules():
        if isinstance(module, Router) and module.correction_bias is not None:
            module.correction_bias.requires_grad_(False)


# ---- initialization --------------------------------------------------------------------------------


@torch.no_grad()
def initialize(model: CausalLM, seed: int) -> None:
    """Set every parameter from its name and the seed."""
    num_layers = max(1, len(model.layers))
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            values = initial_values(module, full, tuple(parameter.shape), num_layers, seed)
            parameter.copy_(values.to(parameter.dtype))


def initial_values(
    module: nn.Module, name: str, shape: tuple[int, ...], num_layers: int, seed: int
) -> Tensor:
    """The first values of one parameter, float32 on the CPU."""
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    last = name.rpartition(".")[2]
    if isinstance(module, (RMSNorm, LayerNorm)):
        is_weight = last == "weight"
        return torch.full(shape, 1.0 - getattr(module, "offset", 0.0) if is_weight else 0.0)
    if isinstance(module, GatedDeltaNet):  # decay rates from slow to fast
        rates = torch.empty(shape).uniform_(1.0, 16.0, generator=generator)
        return rates.log() if last == "A_log" else torch.ones(shape)
    if len(shape) < 2 or last.endswith("bias"):
        return torch.zeros(shape)
    std = _weight_std(module, name, shape, num_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def _weight_std(module: nn.Module, name: str, shape: tuple[int, ...], num_layers: int) -> float:
    if isinstance(module, nn.Embedding) or name.startswith("lm_head."):
        return EMBEDDING_STD
    if isinstance(module, Router):
        return ROUTER_STD
    if isinstance(module, CausalConv):
        return float(shape[0] ** -0.5)
    std = float(shape[-1] ** -0.5)
    is_output = any(part in RESIDUAL_OUTPUTS for part in name.split("."))
    return std / math.sqrt(2 * num_layers) if is_output else std


def _seed_of(name: str, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
