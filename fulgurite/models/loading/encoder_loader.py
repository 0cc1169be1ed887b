"""Loads encoders: a checkpoint folder in, an `Encoder` with its weights out."""

from __future__ import annotations

from pathlib import Path

import torch

from fulgurite.errors import WeightsError
from fulgurite.models.config import ConfigFields
from fulgurite.models.encoder import Encoder
from fulgurite.models.families.encoders import IGNORED, PREFIXES, map_names, read_encoder_config
from fulgurite.models.loading.safetensors_checkpoint import SafetensorsCheckpoint
from fulgurite.models.loading.skip_init import SkipInitialization


@torch.no_grad()
def load_encoder(
    path: Path, fields: ConfigFields, dtype: torch.dtype | None, device: torch.device
) -> Encoder:
    """The encoder of a folder. `dtype`: None is the checkpoint's."""
    config = read_encoder_config(fields)
    with torch.device("meta"), SkipInitialization():
        model = Encoder(config).to(dtype or config.dtype)
    source = SafetensorsCheckpoint(path)
    try:
        _fill(model, source, path)
    finally:
        source.close()
    return model.to(device).requires_grad_(False).eval()


def _fill(model: Encoder, source: SafetensorsCheckpoint, path: Path) -> None:
    parameters = dict(model.named_parameters())
    targets = map_names(model.config.num_layers)
    names = {_strip_prefix(name): name for name in source.entries()}
    missing = [name for name in targets if name not in names]
    unexpected = [name for name in names if name not in targets and not name.startswith(IGNORED)]
    mismatched = [
        f"{name}: shape {list(source.entries()[names[name]].shape)}, "
        f"{target} needs {list(parameters[target].shape)}"
        for name, target in targets.items()
        if name in names and source.entries()[names[name]].shape != parameters[target].shape
    ]
    if missing or unexpected or mismatched:
        raise WeightsError(
            f"the checkpoint does not match the {model.config.family} architecture",
            where=str(path),
            missing="\n".join(missing),
            unexpected="\n".join(unexpected),
            mismatched="\n".join(mismatched),
            next="check that config.json belongs to these weights",
        )
    state = {
        target: source.read_tensor(names[name]).to(parameters[target].dtype, copy=True)
        for name, target in targets.items()
    }
    model.load_state_dict(state, assign=True)


def _strip_prefix(name: str) -> str:
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
        "LayerNorm.beta", "LayerNorm.bias"
    )
