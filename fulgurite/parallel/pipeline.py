"""Pipeline parallelism of an engine: bytes of layers in, the layers of each stage and their links out.

    split = split_stages(layer_bytes, 2, first_bytes)    layers of each stage, balanced by bytes
    pipeline = Pipeline(mesh)                            links between the stages of a replica
    pipeline.receive(x)                                  hidden states of the stage before
    pipeline.send(y)                                     to the next one; the last sends to the first
    pipeline.finish()                                    once a step: all that was sent has arrived

The first stage has the embedding and the head, the last one the final norm:

    stage 0   embed, layers ─▶ stage 1   layers ─▶ .. ─▶ last stage   layers, norm ─┐
              head, sampling ◀── hidden states of the tokens that are sampled ──────┘

So hidden states go around a ring, and rank 0 samples as it does alone. The head on the last stage would
send logits instead, which are many times larger, and tied embeddings would be there twice.

A link is a process group of two ranks, and a message is its broadcast: unlike send and receive of
gloo, its wait can be given up in slices, so that a lost rank is noticed before the timeout.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fulgurite.errors import ArgumentError
from fulgurite.parallel.mesh import Mesh, make_group


@dataclass(frozen=True)
class PipelineStage:
    """Stage `index` of `count`: layers `start` to `stop` - 1."""

    index: int
    count: int
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def __contains__(self, layer: int) -> bool:
        return self.start <= layer < self.stop


def check_stages(num_stages: int, num_layers: int) -> None:
    """ArgumentError if some stage would have no layer."""
    if num_stages > num_layers:
        raise ArgumentError(
            f"pipeline={num_stages} stages, but the model has {num_layers} layers",
            next=f"use at most pipeline={num_layers}; tensor= shards every weight",
        )


def split_stages(
    layer_bytes: Sequence[int], num_stages: int, first_bytes: int = 0
) -> list[tuple[int, int]]:
    """The layers of each stage: first, and one after the last. The largest stage is as small as possible.

    `first_bytes` are on the first stage besides its layers. Every stage has at least one layer.
    """
    num_layers = len(layer_bytes)
    check_stages(num_stages, num_layers)
    totals = [0, *itertools.accumulate(layer_bytes)]
    # best[n]: the largest stage, the sum of squares and the ends of the stages so far, over n layers
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {
        n: (totals[n] + first_bytes, (totals[n] + first_bytes) ** 2, (n,))
        for n in range(1, num_layers + 1)
    }
    for stage in range(2, num_stages + 1):
        longer = {}
        for n in range(stage, num_layers + 1):
            longer[n] = min(
                (
                    max(best[m][0], totals[n] - totals[m]),
                    best[m][1] + (totals[n] - totals[m]) ** 2,
                    (*best[m][2], n),
                )
                for m in range(stage - 1, n)
            )
        best = longer
    ends = best[num_layers][2]
    return list(zip((0, *ends), ends, strict=False))


class Pipeline:
    """The links of this rank's stage: from the stage before, and to the next one, around a ring."""

    def __init__(self, mesh: Mesh) -> None:
        self.axis = mesh.pipeline
        ranks, index, count = self.axis.ranks, self.axis.index, self.axis.size
        self.previous_rank = ranks[index - 1]
        self.previous: dist.ProcessGroup | None = None
        self.next: dist.ProcessGroup | None = None
        assert self.axis.health is not None, "several ranks have a health monitor"
        # All ranks create all groups, in one order: torch.distributed requires it.
        for group in mesh.shape.groups("pipeline"):
            for stage in range(count):
                pair = [group[stage], group[(stage + 1) % count]]
                link = make_group(pair, self.axis.health, "link of two stages")
                if mesh.rank == pair[0]:
                    self.next = link
                if mesh.rank == pair[1]:
                    self.previous = link
        self.axis.health.counts_match = False
        self.replicas_share_experts = mesh.expert.size > mesh.context.size * mesh.tensor.size
        self.pending: list[tuple[Tensor, Any]] = []  # what is being sent, and its work handle

    def send(self, x: Tensor) -> None:
        """Start to send x to the next stage. Its memory must not change before `finish`."""
        if x.numel() == 0:
            return
        assert self.axis.health is not None, "several ranks have a health monitor"
        x, rank = x.contiguous(), self.axis.ranks[self.axis.index]
        try:
            work = dist.broadcast(x, rank, group=self.next, async_op=True)
        except RuntimeError as error:  # all backends of torch.distributed raise it
            raise self.axis.health.explain("pipeline send", error) from error
        self.pending.append((x, work))

    def receive(self, out: Tensor) -> None:
        """Fill a contiguous tensor with the next one that the stage before sent."""
        if out.numel():
            start = partial(
                dist.broadcast, out, self.previous_rank, group=self.previous, async_op=True
            )
            self._wait("pipeline receive", start, out)

    def finish(self) -> None:
        """Wait until the next stage has everything."""
        pending, self.pending = self.pending, []
        for x, work in pending:
            self._wait("pipeline send", lambda work=work: work, x)

    def _wait(self, label: str, start: Any, x: Tensor) -> None:
        assert self.axis.health is not None, "several ranks have a health monitor"
        self.axis.health.run_collective(label, start, on_host=x.device.type == "cpu")
