"""A decode step on fixed memory: one token each of `count` requests in, the logits of the next out.

Most steps are alike: so many requests, one token each. For each number of requests the tensors of
such a step are made once; a step writes its numbers into them and runs again without Python in
between: on a GPU a CUDA graph of the whole step; on a CPU a recording of the layers' native calls
(`fulgurite.replay`), with what is a torch op (the embedding, angles, the head) before and after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fulgurite import replay
from fulgurite.kernels.common.pdl_region import chain
from fulgurite.models.layers import Decoder
from fulgurite.models.rope import Rotation
from fulgurite.serve.engine.batch import Batch, extents
from fulgurite.serve.engine.block_tables import BlockTables
from fulgurite.serve.engine.kv_cache import PagedCache
from fulgurite.serve.engine.scheduler import Piece

WARMUPS = 2


class Graphs:
    """One pool of memory and one stream (which has a workspace of its own) for many CUDA graphs."""

    def __init__(self, device: torch.device) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)


class FixedStep:
    """The step of `count` requests; calling it gives the logits [count, O] of each.

    `graphs`: what the CUDA graphs of a runner, which never run at once, share.
    """

    def __init__(
        self,
        model: Decoder,
        cache: PagedCache,
        tables: BlockTables,
        count: int,
        graphs: Graphs | None = None,
    ) -> None:
        self.model, self.cache, self.tables = model, cache, tables
        self.count = count
        self.device = model.norm.weight.device
        groups, columns = len(tables.tables), tables.tables[0].shape[1]
        parts: Parts = {
            "token_ids": ((count,), torch.int64),
            "positions": ((count,), torch.int64),
            "extents": ((count,), torch.int64),
            "slots": ((groups, count), torch.int64),
            "lengths": ((count,), torch.int32),
            "tables": ((groups, count, columns), torch.int32),
        }
        size = sum(_room(shape, dtype) for shape, dtype in parts.values())
        on_gpu = self.device.type == "cuda"
        self.staged = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self.read = self.staged.to(self.device)
        # where a step writes its numbers, and where the model reads them: on a CPU the same
        self.host = {name: part.numpy() for name, part in _parts(self.staged, parts).items()}
        self.fixed = _parts(self.read, parts)
        self.host["lengths"][:] = self.host["extents"][:] = 1
        self.host["slots"][:] = -1
        self._send()
        self.batch = self._batch(columns)
        self.run = self._record() if graphs is None else self._capture(graphs)

    def __call__(self, pieces: Sequence[Piece]) -> Tensor:
        self._write(pieces)
        return self.run()[: len(pieces)]

    def _batch(self, columns: int) -> Batch:
        fixed = self.fixed
        return Batch(
            token_ids_T=fixed["token_ids"],
            positions_T=fixed["positions"],
            slots_GT=list(fixed["slots"]),
            tables_GSB=list(fixed["tables"]),
            starts_S=torch.arange(self.count + 1, dtype=torch.int32, device=self.device),
            lengths_S=fixed["lengths"],
            extents_T=fixed["extents"] if self.model.needs_extent else None,
            rows_R=None,
            max_count=1,
            max_length=columns * self.tables.block_size,
        )

    def _write(self, pieces: Sequence[Piece]) -> None:
        """The numbers of a step of up to `count` requests; the rest stays padding."""
        used, host, size = len(pieces), self.host, self.tables.block_size
        rows = np.array([request.row for request, _, _ in pieces])
        positions = host["positions"][:used]
        positions[:] = [start for _, start, _ in pieces]
        host["token_ids"][:used] = [request.tokens[start] for request, start, _ in pieces]
        host["lengths"][:used] = positions + 1
        host["slots"][:, used:] = -1
        host["lengths"][used:] = 1
        for group, table in enumerate(self.tables.tables):
            np.take(table, rows, axis=0, out=host["tables"][group, :used], mode="clip")
            blocks = table[rows, positions // size]
            host["slots"][group, :used] = blocks.astype(np.int64) * size + positions % size
        if self.model.needs_extent:
            found = extents(pieces, self.model.stale_after)
            host["extents"][:used] = np.maximum(found, positions + 1)
        self._send()

    def _send(self) -> None:
        """The numbers to the device, in one copy."""
        if self.read is not self.staged:
            self.read.copy_(self.staged, non_blocking=True)

    def _begin(self) -> tuple[Tensor, list[Rotation]]:
        self.cache.begin(self.batch)
        return self.model.begin(self.fixed["token_ids"], self.fixed["positions"], self.cache)

    def _layers(self, x_TD: Tensor, rotations: Sequence[Rotation]) -> Tensor:
        return self.model.run_layers(x_TD, self.fixed["positions"], rotations, self.cache)

    def _record(self) -> Callable[[], Tensor]:
        held_TD, turned = self._begin()
        held_TD = held_TD.clone()
        turned = [Rotation(one.cos.clone(), one.sin.clone()) for one in turned]
        recorded = replay.record(self._layers, held_TD, turned, warmups=WARMUPS)

        def run() -> Tensor:
            x_TD, rotations = self._begin()
            held_TD.copy_(x_TD)
            for held, new in zip(turned, rotations, strict=True):
                held.cos.copy_(new.cos)
                held.sin.copy_(new.sin)
            return self.model.logits(recorded())

        return run

    def _capture(self, graphs: Graphs) -> Callable[[], Tensor]:
        def step() -> Tensor:
            with chain():
                return self.model.logits(self._layers(*self._begin())).float()

        graphs.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(graphs.stream):
            for _ in range(WARMUPS):
                step()
        torch.cuda.current_stream(self.device).wait_stream(graphs.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=graphs.pool, stream=graphs.stream):
            logits = step()

        def run() -> Tensor:
            graph.replay()
            return logits

        return run


Parts = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def _parts(buffer: Tensor, parts: Parts) -> dict[str, Tensor]:
    """Tensors one behind the other in a buffer of bytes."""
    found, start = {}, 0
    for name, (shape, dtype) in parts.items():
        used = math.prod(shape) * dtype.itemsize
        found[name] = buffer[start : start + used].view(dtype).view(shape)
        start += _room(shape, dtype)
    return found


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes up to the next part: each begins at a multiple of 16, as kernels like it."""
    return -(-math.prod(shape) * dtype.itemsize // 16) * 16
