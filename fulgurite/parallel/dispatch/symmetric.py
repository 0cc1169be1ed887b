"""The symmetric-memory dispatcher: kernels write tokens directly into other ranks' memory.

In: memory that every rank of the axis can address. Out: a `TokenDispatcher` that never waits for the
host, so a step with it can be captured as a CUDA graph. For training, symmetric_gradients.py combines
two of them. The memory plan runs the same class on the meta device, without its kernels
(plan/meta_dispatch.py).

    pending    = dispatcher.start_dispatch(x, slots, P, w)
    dispatched = dispatcher.finish_dispatch(pending)
    dispatcher.start_combine(y, dispatched)
    out        = dispatcher.finish_combine(dispatched)       combine() is both

Between start and finish, work that needs no other rank (a shared expert, the next layer's norm) overlaps
with the transfer. Two steps may be in flight at once, since buffers are double-buffered.

Shapes on the device must not depend on the routes, so most rows are padding, which the experts skip. If
all ranks know the largest number of tokens of a step (`set_step_tokens`), C is that number. Otherwise it is
the capacity.

Errors on the device are written to `status` there. `check()` reads it on the host and raises. Call it
once a step, where the host waits anyway. Until then nothing is overwritten and nothing hangs.

Memory comes from symmetric/memory.py: `DispatchConfig.size_buffers` says how much.

Shapes: T tokens; k experts of a token; W ranks; C rows from one rank to another; V = min(k, experts of
a rank); S = W C V assignments, most of them padding; D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fulgurite.errors import ArgumentError, CapacityError, RankError
from fulgurite.kernels.common.triton_counters import acquire_counters
from fulgurite.kernels.common.triton_pdl import pdl_options
from fulgurite.kernels.dispatch import triton_dispatch as kernels
from fulgurite.kernels.dispatch.buffers import NUM_BUFFERS, DispatchConfig
from fulgurite.kernels.dispatch.wire_format import WireFormat
from fulgurite.kernels.integer_math import cdiv, next_power_of_2
from fulgurite.kernels.tuning.heuristics import heuristics_for
from fulgurite.parallel.dispatch.dispatcher import DispatchedTokens
from fulgurite.parallel.mesh import Axis
from fulgurite.parallel.symmetric.memory import SymmetricBuffer, allocate_symmetric_buffer
from fulgurite.quant import QuantTensor

MAX_POLLS = 1 << 26  # of a flag before a rank counts as lost: about 30 s on an H200
COMBINE_FORMATS = ("bf16", "f16", "f32")


@dataclass(frozen=True, eq=False)
class PendingDispatch:
    """A step in flight. `step` is its number on the device, so that a captured graph counts on."""

    x_TD: Tensor
    row_index_TW: Tensor  # row of a token among those sent to a rank; -1: not sent there
    step: Tensor
    rows: int  # C, the most rows from one rank to another in this step


@dataclass(frozen=True, eq=False)
class SymmetricHandle:
    pending: PendingDispatch
    counts_W: Tensor


class SymmetricMemoryDispatcher:
    """Device-side dispatch and combine over the ranks of an axis."""

    can_capture = can_capture_step = True  # nothing waits for the host

    def __init__(
        self,
        axis: Axis,
        config: DispatchConfig,
        buffer: SymmetricBuffer,
        max_polls: int = MAX_POLLS,
    ) -> None:
        if config.combine_format not in COMBINE_FORMATS:
            raise ArgumentError(
                f"combine_format can't be {config.combine_format!r}",
                next=f"one of {', '.join(COMBINE_FORMATS)}",
            )
        self.axis, self.config, self.buffer, self.max_polls = axis, config, buffer, max_polls
        self.buffers = config.size_buffers(axis.size)
        self.dispatch_wire = WireFormat(config.dispatch_format, config.hidden_size)
        self.combine_wire = WireFormat(config.combine_format, config.hidden_size)
        device = buffer.data.device
        self.step = torch.zeros(1, dtype=torch.int32, device=device)
        self.status = torch.zeros(2, dtype=torch.int32, device=device)
        self.in_flight = 0
        self.step_tokens: int | None = None
        self.heuristics = heuristics_for(device)
        self.send_config = self.heuristics.dispatch_row(self.dispatch_wire.row_bytes // 4)
        self.receive_config = self.heuristics.dispatch_row(config.hidden_size)
        self.combine_config = self.heuristics.dispatch_combine(config.hidden_size)
        # The layout of one of the two buffers: headers, rows, returns, flags.
        inbox_rows = axis.size * self.buffers.rows
        self.rows_offset = inbox_rows * self.buffers.header_bytes
        self.returns_offset = self.rows_offset + inbox_rows * self.dispatch_wire.row_bytes
        self.flags_offset = self.returns_offset + self.buffers.return_bytes // NUM_BUFFERS
        self.buffer_bytes = self.buffers.total_bytes // NUM_BUFFERS
        if buffer.data.numel() < self.buffers.total_bytes:
            raise ArgumentError(
                f"the buffer has only {buffer.data.numel()} bytes", next=str(self.buffers)
            )

    @classmethod
    def create(
        cls, axis: Axis, config: DispatchConfig, device: torch.device
    ) -> SymmetricMemoryDispatcher:
        """A dispatcher with a buffer of its own; a collective call."""
        size = config.num_bytes(axis.size)
        return cls(axis, config, allocate_symmetric_buffer(axis, size, device))

    def set_step_tokens(self, count: int | None) -> None:
        self.step_tokens = count

    @property
    def _step_rows(self) -> int:
        """C: the most rows from one rank to another in the next step, equal on all ranks."""
        rows = self.buffers.rows
        return rows if self.step_tokens is None else min(rows, max(self.step_tokens, 1))

    # ---- dispatch and combine ----------------------------------------------------------------------

    def start_dispatch(
        self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int, weights_Tk: Tensor
    ) -> PendingDispatch:
        """Write the rows of all tokens into the inboxes of their ranks."""
        self._check_inputs(x_TD, slots_Tk, num_slots)
        self.in_flight += 1
        size, tokens, device = self.axis.size, x_TD.shape[0], x_TD.device
        row_index_TW = torch.empty(tokens, size, dtype=torch.int32, device=device)
        counts_W, step = torch.empty(size + 1, dtype=torch.int32, device=device).split([size, 1])
        pending = PendingDispatch(x_TD, row_index_TW, step, self._step_rows)
        slots_Tk, weights_Tk = slots_Tk.contiguous(), weights_Tk.contiguous()
        self._send_rows(pending, self.dispatch_wire.pack(x_TD), slots_Tk, weights_Tk, counts_W)
        return pending

    def finish_dispatch(self, pending: PendingDispatch, keep_fp8: bool = False) -> DispatchedTokens:
        """Wait for the rows of all ranks and dequantize them, unless they are in FP8 and stay so."""
        device, dtype = pending.x_TD.device, pending.x_TD.dtype
        counts_W = torch.empty(self.axis.size, dtype=torch.int32, device=device)
        self._wait_flags(pending.step, counts_W, is_combine=False)
        count = self.axis.size * pending.rows * self.buffers.experts_per_row
        keep_fp8 = keep_fp8 and self.config.dispatch_format == "fp8"
        num_scales = self.dispatch_wire.fields[1].count if keep_fp8 else 0
        x_SD = torch.empty(
            count,
            self.config.hidden_size,
            dtype=torch.uint8 if keep_fp8 else dtype,
            device=device,
        )
        scales_shape = (count, num_scales) if keep_fp8 else (1, 1)
        scales_S = torch.empty(scales_shape, dtype=torch.float32, device=device)
        experts_S = torch.empty(count, dtype=torch.int32, device=device)
        weights_S = torch.empty(count, dtype=torch.float32, device=device)
        self._receive_rows(pending, counts_W, x_SD, scales_S, experts_S, weights_S, num_scales)
        if keep_fp8:
            format, codes = self.dispatch_wire.quant_format, x_SD.view(torch.float8_e4m3fn)
            assert format is not None, "fp8 is quantized"
            x_SD = QuantTensor(format, codes, {"scale": scales_S}, dtype)
        return DispatchedTokens(x_SD, experts_S, weights_S, SymmetricHandle(pending, counts_W))

    def combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> Tensor:
        self.start_combine(y_SD, dispatched)
        return self.finish_combine(dispatched)

    def start_combine(self, y_SD: Tensor, dispatched: DispatchedTokens) -> None:
        """Sum the results of each row and write them into the memory of their source ranks."""
        _reject_gradients(y_SD)
        self._send_results(y_SD.contiguous(), dispatched.handle)

    def finish_combine(self, dispatched: DispatchedTokens) -> Tensor:
        """Wait for the results of all ranks and sum those of each token."""
        pending: PendingDispatch = dispatched.handle.pending
        self._wait_flags(pending.step, pending.step, is_combine=True)
        out_TD = torch.empty_like(pending.x_TD, memory_format=torch.contiguous_format)
        if out_TD.shape[0]:
            self._sum_results(pending, out_TD)
        self.in_flight -= 1
        return out_TD

    # ---- kernels -----------------------------------------------------------------------------------

    def _send_rows(
        self,
        pending: PendingDispatch,
        packed_TB: Tensor,
        slots_Tk: Tensor,
        weights_Tk: Tensor,
        counts_W: Tensor,
    ) -> None:
        size, tokens, top_k = self.axis.size, slots_Tk.shape[0], self.config.top_k
        shared = {
            "K": top_k, "K_PADDED": next_power_of_2(top_k),
            "V": self.buffers.experts_per_row, "W": size,
        }  # fmt: skip
        kernels.dispatch_layout_kernel[(size,)](
            slots_Tk, pending.row_index_TW, counts_W, self.step, pending.step, self.status, tokens,
            self.axis.index, self.config.experts_per_rank,
            BLOCK=self.heuristics.dispatch_layout.block_m,
            num_warps=self.heuristics.dispatch_layout.num_warps, **shared,
            **pdl_options(self.buffer.data.device),
        )  # fmt: skip
        kernels.dispatch_send_kernel[(max(tokens, 1), size)](
            packed_TB.view(torch.int32), slots_Tk, weights_Tk,
            pending.row_index_TW, counts_W, self.buffer.peer_pointers_W, pending.step,
            self._counter(), self.status, tokens, self.axis.index, self.config.experts_per_rank,
            pending.rows, self.buffer_bytes, self.rows_offset, self.flags_offset,
            W_PADDED=self._padded_size, HEADER_BYTES=self.buffers.header_bytes,
            ROW_WORDS=self.dispatch_wire.row_bytes // 4, BLOCK=self.send_config.block_n,
            num_warps=self.send_config.num_warps, **shared,
            **pdl_options(self.buffer.data.device),
        )  # fmt: skip

    def _receive_rows(
        self,
        pending: PendingDispatch,
        counts_W: Tensor,
        x_SD: Tensor,
        scales_S: Tensor,
        experts_S: Tensor,
        weights_S: Tensor,
        num_scales: int,
    ) -> None:
        """`num_scales`: of a row that stays in FP8; 0: rows are dequantized."""
        experts_per_row = self.buffers.experts_per_row
        scale_offsets = [field.offset for field in self.dispatch_wire.fields[1:]]
        scales_offset, token_scale_offset = (scale_offsets + [0, 0])[:2]
        kernels.dispatch_receive_kernel[(pending.rows, self.axis.size)](
            self.buffer.peer_pointers_W, pending.step, counts_W, x_SD, scales_S, experts_S, weights_S,
            self.axis.index, self.config.experts_per_rank, pending.rows, self.buffer_bytes,
            self.rows_offset, scales_offset, token_scale_offset,
            V=experts_per_row, V_PADDED=next_power_of_2(experts_per_row),
            HEADER_BYTES=self.buffers.header_bytes, ROW_BYTES=self.dispatch_wire.row_bytes,
            D=self.config.hidden_size, BLOCK=self.receive_config.block_n,
            FORMAT=self.config.dispatch_format,
            NUM_SCALES=num_scales, SCALES_PADDED=next_power_of_2(max(num_scales, 1)),
            num_warps=self.receive_config.num_warps,
            **pdl_options(self.buffer.data.device),
        )  # fmt: skip

    def _send_results(self, y_SD: Tensor, handle: SymmetricHandle) -> None:
        rows = handle.pending.rows
        max_rows = max(1, rows * self.axis.size)
        kernels.combine_send_kernel[(min(max_rows, self.heuristics.dispatch_combine_programs),)](
            y_SD, handle.counts_W, self.buffer.peer_pointers_W, handle.pending.step,
            self._counter(), self.status,
            self.axis.index, self.config.max_tokens, rows,
            self.buffer_bytes, self.returns_offset, self.flags_offset,
            V=self.buffers.experts_per_row, M=self.buffers.ranks_per_token,
            HEADER_BYTES=self.buffers.header_bytes, ROW_BYTES=self.combine_wire.row_bytes,
            D=self.config.hidden_size, W=self.axis.size, W_PADDED=self._padded_size,
            BLOCK=self.combine_config.block_n, FORMAT=self.config.combine_format,
            num_warps=self.combine_config.num_warps,
            **pdl_options(self.buffer.data.device),
        )  # fmt: skip

    def _sum_results(self, pending: PendingDispatch, out_TD: Tensor) -> None:
        block = self.combine_config.block_n
        grid = (out_TD.shape[0], cdiv(self.config.hidden_size, block))
        kernels.combine_reduce_kernel[grid](
            self.buffer.peer_pointers_W, pending.step, pending.row_index_TW, out_TD,
            self.axis.index, self.buffer_bytes, self.returns_offset,
            M=self.buffers.ranks_per_token, W=self.axis.size, W_PADDED=self._padded_size,
            ROW_BYTES=self.combine_wire.row_bytes, D=self.config.hidden_size, BLOCK=block,
            FORMAT=self.config.combine_format,
            **pdl_options(self.buffer.data.device),
        )  # fmt: skip

    def check(self) -> None:
        """Raise the error that the device has recorded, if any. Waits for the device."""
        code, rank = self.status.tolist()
        if code == kernels.TIMED_OUT.value:
            raise RankError(
                f"rank {self.axis.ranks[rank]} did not answer: its flag never arrived",
                ranks=(self.axis.ranks[rank],),
                where=str(self.axis),
                next="look at the last output of that process; start all ranks again",
            )
        if code == kernels.CAPACITY_EXCEEDED.value:
            raise CapacityError(
                f"rank {self.axis.ranks[rank]} had more than {self.buffers.rows} rows for one rank",
                where=str(self.axis),
                next="use a larger capacity, fewer tokens a step, or replicas of the busiest "
                "experts; rows past the capacity were not written",
            )
        if code == kernels.INVALID_EXPERT.value:
            raise ArgumentError(
                f"rank {self.axis.ranks[rank]} sent a token to an expert that doesn't exist",
                where=f"{self.axis.size * self.config.experts_per_rank} slots",
                next="check the router and the replica table",
            )
        if code == kernels.DUPLICATE_EXPERT.value:
            raise ArgumentError(
                f"rank {self.axis.ranks[rank]} sent a token to more experts of a rank than it has",
                where=f"{self.config.experts_per_rank} experts a rank",
                next="the experts of a token must differ: check the router",
            )

    def __str__(self) -> str:
        return f"symmetric-memory dispatcher, {self.axis}\n{self.buffers}"

    @property
    def _padded_size(self) -> int:
        return next_power_of_2(self.axis.size)

    def _counter(self) -> Tensor:
        return acquire_counters(self.buffer.data.device, 1)

    def _wait_flags(self, step: Tensor, counts_W: Tensor, is_combine: bool) -> None:
        kernels.wait_flags_kernel[(1,)](
            self.buffer.peer_pointers_W, step, counts_W, self.status, self.axis.index,
            self.max_polls, self.buffer_bytes, self.flags_offset, W=self.axis.size,
            W_PADDED=self._padded_size, IS_COMBINE=is_combine, num_warps=1,
            **pdl_options(self.buffer.data.device),
        )  # fmt: skip

    def _check_inputs(self, x_TD: Tensor, slots_Tk: Tensor, num_slots: int) -> None:
        config = self.config
        tokens, top_k = slots_Tk.shape
        hidden_size = x_TD.shape[1]
        if tokens > config.max_tokens or top_k != config.top_k or hidden_size != config.hidden_size:
            raise ArgumentError(
                f"{tokens} tokens of {hidden_size} values, {top_k} experts each",
                where=f"buffers for {config.max_tokens} tokens of {config.hidden_size} values, "
                f"{config.top_k} experts each",
                next="make the dispatcher for the largest step",
            )
        if self.step_tokens is not None and tokens > self.step_tokens:
            raise ArgumentError(
                f"{tokens} tokens in a step for which all ranks agreed on at most {self.step_tokens}",
                where=str(self.axis),
                next="call set_step_tokens with the largest number of all ranks, or with None",
            )
        if num_slots != config.experts_per_rank * self.axis.size:
            raise ArgumentError(
                f"{num_slots} slots, but the dispatcher was made for {config.experts_per_rank} x "
                f"{self.axis.size} ranks"
            )
        if self.in_flight == NUM_BUFFERS:
            raise ArgumentError(
                f"{NUM_BUFFERS} steps are in flight already, and there are {NUM_BUFFERS} buffers",
                next="combine the first one before a third is dispatched",
            )
        _reject_gradients(x_TD)


def _reject_gradients(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ArgumentError(
            "SymmetricMemoryDispatcher has no gradients",
            next="run under torch.no_grad(), or train with DifferentiableDispatcher or "
            "AllToAllDispatcher",
        )
