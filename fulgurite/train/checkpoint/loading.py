"""Loading: DCP's files into a state of any sharding, and into plain tensors without a model.

In: the folder of a checkpoint. Out: `load_into` fills a nested state in place; `read_checkpoint` returns
one of full tensors on the CPU.

Names, shapes and dtypes must be the same on both sides: a value that only one side has is an error, so
that nothing starts from its initial value unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    FileSystemReader,
    Metadata,
)
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from fulgurite.train.checkpoint.errors import CheckpointError, describe_failure
from fulgurite.train.checkpoint.ranks import SaveRanks
from fulgurite.train.checkpoint.state import flatten, iterate_leaves


class FlatLoadPlanner(DefaultLoadPlanner):
    """Reads flat leaves; calls `on_item` before each of them."""

    def __init__(self, on_item: Callable[[], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.on_item = on_item

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        self.on_item()
        tensor: Tensor = super().lookup_tensor(index)
        return tensor


def _do_nothing() -> None:
    """No hook."""


def load_into(
    path: Path,
    state: dict[str, Any],
    ranks: SaveRanks,
    on_item: Callable[[], None] = _do_nothing,
) -> None:
    """Load a verified checkpoint into the tensors of a state; replace its other values."""
    leaves = flatten(state)
    metadata = FileSystemReader(path).read_metadata()
    names = {name for found in ranks.run_on_all(lambda: list(leaves)) for name in found}
    ranks.run_on_all(lambda: check_matches(path, leaves, names, metadata))
    _run_dcp_load(path, leaves, ranks, on_item)
    for name, container, key in list(iterate_leaves(state)):
        if not isinstance(container[key], Tensor):
            container[key] = leaves[name]


def _run_dcp_load(
    path: Path, leaves: dict[str, Any], ranks: SaveRanks, on_item: Callable[[], None]
) -> None:
    try:
        with torch.no_grad():
            dcp.load(
                leaves,
                storage_reader=FileSystemReader(path),
                planner=FlatLoadPlanner(on_item),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:  # DCP's own, not an Exception
        text, _is_storage = describe_failure(error, ranks.rank)
        raise CheckpointError(f"{path} can't be loaded: {text}") from error


def check_matches(path: Path, leaves: dict[str, Any], names: set[str], metadata: Metadata) -> None:
    """Raise an error that names the first values that differ between a state and a checkpoint."""
    saved = metadata.state_dict_metadata
    missing, unknown = names - saved.keys(), saved.keys() - names
    if missing or unknown:
        raise CheckpointError(
            f"{path} is of another model or optimizer"
            + (f"; it lacks {_name_some(missing)}" if missing else "")
            + (f"; it also has {_name_some(unknown)}" if unknown else ""),
            next="resume with the configuration of the run (its config.toml), or start another run",
        )
    for name, value in leaves.items():
        expected, found = _describe(value), _describe(saved[name])
        if expected != found:
            raise CheckpointError(
                f"{path}: {name} is {found}, and the run has {expected}",
                next="resume with the configuration of the run (its config.toml)",
            )


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, TensorStorageMetadata):
        return f"{value.properties.dtype} {tuple(value.size)}"
    return "no tensor"


def _name_some(names: Iterable[str], limit: int = 3) -> str:
    listed = sorted(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + rest


def read_checkpoint(path: Path, prefix: str = "") -> dict[str, Any]:
    """All values of a checkpoint whose names start with `prefix`: a flat dict, full CPU tensors."""
    metadata = FileSystemReader(path).read_metadata()
    leaves: dict[str, Any] = {}
    for name, saved in metadata.state_dict_metadata.items():
        if name.startswith(prefix):
            is_tensor = isinstance(saved, TensorStorageMetadata)
            leaves[name] = (
                torch.empty(saved.size, dtype=saved.properties.dtype) if is_tensor else None
            )
    _run_dcp_load(path, leaves, SaveRanks(0, 1), _do_nothing)
    return leaves
