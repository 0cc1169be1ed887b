"""The functions that ranks run in test_load_shard.py: load a shard, against sharding the whole model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulgurite.models import load_checkpoint, load_shard, open_checkpoint
from fulgurite.models.families.registry import get_sharding_rules
from fulgurite.models.loading.checkpoint import TensorSource
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor, TensorEntry
from fulgurite.parallel import Placement, parallelize
from fulgurite.quant import QuantTensor
from tests.parallel.model_cases import Shape, mesh_of


class BytesRead(TorchDispatchMode):
    """The tensors of a checkpoint, and a count of their bytes that operators read: views read nothing."""

    def __init__(self, files: TensorSource) -> None:
        super().__init__()
        self.files = files
        self.loaded: dict[str, CheckpointTensor] = {}
        self.touched: dict[int, Tensor] = {}  # a mapped tensor's address -> which of its bytes

    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor; its bytes are counted once it is loaded."""
        entries = self.files.entries().items()
        return {name: replace(entry, load=partial(self._load, entry)) for name, entry in entries}

    def get_tensor(self, name: str) -> CheckpointTensor:
        return self.files.get_tensor(name)

    def close(self) -> None:
        self.files.close()

    def _load(self, entry: TensorEntry) -> CheckpointTensor:
        if entry.name not in self.loaded:
            self.loaded[entry.name] = stored = entry.load()
            for part in plain(stored.data):
                self.touched[address(part)] = torch.zeros(part.nbytes)
        return self.loaded[entry.name]

    @property
    def read_bytes(self) -> int:
        return sum(int(bytes.sum()) for bytes in self.touched.values())

    @property
    def total(self) -> int:
        parts = (
            part for entry in self.files.entries().values() for part in plain(entry.load().data)
        )
        return sum(part.nbytes for part in parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, QuantTensor) for leaf in leaves):
            return NotImplemented  # it comes by again, in its parts
        result = func(*args, **(kwargs or {}))
        if not func.is_view and not (isinstance(result, Tensor) and result.is_meta):
            for leaf in leaves:
                self._touch(leaf)
        return result

    def _touch(self, leaf: object) -> None:
        if not isinstance(leaf, Tensor) or (bytes := self.touched.get(address(leaf))) is None:
            return
        size = leaf.itemsize
        strides = (*(stride * size for stride in leaf.stride()), 1)
        bytes.as_strided((*leaf.shape, size), strides, leaf.storage_offset() * size).fill_(1)


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def plain(tensor: Tensor) -> list[Tensor]:
    return [tensor.packed, *tensor.scales.values()] if isinstance(tensor, QuantTensor) else [tensor]


@dataclass(frozen=True)
class Compared:
    """The parameters that differ; bytes read and bytes held, as fractions of the file."""

    wrong: list[str]
    read: float
    held: float
    packed: int


def compare(
    folder: Path, shape: Shape, keep_quantized: bool, placement: Placement | None = None
) -> Compared:
    mesh = mesh_of(shape)
    checkpoint = open_checkpoint(folder)
    whole = load_checkpoint(checkpoint, dtype=None, device="cpu", keep_quantized=keep_quantized)
    wanted = parallelize(whole, mesh, get_sharding_rules(checkpoint.config), placement=placement)
    counter = BytesRead(checkpoint.source)
    with counter:
        found, shares = load_shard(
            replace(checkpoint, source=counter),
            mesh,
            keep_quantized=keep_quantized,
            placement=placement,
        )
    assert str(shares) == str(wanted) and shares.gradients.axes == wanted.gradients.axes
    ours, theirs = dict(found.named_parameters()), dict(whole.named_parameters())
    assert [*ours] == [*theirs]
    wrong = [name for name in ours if not same(ours[name], theirs[name])]
    held = sum(parameter.nbytes for parameter in ours.values())
    packed = sum(isinstance(parameter, QuantTensor) for parameter in ours.values())
    return Compared(wrong, counter.read_bytes / counter.total, held / counter.total, packed)


def same(ours: Tensor, theirs: Tensor) -> bool:
    same_kind = type(ours) is type(theirs) and ours.requires_grad == theirs.requires_grad
    return same_kind and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
