"""The functions that ranks run in test_load_shard.py: load a shard, against sharding the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulgurite.models import load_checkpoint, load_shard, open_checkpoint
from fulgurite.models.families.registry import get_sharding_rules
from fulgurite.models.loading.checkpoint import TensorSource
from fulgurite.models.loading.checkpoint_tensor import CheckpointTensor
from fulgurite.models.loading.checkpoint_tensor import Shape as Sizes
from fulgurite.parallel import Placement, parallelize
from fulgurite.quant import QuantTensor
from tests.parallel.model_cases import Shape, mesh_of


class BytesRead(TorchDispatchMode):
    """The tensors of a checkpoint, and a count of their bytes that operators read: views read nothing."""

    def __init__(self, files: TensorSource) -> None:
        super().__init__()
        self.files = files
        self.total = self.read_bytes = 0
        self.touched: dict[int, Tensor] = {}  # a mapped tensor's address -> which of its bytes

    def shapes(self) -> dict[str, Sizes]:
        return self.files.shapes()

    def iter_tensors(self) -> Iterator[CheckpointTensor]:
        self.total = 0
        for stored in self.files.iter_tensors():
            parts = plain(stored.data)
            self.touched = {address(part): torch.zeros(part.nbytes) for part in parts}
            self.total += sum(part.nbytes for part in parts)
            yield stored
            self.read_bytes += sum(int(bytes.sum()) for bytes in self.touched.values())
            self.touched = {}

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
