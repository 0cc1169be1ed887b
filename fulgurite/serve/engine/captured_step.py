"""A captured decode step: one token of each of `batch_size` requests in, their next logits out.

The input tensors of a decode step are allocated once for each batch size. A step writes its inputs
there and replays the captured work without Python in between:

    GPU   a CUDA graph of the whole step
    CPU   a recording of the layers' native calls (`fulgurite.replay`); the torch ops before and
          after it (embedding, rotary angles, head) run eagerly
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fulgurite import replay
from fulgurite.cudagraph import GraphPool, capture_graph
from fulgurite.kernels.common.pdl import pdl_region
from fulgurite.models.layers import CausalLM
from fulgurite.models.rope import RotaryCosSin
from fulgurite.serve.engine.batch import InputBatch, rope_seq_lens
from fulgurite.serve.engine.block_manager import BlockManager
from fulgurite.serve.engine.kv_cache import PagedKVCache
from fulgurite.serve.engine.scheduler import ScheduledChunk

WARMUPS = 2
BufferLayout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


class CapturedDecodeStep:
    """The decode step of `batch_size` requests; a call returns their logits [batch_size, O].

    `graph_pool`: the memory that all CUDA graphs of a runner share; None on a CPU.
    """

    def __init__(
        self,
        model: CausalLM,
        kv_cache: PagedKVCache,
        block_manager: BlockManager,
        batch_size: int,
        graph_pool: GraphPool | None = None,
    ) -> None:
        self.model, self.kv_cache, self.block_manager = model, kv_cache, block_manager
        self.batch_size = batch_size
        self.device = model.norm.weight.device
        tables = block_manager.block_tables
        groups, columns = len(tables), tables[0].shape[1]
        layout: BufferLayout = {
            "token_ids": ((batch_size,), torch.int64),
            "positions": ((batch_size,), torch.int64),
            "rope_seq_lens": ((batch_size,), torch.int64),
            "slot_mapping": ((groups, batch_size), torch.int64),
            "seq_lens": ((batch_size,), torch.int32),
            "block_tables": ((groups, batch_size, columns), torch.int32),
        }
        size = sum(_aligned_bytes(shape, dtype) for shape, dtype in layout.values())
        on_gpu = self.device.type == "cuda"
        # A step writes its inputs on the host; the model reads them on the device (same on a CPU).
        self.host_buffer = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self.device_buffer = self.host_buffer.to(self.device)
        host_tensors = _split_buffer(self.host_buffer, layout)
        self.host_inputs = {name: tensor.numpy() for name, tensor in host_tensors.items()}
        self.inputs = _split_buffer(self.device_buffer, layout)
        self.host_inputs["seq_lens"][:] = self.host_inputs["rope_seq_lens"][:] = 1
        self.host_inputs["slot_mapping"][:] = -1
        self._copy_to_device()
        self.batch = self._make_batch(columns)
        self.replay = (
            self._record_native_calls()
            if graph_pool is None
            else self._capture_cuda_graph(graph_pool)
        )

    def __call__(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        self._write_inputs(chunks)
        return self.replay()[: len(chunks)]

    def _make_batch(self, columns: int) -> InputBatch:
        inputs, size = self.inputs, self.batch_size
        return InputBatch(
            token_ids_T=inputs["token_ids"],
            positions_T=inputs["positions"],
            slot_mapping_GT=list(inputs["slot_mapping"]),
            block_tables_GSB=list(inputs["block_tables"]),
            query_start_loc_S=torch.arange(size + 1, dtype=torch.int32, device=self.device),
            seq_lens_S=inputs["seq_lens"],
            rope_seq_lens_T=inputs["rope_seq_lens"] if self.model.needs_sequence_lengths else None,
            logit_rows_R=None,
            max_query_len=1,
            max_seq_len=columns * self.block_manager.block_size,
        )

    def _write_inputs(self, chunks: Sequence[ScheduledChunk]) -> None:
        """Write the inputs of up to `batch_size` requests; the remaining rows are padding."""
        used, host, size = len(chunks), self.host_inputs, self.block_manager.block_size
        rows = np.array([request.block_table_row for request, _, _ in chunks])
        positions = host["positions"][:used]
        positions[:] = [start for _, start, _ in chunks]
        host["token_ids"][:used] = [request.tokens[start] for request, start, _ in chunks]
        host["seq_lens"][:used] = positions + 1
        host["slot_mapping"][:, used:] = -1
        host["seq_lens"][used:] = 1
        for group, table in enumerate(self.block_manager.block_tables):
            np.take(table, rows, axis=0, out=host["block_tables"][group, :used], mode="clip")
            blocks = table[rows, positions // size]
            host["slot_mapping"][group, :used] = blocks.astype(np.int64) * size + positions % size
        if self.model.needs_sequence_lengths:
            lengths = rope_seq_lens(chunks, self.model.recompute_after)
            host["rope_seq_lens"][:used] = np.maximum(lengths, positions + 1)
        self._copy_to_device()

    def _copy_to_device(self) -> None:
        """Copy all inputs at once."""
        if self.device_buffer is not self.host_buffer:
            self.device_buffer.copy_(self.host_buffer, non_blocking=True)

    def _embed(self) -> tuple[Tensor, list[RotaryCosSin]]:
        self.kv_cache.set_batch(self.batch)
        return self.model.embed(self.inputs["token_ids"], self.inputs["positions"], self.kv_cache)

    def _run_layers(self, x_TD: Tensor, cos_sin: Sequence[RotaryCosSin]) -> Tensor:
        return self.model.run_layers(x_TD, self.inputs["positions"], cos_sin, self.kv_cache)

    def _record_native_calls(self) -> Callable[[], Tensor]:
        x_TD, cos_sin = self._embed()
        static_x_TD = x_TD.clone()
        static_cos_sin = [RotaryCosSin(pair.cos.clone(), pair.sin.clone()) for pair in cos_sin]
        layers = replay.record(self._run_layers, static_x_TD, static_cos_sin, warmups=WARMUPS)

        def run() -> Tensor:
            x_TD, cos_sin = self._embed()
            static_x_TD.copy_(x_TD)
            for static, new in zip(static_cos_sin, cos_sin, strict=True):
                static.cos.copy_(new.cos)
                static.sin.copy_(new.sin)
            return self.model.compute_logits(layers())

        return run

    def _capture_cuda_graph(self, graph_pool: GraphPool) -> Callable[[], Tensor]:
        def step() -> Tensor:
            with pdl_region():
                return self.model.compute_logits(self._run_layers(*self._embed())).float()

        graph = capture_graph(
            step, pool=graph_pool.handle, stream=graph_pool.stream, warmups=WARMUPS
        )
        return graph.replay


def _split_buffer(buffer: Tensor, layout: BufferLayout) -> dict[str, Tensor]:
    """Views of one byte buffer, one tensor after another."""
    tensors, start = {}, 0
    for name, (shape, dtype) in layout.items():
        used = math.prod(shape) * dtype.itemsize
        tensors[name] = buffer[start : start + used].view(dtype).view(shape)
        start += _aligned_bytes(shape, dtype)
    return tensors


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor, rounded up so that the next one is 16-byte aligned."""
    return -(-math.prod(shape) * dtype.itemsize // 16) * 16
