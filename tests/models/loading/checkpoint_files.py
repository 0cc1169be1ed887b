"""Edits the files of a safetensors checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fulgurite.models.loading.safetensors_checkpoint import SINGLE_FILE


def replace_tensors(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite the checkpoint with some tensors replaced, added or, for None, removed."""
    state = load_file(folder / SINGLE_FILE)
    for name, tensor in tensors.items():
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / SINGLE_FILE)


def edit_config(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
