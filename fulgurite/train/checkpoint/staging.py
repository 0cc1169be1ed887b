"""Staging: tensors to host buffers in the training thread, and the plan to write them from there.

In: the leaves of a state. Out: `StagedState`: host tensors, pickled-later values and DCP's save plan.

Buffers are pinned if the tensors are on a GPU, and reused by the next save. The training thread does
not wait for copies from a GPU. They are queued on the current stream, so they precede the next update
of the weights; or, with `overlaps`, on a stream of their own, beside forward and backward of the next
step: then the next update must wait (`StagedState.order_update`). The writing thread never touches the
live tensors.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, Metadata, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from fulgurite.train.checkpoint.errors import CheckpointError
from fulgurite.train.checkpoint.state import tensor_bytes


@dataclass(frozen=True)
class StagedState:
    """What one save writes.

    Attributes:
        plan: DCP's list of what this rank holds: names, offsets, sizes.
        values: host tensors and other values, by name.
        copied: recorded behind the copies from the GPU; None on a CPU.
    """

    plan: SavePlan
    values: dict[str, Any]
    copied: torch.cuda.Event | None

    @property
    def num_bytes(self) -> int:
        return sum(v.nbytes for v in self.values.values() if isinstance(v, Tensor))

    def wait_for_copies(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()

    def order_update(self) -> None:
        """Let what the current stream does from now on wait for the copies; the host does not."""
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)


class HostBuffers:
    """One host tensor for each tensor of the state, allocated once.

    `overlaps`: copy on a stream of their own; somebody calls `order_update` before the next update.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self.overlaps = False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def allocate(self, leaves: dict[str, Any]) -> None:
        """Make all buffers and touch their pages, so that the first save does not wait for it."""
        for name, value in leaves.items():
            if isinstance(value, Tensor):
                self._buffer(name, _local(value)).zero_()

    def stage(self, leaves: dict[str, Any]) -> StagedState:
        """Copy all leaves. The buffers must not be in use by an earlier save."""
        plan = create_default_local_save_plan(leaves, is_coordinator=False)
        self._drop_unused(leaves)
        device = next((v.device for v in leaves.values() if _is_on_gpu(v)), None)
        with self._copying(device):
            values = {name: self._copy(name, value) for name, value in leaves.items()}
            return StagedState(plan, values, None if device is None else _record_event(device))

    def _copy(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        local = _local(value).detach()
        if local.is_cuda and self.overlaps:  # a temporary one must live until it is copied
            local.record_stream(torch.cuda.current_stream(local.device))
        return self._buffer(name, local).copy_(local, non_blocking=True)

    def _copying(self, device: torch.device | None) -> AbstractContextManager[Any]:
        """The stream of the copies, which begin after what is queued now."""
        if device is None or not self.overlaps:
            return nullcontext()
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))
        stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(stream)

    def _buffer(self, name: str, local: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != local.shape or buffer.dtype != local.dtype:
            buffer = torch.empty(local.shape, dtype=local.dtype, pin_memory=local.is_cuda)
            self._buffers[name] = buffer
        return buffer

    def _drop_unused(self, leaves: dict[str, Any]) -> None:
        for name in [name for name in self._buffers if name not in leaves]:
            del self._buffers[name]


def _is_on_gpu(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _record_event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class StagedPlanner(DefaultSavePlanner):
    """Plans with the names and offsets of a staged state; data come from its host buffers.

    Ranks that hold the same piece must hold the same bytes: DCP writes only one of them. So each plan
    carries a checksum of every tensor, and the coordinator compares them.
    """

    def __init__(self, staged: StagedState, ranks: int, on_item: Callable[[], None]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.staged, self.ranks, self.on_item = staged, ranks, on_item

    def create_local_plan(self) -> SavePlan:
        checksums = _compute_checksums(self.staged) if self.ranks > 1 else {}
        self.plan = replace(self.staged.plan, planner_data=checksums)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        check_replicas(all_plans)
        return super().create_global_plan([replace(plan, planner_data=None) for plan in all_plans])

    def lookup_object(self, index: MetadataIndex) -> Any:
        self.on_item()
        return self.staged.values[index.fqn]


def _compute_checksums(staged: StagedState) -> dict[MetadataIndex, int]:
    return {
        item.index: zlib.crc32(tensor_bytes(staged.values[item.index.fqn]))
        for item in staged.plan.items
        if item.tensor_data is not None
    }


def check_replicas(plans: list[SavePlan]) -> None:
    """Raise an error if two ranks hold different bytes, shapes or dtypes under one name and offset."""
    holders: dict[MetadataIndex, tuple[int, Any]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            data = item.tensor_data
            checksum = (plan.planner_data or {}).get(item.index)
            identity = (data.chunk.sizes, data.size, data.properties.dtype, checksum)
            first_rank, first = holders.setdefault(item.index, (rank, identity))
            if first != identity:
                raise CheckpointError(
                    f"{item.index.fqn} differs between rank {first_rank} and rank {rank}",
                    next="replicas must be equal; a tensor whose ranks hold different parts must be "
                    "a DTensor, or have a name of its own on each rank",
                )
