"""The folder of an export: named tensors and fields in, files that are whole or not there out.

Files go to a temporary folder beside the output, are synced to disk, and the folder is renamed. Rank 0
alone writes.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch.distributed as dist
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.files import share
from fulgurite.models.loading.safetensors_checkpoint import INDEX_FILE
from fulgurite.models.tokenizer import TEMPLATE_FOLDER

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
T = TypeVar("T")


class FolderWriter:
    """Writes into a temporary folder; `finish` renames it. Leaving the `with` block removes it."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder: Path | None = None
        self.weight_map: dict[str, str] = {}
        self.num_bytes = 0

    def __enter__(self) -> FolderWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def write_weights(self, file: str, content: Mapping[str, Tensor]) -> None:
        path = self._make_folder() / file
        try:
            safetensors.torch.save_file(dict(content), str(path), metadata={"format": "pt"})
            share(path)
        except safetensors.SafetensorError as error:  # what a full disk is here
            raise OSError(f"{path} can't be written: {error}") from error
        self.weight_map |= dict.fromkeys(content, file)
        self.num_bytes += sum(tensor.nbytes for tensor in content.values())

    def finish(self, fields: Mapping[str, Any], tokenizer: Path | None) -> None:
        """Write everything but the weights, and rename the folder."""
        folder = self._make_folder()
        write_json(folder / "config.json", fields)
        if len(set(self.weight_map.values())) > 1:
            metadata = {"total_size": self.num_bytes}
            write_json(folder / INDEX_FILE, {"metadata": metadata, "weight_map": self.weight_map})
        _copy_tokenizer(tokenizer, folder, fields)
        for file in folder.rglob("*"):
            _sync(file)
        _sync(folder)
        with contextlib.suppress(FileNotFoundError):
            self.output.rmdir()  # an empty folder; one that is not empty is an error here
        folder.rename(self.output)
        self.folder = None
        _sync(self.output.parent)

    def _make_folder(self) -> Path:
        if self.folder is None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            prefix = f".{self.output.name}.partial-"
            self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=self.output.parent))
            self.folder.chmod(0o755)
        return self.folder


def _copy_tokenizer(tokenizer: Path | None, folder: Path, fields: Mapping[str, Any]) -> None:
    """Copy tokenizer files; the token ids of the fields are a generation_config.json if none is."""
    if tokenizer is not None:
        for name in TOKENIZER_FILES:
            if (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, folder / name)
        if (tokenizer / TEMPLATE_FOLDER).is_dir():
            shutil.copytree(tokenizer / TEMPLATE_FOLDER, folder / TEMPLATE_FOLDER)
    if not (folder / "generation_config.json").exists():
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {name: fields[name] for name in names if fields.get(name) is not None}
        write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_output(output: Path) -> None:
    """Raise if the output is there already, unless it is an empty folder."""
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise ArgumentError(
            f"{output} already exists", next="remove it, or choose another output folder"
        )


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- ranks ---------------------------------------------------------------------------------------


def is_writer() -> bool:
    return not _has_ranks() or dist.get_rank() == 0


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def run_on_every_rank(action: Callable[[], T]) -> T:
    """Run it; if it fails on some rank, raise on every rank."""
    failure: Exception | None = None
    try:
        result = action()
    except (ArgumentError, OSError) as error:
        failure = error
    if _has_ranks():
        messages: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(messages, None if failure is None else str(failure))
        others = [f"rank {rank}: {text}" for rank, text in enumerate(messages) if text]
        if failure is None and others:
            raise ArgumentError(f"the export failed on another rank: {others[0]}")
    if failure is not None:
        raise failure
    return result
